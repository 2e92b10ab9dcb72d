"""`come demo`: methods side by side on one stream, in a browser."""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress
from typing import Annotated

import typer

from come.bench.cli.options import Debug, option
from come.bench.cli.serve import check_installed
from come.errors import ConfigError, require


def demo(
    host: Annotated[str, option("Where to listen; 0.0.0.0 lets others in without authentication.")] = "127.0.0.1",
    port: Annotated[int, option("From 1 to 65535.")] = 7860,
    debug: Debug = False,
) -> None:
    """Watch EM, COME, the recommended method and No Adapt on one corrupted stream, in a browser.

    Needs [bold]pip install -e ".\\[demo]"[/], and no network. Ctrl-C ends it.
    """
    require(1 <= port <= 65535, "--port", port, "from 1 to 65535")
    with _listen(host, port) as listening, suppress(KeyboardInterrupt):
        check_installed("demo", "demo", ("come.bench.demo.page",))
        import uvicorn

        from come.bench.demo.page import create

        logging.getLogger("come").addHandler(logging.NullHandler())  # what the guard says is on the page
        config = uvicorn.Config(create(), log_level="critical", timeout_graceful_shutdown=1)
        typer.echo(f"come demo on http://{f'[{host}]' if ':' in host else host}:{port}; Ctrl-C ends it")
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """A socket there, before anything slow is done."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        repair = "another program listens there; give another --port" if error.errno == errno.EADDRINUSE else ""
        reason = repair or f"{error.strerror}; give --host 127.0.0.1, or a --port from 1024 to 65535"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error

"""Closes the routes of Gradio that the demo's page does not need."""

from __future__ import annotations

import json

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST = 4096  # bytes of a request body; the page needs about 100
READ = ("/", "/favicon.ico", "/manifest.json", "/theme.css", "/config", "/gradio_api/queue/data")
READ_BELOW = ("/assets/", "/static/")
POSTED = tuple(f"/gradio_api/{route}" for route in ("queue/join", "run/predict", "cancel", "reset"))
"""What the page requests, and where it posts to."""


class Closed:
    """Middleware that passes on what the page needs of Gradio, and nothing else.

    Gradio serves more: any visitor, and any page that a visitor's browser shows, may upload files without a limit, let the
    server fetch an address, or write links, and the files stay.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        path, method = scope.get("path", ""), scope.get("method")
        read = method in ("GET", "HEAD") and (path in READ or path.startswith(READ_BELOW))
        if read or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif method == "POST" and path in POSTED:
            await self._posted(scope, receive, send)
        else:
            await PlainTextResponse("not part of this page", 404)(scope, receive, send)

    async def _posted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a post if it comes from this page and holds values of its controls."""
        body, more = b"", True
        while more and len(body) <= LARGEST:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > LARGEST:
            await PlainTextResponse(f"a body may have {LARGEST} bytes at most", 413)(scope, receive, send)
        elif Headers(scope=scope).get("sec-fetch-site", "same-origin") != "same-origin":
            await PlainTextResponse("another page may not send this", 403)(scope, receive, send)
        elif (values := _values(body)) is None:
            await PlainTextResponse("the body must be values of the controls, in JSON", 400)(scope, receive, send)
        else:
            first: list[Message] = [{"type": "http.request", "body": values}]

            async def again() -> Message:
                return first.pop() if first else await receive()

            await self._app(scope, again, send)


def _values(body: bytes) -> bytes | None:
    """The values of the controls, serialized again; None if one is a list or an object: Gradio would fetch a file."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    data = found.get("data")
    values = [value for key, value in found.items() if key != "data"] + (data if isinstance(data, list) else [data])
    return None if any(isinstance(value, (dict, list)) for value in values) else json.dumps(found).encode()

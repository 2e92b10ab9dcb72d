"""Which code made a result: the git commit of the library that runs."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

CHANGED = "-changed"
"""Behind a commit whose files were changed since."""
PACKAGE = Path(__file__).parents[1]


@cache
def commit() -> str | None:
    """40 hexadecimal digits, with `CHANGED` behind them where the library's files differ; None where nobody knows.

    A checkout is asked first, then what pip noted of an installation from a repository.
    """
    return _of_checkout() or _of_installation()


def _of_checkout() -> str | None:
    try:
        _git(
            "ls-files", "--error-unmatch", "version.py"
        )  # a virtual environment may be in the repository of something else
        return _git("rev-parse", "HEAD").strip() + CHANGED * bool(_git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    # a hook names its own repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, check=True, text=True, timeout=10).stdout


def _of_installation() -> str | None:
    try:
        noted = json.loads(distribution("come-tta").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return None
    found = noted.get("vcs_info", {}).get("commit_id")
    return found if isinstance(found, str) else None

"""Reports what a guard has seen: to the log, to the user's handler; a handler that fails stops nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from come.errors import warn
from come.guard.config import Event
from come.step.engine import Engine

log = logging.getLogger("come.guard")
QUIET = ("healthy", "raised", "statistics")
"""Kinds of events that are no reason to worry."""


def report(engine: Engine, events: list[Event]) -> list[Event]:
    """Report events; returns an event for each failure of the user's handler."""
    failed, handler = [], None if engine.guard is None else engine.guard.on_event
    for event in events:
        if engine.writes:  # on several ranks once
            level = logging.INFO if event.kind in QUIET else logging.WARNING
            words = (engine.method.name, event.step, event.message)
            log.log(level, "%s, step %d: %s", *words, extra={"come": event._asdict()})
        if event.kind == "probabilities":
            warn(event.message)
        if handler is not None:
            failed += safely(engine, "on_event", event.step, handler, event)
    return failed


def safely(engine: Engine, what: str, step: int, call: Callable[..., Any], *args: Any) -> list[Event]:
    """Call a user's function; returns an event if it fails."""
    try:
        call(*args)
    except Exception as error:
        event = Event("callback_failed", step, f"{what} failed: {error}", {})
        log.exception("%s: %s failed; adaptation goes on", engine.method.name, what, extra={"come": event._asdict()})
        return [event]
    return []

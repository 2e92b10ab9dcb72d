"""`RequestError`: why a request was refused, and with which HTTP status."""

from __future__ import annotations

import logging

from come.errors import ComeError, InputError, shown
from come.streams.names import NAME, VALID

log = logging.getLogger("come.serve")


class RequestError(ComeError):
    """A refused request; `status` is its HTTP status.

    Example:
        >>> RequestError("there is no such tenant", 404).status
        404
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def refusal(error: Exception, what: str) -> RequestError:
    """What the client is told of an error; what it must not see, such as paths and other tenants, goes to the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, InputError):
        return RequestError(str(error))
    log.error("%s failed", what, exc_info=error)
    return RequestError("the server could not run this request; its log says why", 500)


def check_name(name: object) -> None:
    """Raise unless this is the name of a tenant."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"a tenant's name must be {VALID}, got {shown(name)}")

"""What a tenant is told."""

from __future__ import annotations

from come.errors import ComeError, shown
from come.streams.names import NAME


class RequestError(ComeError):
    """A request that is not answered, and why; `status` is the HTTP status that says so.

    Example:
        >>> str(RequestError("there is no such tenant", 404))
        'there is no such tenant'
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        """The message alone."""
        return str(self.args[0])


def check_name(name: object) -> None:
    """Refuse what is not the name of a tenant.

    >>> check_name("north-1")
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"a tenant's name must be 1 to 128 letters, digits and _ . @ + : = -, no dot first, got {shown(name)}"
        )

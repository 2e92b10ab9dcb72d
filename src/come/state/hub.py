"""Files on the Hugging Face Hub: hf://OWNER/REPOSITORY/FILE."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, NamedTuple

from come.errors import ComeError, ConfigError, MissingError, StateError, shown

SCHEME = "hf://"


class Place(NamedTuple):
    """A file of a repository on the Hub."""

    repository: str
    file: str
    revision: str | None = None

    @classmethod
    def of(cls, path: str | PathLike[str]) -> Place | None:
        """Read hf://OWNER/REPOSITORY[@REVISION]/FILE; None for the path of a file on this machine.

        Example:
            >>> Place.of("hf://acme/states@v2/door/tent.safetensors")
            Place(repository='acme/states', file='door/tent.safetensors', revision='v2')
        """
        if not (isinstance(path, str) and path.startswith(SCHEME)):
            return None
        owner, _, rest = path.removeprefix(SCHEME).partition("/")
        name, _, file = rest.partition("/")
        name, at, revision = name.partition("@")
        if not (owner and name and file) or bool(at) != bool(revision):
            raise ConfigError(f"path must be hf://OWNER/REPOSITORY[@REVISION]/FILE, got {shown(path)}")
        return cls(f"{owner}/{name}", file, revision or None)

    def __str__(self) -> str:
        return f"{SCHEME}{self.repository}{f'@{self.revision}' if self.revision else ''}/{self.file}"

    def upload(self, data: bytes, message: str) -> None:
        """Commit `data` as that file; the repository must exist."""
        hub = _hub()
        with explained(StateError, str(self), self.repository, self.revision, "save to a file", writing=True):
            hub.upload_file(
                path_or_fileobj=data,
                path_in_repo=self.file,
                repo_id=self.repository,
                revision=self.revision,
                commit_message=message,
            )

    def download(self) -> str:
        """Download the file to the Hub's cache, if it is not there; returns its path."""
        hub = _hub()
        with explained(StateError, str(self), self.repository, self.revision, "load a file"):
            try:
                return str(hub.hf_hub_download(self.repository, self.file, revision=self.revision))
            except hub.errors.EntryNotFoundError as error:
                if isinstance(error, OSError):  # not in the cache, and the Hub does not answer
                    raise
                raise StateError(f"{self.repository} has no file {self.file!r}; check the name") from error


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ModuleNotFoundError as error:
        message = f"{SCHEME} needs {error.name}, which is missing; install it with: pip install huggingface_hub"
        raise MissingError(message, name=error.name) from error
    return huggingface_hub


@contextmanager
def explained(
    kind: type[ComeError], name: str, repository: str, revision: str | None, instead: str, *, writing: bool = False
) -> Iterator[None]:
    """Raise errors of the Hub as `kind`, with the repair; `instead` says what works without the Hub."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    can, login = "write" if writing else "read", "log in: hf auth login"
    try:
        yield
    except hub.GatedRepoError as error:
        raise kind(f"{name} is gated; accept its terms at {constants.ENDPOINT}/{repository}, and {login}") from error
    except hub.RepositoryNotFoundError as error:
        what = f"make it (hf repos create {repository}), and" if writing else "check the name, and if it is private"
        raise kind(f"the Hub has no model {repository!r} that you can {can}; {what} {login}") from error
    except hub.RevisionNotFoundError as error:
        raise kind(f"{repository} has no revision {revision!r}; leave it out, or give one that it has") from error
    except hub.LocalTokenNotFoundError as error:
        raise kind(f"{name} needs a login; {login}") from error
    except OSError as error:
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise kind(f"you may not {can} {name}; log in with a token that may: hf auth login") from error
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise kind(f"cannot {'upload' if writing else 'download'} {name}: {said}; try again, or {instead}") from error

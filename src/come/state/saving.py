"""The state of a stream as a flat dictionary of tensors, and as a safetensors file.

weights            (P,) adapted weights
moment.<name>      moments of the optimizer
state.<name>       memory of the method: averages, counters, buffers
guard.<name>       state of the guard, if there is one
count              batches seen
selected           share of the samples that drove the last update
threshold          the abstention threshold, if it follows the stream
configuration      the method, its hyperparameters, the objective, the guard and the abstention promise: bytes of a JSON text
fingerprint        SHA-256 of the source model and of what the method has computed from source data
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as deserialized
from safetensors.torch import save as serialized
from torch import Tensor, nn

from come.abstain import Abstention, Promise
from come.errors import StateError, saved_number
from come.guard.watch import MOST, Watch
from come.method import Method
from come.model.locks import untracked
from come.model.ranks import Ranks
from come.optim import adam, sgd
from come.state.files import write
from come.state.hub import Place
from come.step.transition import StreamState

if TYPE_CHECKING:
    from come.step.engine import Engine

FORMAT, VERSION = "come-state", 7


def collect(engine: Engine, now: StreamState, method: Method | None = None) -> dict[str, Tensor]:
    """A stream's state as copied tensors; `method` is the stream's, if it differs from the engine's."""
    saved = {"weights": now.weights, "count": torch.tensor(now.count)}
    saved["selected"] = torch.tensor(now.selected, dtype=torch.float64)
    saved |= {f"moment.{name}": value for name, value in now.moments.items()}
    saved |= {f"state.{name}": value for name, value in (now.state or {}).items()}
    if now.watch is not None:
        saved |= {f"guard.{name}": value for name, value in now.watch.tensors().items()}
    known = now.abstention
    if known is not None and known.threshold is not None:
        saved["threshold"] = known.threshold
    about = configuration(engine, method) | {"tensors": {name: _kind(value) for name, value in saved.items()}}
    about["promise"] = None if known is None else asdict(known.promise)
    saved["configuration"] = _bytes(json.dumps(about, sort_keys=True).encode())
    saved["fingerprint"] = _bytes(fingerprint(engine))
    return {name: value.detach().clone() for name, value in saved.items()}


def _kind(value: Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}"


def _bytes(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def restored(engine: Engine, saved: Mapping[str, Tensor], method: Method | None = None) -> StreamState:
    """Rebuild a stream's state from what `collect` returned; raises if anything does not fit."""
    for name in ("weights", "count", "selected", "configuration", "fingerprint"):
        if name not in saved:
            raise StateError(f"this is not the state of an adapter: {name!r} is missing")
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise StateError(f"{name!r} of the state must be a tensor, got {type(value).__name__}")
    _same_configuration(configuration(engine, method), saved)
    if not torch.equal(saved["fingerprint"].cpu(), _bytes(fingerprint(engine))):
        raise StateError(
            f"this state belongs to another source model than this {type(engine.user_model).__name__}, or to other source "
            "data; load the weights that the adapter was made with"
        )
    return resumed(engine, saved)


def resumed(engine: Engine, saved: Mapping[str, Tensor]) -> StreamState:
    """The same for a state that this process has saved itself; the model may have been moved or cast since."""
    now, rule = engine.first(), engine.transition.rule
    parts: dict[str, dict[str, Tensor]] = {"moment": {}, "state": {}, "guard": {}}
    for key, value in saved.items():
        kind, _, name = key.partition(".")
        if kind in parts and name:
            parts[kind][name] = value
    for name in ("weights", *(f"{kind}.{name}" for kind in ("moment", "state") for name in parts[kind])):
        if not _is_finite(saved[name]):
            raise StateError(f"{name!r} of the state is not finite; use an older snapshot")
    shapes = {"weights": now.weights.shape}
    if isinstance(rule, (sgd, adam)):
        shapes |= {f"moment.{name}": value.shape for name, value in now.moments.items()}
        if extra := parts["moment"].keys() ^ now.moments.keys():
            expected = sorted(now.moments)
            raise StateError(f"the moments of the optimizer must be {expected}, the state differs in {sorted(extra)}")
        for name in rule.not_negative:
            if (saved[f"moment.{name}"] < 0).any():
                raise StateError(f"'moment.{name}' of the state must be >= 0 everywhere; use an older snapshot")
    for name, shape in shapes.items():
        if saved[name].shape != shape or not saved[name].is_floating_point():
            raise StateError(f"{name!r} of the state must be float of shape {tuple(shape)}, got {_kind(saved[name])}")
    count = int(saved_number("count", saved["count"], 0, MOST, whole=True))
    memory = {name: value.clone() for name, value in parts["state"].items()}
    state = StreamState(
        saved["weights"].to(now.weights).clone(),
        {name: value.clone() for name, value in parts["moment"].items()},
        memory if memory or count else None,
        count,
        None if engine.guard is None else Watch.of(parts["guard"], engine.guard, now.weights),
        saved_number("selected", saved["selected"], 0, 1),
        _abstention(engine, _about(saved)[2], saved.get("threshold")),
    )
    return state.to(engine.device, engine.method.on_host)


def _is_finite(value: Tensor) -> bool:
    try:
        return not value.is_complex() and bool(value.isfinite().all())
    except (RuntimeError, NotImplementedError):  # of a sparse layout, say
        return False


def _abstention(engine: Engine, promise: Promise | None, threshold: Tensor | None) -> Abstention | None:
    """The engine's promise, else the state's; the threshold is kept if it belongs to the same promise."""
    mine = engine.promise or promise
    if mine is None or mine != promise or threshold is None:
        return None if mine is None else Abstention.begin(mine, engine.device)
    if not mine.rate or threshold.ndim or not threshold.isfinite():
        limit = "one finite number, of a promise that follows the stream"
        raise StateError(f"'threshold' of the state must be {limit}, got {threshold}")
    return Abstention(mine, threshold.clone()).to(engine.device)


def _about(saved: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, str], Promise | None]:
    """The configuration in a state, its tensors by name, and its promise."""
    try:
        found = json.loads(bytes(saved["configuration"].tolist()))
        tensors, promised = found.pop("tensors"), found.pop("promise", None)
        return dict(found), dict(tensors), None if promised is None else Promise(**promised)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise StateError(f"the configuration in this state cannot be read: {error}") from error


def _same_configuration(configuration: dict[str, Any], saved: Mapping[str, Tensor]) -> None:
    """Raise `StateError` unless the state is complete, and of an adapter with this configuration."""
    theirs, tensors, _ = _about(saved)
    mine = json.loads(json.dumps(configuration))
    differ = [key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)]
    if differ:
        key = min(differ, key=lambda k: (k != "method", k))
        raise StateError(
            f"this state was saved with {key}={theirs.get(key)!r}, this adapter has {mine.get(key)!r}; make the adapter with "
            "the arguments that it was saved with"
        )
    given = {name: _kind(value) for name, value in saved.items() if name not in ("configuration", "fingerprint")}
    for name in sorted({*tensors, *given}):
        must, found = tensors.get(name, "absent"), given.get(name, "nothing")
        if tensors.get(name) != given.get(name):
            raise StateError(f"{name!r} of the state must be {must}, got {found}")


def configuration(engine: Engine, method: Method | None = None) -> dict[str, Any]:
    """All that decides the numbers beside the model: method, hyperparameters, objective, guard."""
    method = method or engine.method
    guard = None if engine.guard is None else asdict(engine.guard)
    if guard is not None:
        del guard["on_event"]
    names = [name for name in method.hyperparameters() if name not in method.once]
    return (
        {"method": method.name} | {name: _described(getattr(method, name, None)) for name in names} | {"guard": guard}
    )


def agree(engine: Engine, ranks: Ranks) -> None:
    """Raise `ConfigError` unless all ranks adapt the same model in the same way; see `Ranks.agree`."""
    about = json.dumps(configuration(engine), sort_keys=True)
    ranks.agree(engine.transition.fixed, about, lambda: fingerprint(engine), engine.device)


def _described(value: Any) -> Any:
    """A value for JSON, the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_described(item) for item in value]
    if isinstance(value, Tensor):
        return hashlib.sha256(_raw(value)).hexdigest()
    if isinstance(value, nn.Module):
        return type(value).__name__
    if is_dataclass(value) and not isinstance(value, type):
        return repr(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    inside = {key: _described(item) for key, item in vars(value).items()} if hasattr(value, "__dict__") else repr(value)
    return [type(value).__qualname__, inside]


def save(engine: Engine, state: Callable[[], StreamState], path: str | os.PathLike[str]) -> None:
    """Write a stream's state to `path` atomically; hf://OWNER/REPOSITORY/FILE uploads it to the Hugging Face Hub."""
    place = Place.of(path)

    @untracked()
    def pack() -> tuple[bytes, int]:
        now = state()
        data = packed(engine, now)
        if place is None:
            write(Path(path), data)
        return data, now.count

    data, count = engine.lock.run(pack)
    if place is not None:  # outside of the lock: an upload may take long
        place.upload(data, f"State of {engine.method.name} after {count} batches")


def packed(engine: Engine, state: StreamState, note: str = "", method: Method | None = None) -> bytes:
    """The content of a file of `save`; `note` is a text of the caller, which `note_of` reads from the file."""
    tensors = {name: value.contiguous() for name, value in collect(engine, state, method).items()}
    about = {"format": FORMAT, "version": str(VERSION), "method": engine.method.name, "note": note}
    return serialized(tensors, metadata=about | {"sha256": _digest(tensors, about)})


def note_of(path: str | os.PathLike[str]) -> str:
    """The note in a file, after a check of its checksum; empty if it has none."""
    return _opened(path)[1]["note"]


def read(path: str | os.PathLike[str], method: str) -> dict[str, Tensor]:
    """The tensors in a file of `save`, after a check of its checksum."""
    place = Place.of(path)
    tensors, about = _opened(path if place is None else place.download())
    if about["method"] != method:
        raise StateError(f"{path} was saved by {about['method']!r}, not by {method!r}")
    return tensors


def _opened(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in a file and its metadata, checked."""
    try:
        data = Path(path).read_bytes()
        tensors = deserialized(data)  # safe_open makes an interrupt a ValueError
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    except (OSError, SafetensorError, KeyError) as error:
        raise StateError(f"cannot read {path}: {error}; give a file that save() wrote") from error
    if about.get("format") != FORMAT:
        given = about.get("format")
        raise StateError(f"{path} must have format {FORMAT!r}, got {given!r}; give a file that save() wrote")
    if about.get("version") != str(VERSION):
        raise StateError(
            f"{path} must have format version {VERSION}, got {about.get('version')!r}; load it with the version of come that "
            "wrote it"
        )
    if about.pop("sha256", None) != _digest(tensors, about) or not {"method", "note"} <= about.keys():
        raise StateError(f"{path}: checksum mismatch; use an older snapshot")
    return tensors, about


def _raw(value: Tensor) -> bytes:
    value = value.detach().cpu().contiguous()
    return ctypes.string_at(value.data_ptr(), value.numel() * value.element_size())


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """SHA-256 over names, shapes, types and bytes of the tensors, and the metadata."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(_raw(tensors[name]))
    return digest.hexdigest()


def fingerprint(engine: Engine) -> bytes:
    """SHA-256 over every value of the source model, and over what `setup` has computed from source data.

    Cached while the model's tensors stay the same: hashing hundreds of megabytes takes a second.
    """
    model = engine.user_model
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    known = [(id(value), value._version, value.device, value.dtype) for _, value in tensors]
    found = engine.fingerprint
    if found.get("known") != known:
        digest = hashlib.sha256()
        for name, value in tensors:
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(_raw(value))
        plain = dict(tensors)
        for name, value in model.state_dict().items():
            if name not in plain:  # extra state, packed weights of quantized layers
                digest.update(name.encode() + _pickled(name, value))
        for name, value in sorted(engine.transition.fixed.items()):
            if isinstance(value, Tensor):
                digest.update(f"{name} {tuple(value.shape)}".encode())
                digest.update(_raw(value))
        found.update(known=known, digest=digest.digest())
    return cast(bytes, found["digest"])


def _pickled(name: str, value: Any) -> bytes:
    try:
        if isinstance(value, Tensor):
            return _raw(value.int_repr() if value.is_quantized else value) + repr(value.dtype).encode()
        if isinstance(value, (tuple, list)):
            return b"".join(_pickled(name, item) for item in value)
        return pickle.dumps(value, protocol=4)
    except Exception as error:
        raise StateError(
            f"the model holds {name!r}, a {type(value).__name__} that cannot be compared: its state cannot be saved or "
            "loaded safely"
        ) from error

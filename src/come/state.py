"""The state of an adapter as a flat dictionary of tensors, and as a safetensors file.

parameter.<name>           adapted weights
optimizer.<name>.<moment>  moments of the optimiser
state.<name>               averages, counters, Fisher matrices: what the method remembers
guard.<name>               what the guard has learned, if there is one
count                      batches seen
fingerprint                SHA-256 that tells the method and its source model from others
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialised
from torch import Tensor

from come.errors import StateError
from come.files import replacing

if TYPE_CHECKING:
    from come.method import Method

FORMAT, VERSION = "come-state", 3


def collect(method: Method) -> dict[str, Tensor]:
    """State of `method` as copied tensors."""
    saved: dict[str, Tensor] = {f"parameter.{name}": p for name, p in method.parameters.items()}
    if method.optimizer is not None:
        for name, p in method.parameters.items():
            for key, value in method.optimizer.state[p].items():
                saved[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    saved |= {f"state.{name}": value for name, value in method.state.items()}
    if method.guard is not None:
        method.guard.settle(wait=True)
        saved |= {f"guard.{name}": value for name, value in method.guard.state().items()}
    saved["count"] = torch.tensor(method.count)
    saved["fingerprint"] = fingerprint(method)
    return {name: value.detach().clone() for name, value in saved.items()}


def restore(method: Method, saved: Mapping[str, Tensor]) -> None:
    """Put `saved` into `method`; if anything does not fit, raise and change nothing."""
    saved = dict(saved)
    print_ = saved.pop("fingerprint", None)
    count = saved.pop("count", None)
    if print_ is None or count is None:
        raise StateError("this is not the state of an adapter: 'fingerprint' or 'count' is missing")
    if not torch.equal(print_.cpu(), fingerprint(method)):
        raise StateError(
            f"this state belongs to another method or another source model than this {method.name} on "
            f"{type(method.model).__name__}; build the adapter as it was built when the state was saved"
        )
    parameters: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {name: {} for name in method.parameters}
    memory: dict[str, Tensor] = {}
    learned: dict[str, Tensor] = {}
    for key, value in saved.items():
        kind, _, name = key.partition(".")
        if kind == "parameter" and name in method.parameters:
            parameters[name] = value
        elif kind == "optimizer" and name.rpartition(".")[0] in method.parameters:
            owner, _, moment = name.rpartition(".")
            moments[owner][moment] = value
        elif kind == "state" and name:
            memory[name] = value
        elif kind == "guard" and name:
            learned[name] = value
        else:
            raise StateError(f"the state holds {key!r}, which this {method.name} does not know")
    for name, p in method.parameters.items():
        if name not in parameters or parameters[name].shape != p.shape:
            found = tuple(parameters[name].shape) if name in parameters else "missing"
            raise StateError(f"parameter {name!r} of the state is {found}; it must have shape {tuple(p.shape)}")
        for key in method.optimizer.state[p] if method.optimizer is not None else ():
            if key == "momentum_buffer" and key not in moments[name]:
                raise StateError(f"the state has no momentum for parameter {name!r}")
        for key, value in moments[name].items():
            if value.ndim and value.shape != p.shape:
                raise StateError(f"{key} of {name!r} has shape {tuple(value.shape)}; it must be {tuple(p.shape)}")
    if missing := set(method.initial_state()) - set(memory):
        raise StateError(f"the state lacks {', '.join(sorted(missing))}")
    if method.guard is not None and learned:
        method.guard.check(learned, method)
    # Everything fits: from here on nothing can fail.
    for name, p in method.parameters.items():
        p.copy_(parameters[name])
        if method.optimizer is not None:
            method.optimizer.state[p] = {
                key: (value.to(p) if value.shape == p.shape else value.to(p.device)).clone()
                for key, value in moments[name].items()
            }
    method.state = {name: method.placed(name, value).clone() for name, value in memory.items()}
    method.count = int(count)
    if method.guard is not None:
        if learned:
            method.guard.restore(learned)
        else:
            method.guard.forget()


def save(method: Method, path: str | os.PathLike[str]) -> None:
    """Write the state of `method` to `path`: first beside it, then by rename, so that no half a file is ever there."""
    path = Path(path)
    tensors = {name: value.contiguous() for name, value in collect(method).items()}
    about = {"format": FORMAT, "version": str(VERSION), "method": method.name, "sha256": _digest(tensors)}
    data = serialised(tensors, metadata=about)  # safetensors' own save_file writes to a name of its own first
    try:
        with replacing(path) as beside:
            beside.write_bytes(data)
    except OSError as error:
        raise StateError(
            f"cannot write {path}: {error.strerror}; choose a folder that exists and is writable, and has room"
        ) from error


def load(method: Method, path: str | os.PathLike[str]) -> None:
    """Read `path` into `method`; a file that is not there, not whole or not ours changes nothing."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot read {path}: {error}; give a file that save() wrote") from error
    if metadata.get("format") != FORMAT:
        raise StateError(f"{path} has format {metadata.get('format')!r}, not {FORMAT!r}; give a file that save() wrote")
    if metadata.get("version") != str(VERSION):
        raise StateError(
            f"{path} has version {metadata.get('version')!r} of the format, this come reads {VERSION}; load it with the "
            "version of come that wrote it"
        )
    if metadata.get("sha256") != _digest(tensors):
        raise StateError(f"{path} is damaged: its contents do not match their checksum; use an older snapshot")
    if metadata.get("method") != method.name:
        raise StateError(f"{path} was saved by {metadata.get('method')!r}, not by {method.name!r}")
    restore(method, tensors)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(ctypes.string_at(value.data_ptr(), value.numel() * value.element_size()))
    return digest.hexdigest()


def fingerprint(method: Method) -> Tensor:
    """SHA-256 (32 bytes) over the method's name and the source model.

    What adapts enters whole; of every other tensor of the model its name, type, shape and first values are enough to tell
    two models apart without reading hundreds of megabytes.
    """
    digest = hashlib.sha256(method.name.encode())
    for name, value in method.model.state_dict().items():
        head = method.source_values.get(name, value.flatten()[:64]).detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(ctypes.string_at(head.data_ptr(), head.numel() * head.element_size()))
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)

"""Weights in files that others made: read as plain tensors, or refused. Nothing in them is executed."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from come.bench.data.reading import require_regular
from come.errors import ModelError, one_line


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, floating-point ones as float32; none is larger than what the file holds of it.

    It is a safetensors file, or a torch file of a state dict, by itself or under "state_dict" or "model".

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"weight": torch.ones(2)}, Path(folder) / "w.pth")
        ...     read_weights(Path(folder) / "w.pth")
        {'weight': tensor([1., 1.])}
    """
    path = Path(path)
    try:
        require_regular(path)
        _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: a file is read, or it is not
            if path.suffix == ".safetensors":
                state: Any = load_file(path)
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise ModelError(f"cannot read the checkpoint {path}: {one_line(error, first=True)}") from error
    except Exception as error:  # torch.load raises whatever its unpickler met
        raise ModelError(f"{path} is not a checkpoint of plain tensors: {one_line(error, first=True)}") from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ModelError(f"{path} holds no state dict; save model.state_dict() as safetensors")
    for key, v in state.items():
        if not isinstance(key, str) or v.layout != torch.strided or v.device.type != "cpu" or v.is_quantized:
            raise ModelError(
                f"{path}: {key!r} is not the name of a plain tensor; save model.state_dict() as safetensors"
            )
        if v.untyped_storage().nbytes() < v.numel() * v.element_size():
            raise ModelError(f"{path}: {key!r} of shape {tuple(v.shape)} is larger than what the file holds of it")
    try:
        return {key: v.float() if v.is_floating_point() else v for key, v in state.items()}
    except (RuntimeError, MemoryError) as error:  # NotImplementedError is a RuntimeError: numbers of four bits
        raise ModelError(f"{path} holds numbers that cannot be made float32: {one_line(error, first=True)}") from error


def put_weights(module: nn.Module, state: dict[str, Tensor], name: str, path: str | Path | None) -> None:
    """Put the weights of a checkpoint into a model; `ModelError` if they do not fit."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        said = str(error).strip().splitlines()[1:2] or [str(error)]  # behind "Error(s) in loading state_dict"
        raise ModelError(f"the checkpoint {path} does not fit {name}: {said[0].strip()[:200]}") from error


def head_size(module: nn.Module, state: dict[str, Tensor], classes: int) -> int | None:
    """How many classes the head in a checkpoint has, if it is the head of `module` for another number than `classes`.

    Example:
        >>> head_size(nn.Linear(4, 1000), {"weight": torch.ones(7, 4), "bias": torch.ones(7)}, 1000)
        7
    """
    sizes = {
        len(found)
        for key, own in module.state_dict().items()
        if own.ndim and len(own) == classes and (found := state.get(key)) is not None
        if found.shape != own.shape and found.shape[1:] == own.shape[1:]
    }
    return sizes.pop() if len(sizes) == 1 else None


def _check_archive(path: Path) -> None:
    """Refuse a torch file with compressed parts: torch writes none, and a few bytes can be gigabytes."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            declared = sum(part.file_size for part in archive.infolist())
        if declared > path.stat().st_size:
            raise ValueError(
                f"it unpacks to {declared} bytes, more than it has; save it with torch.save or as safetensors"
            )

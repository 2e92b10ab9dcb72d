"""Export of the adapted model: as a `torch.nn.Module`, a torch.export program or an ONNX file."""

from __future__ import annotations

import copy
import inspect
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from come.errors import ConfigError, InputError, ModelError, missing, require
from come.method import Frozen
from come.model.batchnorm import Layer, StatisticsRule, moments, toward, unit_statistics
from come.model.copies import replaced
from come.model.functional import FunctionalModel
from come.model.inputs import Inputs, at_least_float32, logits_of, unchecked_logits
from come.state.files import replacing, unwritable

KINDS = (".pt2", ".onnx")


class OnBatch(nn.Module):
    r"""A BatchNorm layer that normalizes by its batch, as `Adapter.predict` does, for any batch size.

    .. math:: \mu = (1 - s) \mu_0 + s \mu_B, \quad \sigma^2 = (1 - s) \sigma_0^2 + s \sigma_B^2, \quad s = \frac{n}{n + m}

    with the source's statistics 0, those of the batch B, n samples, and m for the source. A batch with one value per
    channel is normalized by the source's statistics. There is no branch on the size, so one graph fits all.

    Args:
        norm: the layer, with the source's running statistics.
        prior: m, 0 for the statistics of the batch alone.

    Example:
        >>> norm = nn.BatchNorm1d(1, affine=False).eval()
        >>> OnBatch(norm, 0)(torch.tensor([[1.0], [3.0]])).flatten().round(decimals=3)
        tensor([-1.,  1.])
    """

    mean: Tensor | None
    var: Tensor | None

    def __init__(self, norm: nn.BatchNorm2d, prior: int) -> None:
        super().__init__()
        self.prior = prior
        self.eps = norm.eps
        self.register_buffer("mean", norm.running_mean)
        self.register_buffer("var", norm.running_var)
        norm.running_mean, norm.running_var = unit_statistics(Layer(norm, 0, self.mean, self.var))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) -> the same."""
        values = at_least_float32(x)
        own, source = moments(values), None
        if self.mean is not None and self.var is not None:
            source = (self.mean, self.var)
        elif x.numel() == x.shape[1]:
            raise InputError(
                "a BatchNorm layer without running statistics got one value per channel; use a larger batch"
            )
        count = torch.ones_like(values.flatten(1)[:, 0]).sum()  # a tensor: in a graph it follows the batch
        share = count / (count + self.prior) * (count * math.prod(x.shape[2:]) > 1)
        mean, var = (value.view(1, -1, *[1] * (x.ndim - 2)) for value in toward(own, source, share))
        normalized: Tensor = self.norm(((values - mean) * (var + self.eps).rsqrt()).to(x.dtype))
        return normalized

    def extra_repr(self) -> str:
        """The rule, for a repr."""
        return f"statistics={'mixed' if self.prior else 'batch'}"


class _Logits(nn.Module):
    """A model that returns only its logits (B, K)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = unchecked_logits(self.model(*args, **kwargs))
        return logits


def standalone(borrowed: FunctionalModel, frozen: Frozen, rule: StatisticsRule, prior: int) -> nn.Module:
    """A copy of the model with the weights, statistics and head of `frozen`, and with BatchNorm by that rule.

    `prior`: for how many samples the source's statistics count in "mixed".
    """
    model = copy.deepcopy(borrowed.model)
    known = dict(model.named_parameters(remove_duplicate=False))
    for name, value in borrowed.named(frozen.weights).items():
        known[name].data.copy_(value)
    for p in model.parameters():
        p.requires_grad, p.grad = False, None
    if frozen.head is not None:
        name, weight = frozen.head
        linear: Any = model.get_submodule(name)
        linear.weight, linear.bias = nn.Parameter(weight.to(linear.weight), requires_grad=False), None
    if frozen.bias is not None:
        name, bias = frozen.bias
        linear = model.get_submodule(name)
        linear.bias = nn.Parameter(bias.to(linear.weight), requires_grad=False)
    for number, path in enumerate(borrowed.norms):
        norm: Any = model.get_submodule(path)
        if number in frozen.statistics:
            mean, var = frozen.statistics[number]
            norm.running_mean, norm.running_var = mean.to(norm.running_mean), var.to(norm.running_var)
        elif rule != "source":
            model = replaced(model, norm, OnBatch(norm, prior if rule == "mixed" else 0))
    for module in model.modules():
        module.training = False
    return model


def check(path: Path, example: Inputs | None) -> None:
    """Raise if a model cannot be written to that file."""
    require(path.suffix in KINDS, "path", str(path), f"a file that ends in {' or '.join(KINDS)}")
    if example is None:
        raise ConfigError(
            f"{path.name} needs an example: export(path, x), x a batch of 2 or more samples for the model"
        )
    if example.size < 2:
        repair = "with one sample, the exported model would take no other batch size"
        raise InputError(f"example must be a batch of 2 or more samples, got {example.size}; {repair}")
    if path.suffix == ".onnx":
        if torch.__version__ < "2.6":
            repair = "update torch, or export to a .pt2 file"
            raise ConfigError(f"ONNX needs torch 2.6 or newer, got {torch.__version__}; {repair}")
        for name in ("onnx", "onnxscript"):
            try:
                import_module(name)
            except ModuleNotFoundError as error:
                raise missing("export to ONNX", error, "export") from error


def write(model: nn.Module, path: Path, example: Inputs) -> None:
    """Write a model of `standalone` atomically to a .pt2 or .onnx file.

    The exported model takes any batch size; all else about its inputs is fixed as in `example`, 2 or more samples.
    """
    batch = torch.export.Dim("batch", min=1)
    free = example.map_samples(lambda _: {0: batch}, lambda _: None)
    shapes = ({"args": free.args} if free.args else {}) | ({"kwargs": free.kwargs} if free.kwargs else {})
    single = _Logits(model)
    with torch.no_grad():
        logits_of(single(*example.args, **example.kwargs), example.size)
        try:
            program = torch.export.export(single, example.args, example.kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:  # from torch, or from the model
            said = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelError(
                f"torch.export cannot trace {type(model).__name__}: {said}; change its forward, or call export() without a file"
            ) from error
    try:
        with replacing(path) as beside:
            if path.suffix == ".pt2":
                with open(beside, "wb") as file:
                    torch.export.save(program, file)
            else:
                more: Any = {"dynamo": True, "external_data": False, "verbose": False, "dynamic_shapes": shapes}
                names = _names(model, example)
                torch.onnx.export(program, f=beside, input_names=names, output_names=["logits"], **more)
    except OSError as error:
        raise unwritable(path, error) from error


def _names(model: nn.Module, example: Inputs) -> list[str] | None:
    """The names of the model's tensors; None if it takes any number of them."""
    given = inspect.signature(model.forward).bind(*example.args, **example.kwargs).arguments
    if any(isinstance(value, (tuple, dict)) for value in given.values()):
        return None
    return [name for name, value in given.items() if isinstance(value, Tensor)]

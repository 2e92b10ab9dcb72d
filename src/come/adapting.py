"""`come.adapt`: one line around a classifier."""

from __future__ import annotations

from typing import Any

from torch import nn

from come import methods
from come.errors import ConfigError, unknown
from come.guard import Guard
from come.method import Method
from come.objectives import Objective


def adapt(
    model: nn.Module,
    method: str | type[Method] = "tent",
    objective: str | Objective = "come",
    guard: bool | Guard = True,
    **hyperparameters: Any,
) -> Method:
    r"""Put test-time adaptation around a classifier.

    The result is called in place of the model and returns logits; each call also adapts the model to its batch:

    .. math:: \theta \leftarrow \theta - \eta \, \partial_\theta \, \frac{1}{|R|} \sum_{i \in R} H(m(f_\theta(x_i)))

    with the samples R and the step that the method chooses, and the mass m that the objective gives.

    Args:
        model: any classifier that maps a batch (B, ...) to logits (B, K), or to an object or mapping with `logits`. It is
            adapted in place and given back unchanged by `close()` or at the end of a `with` block.
        method: a name (`come.methods.names()`) or a subclass of `come.Method`.
        objective: "come", "em", or a `come.Objective`.
        guard: refuse what is not finite, and recover from a collapse; False for the bare method, a `come.Guard` for a policy of
            your own. A healthy stream gives the same numbers with and without it.
        **hyperparameters: what the method's constructor takes, e.g. lr=1e-3. Without lr the paper's is used, and the repr
            of the result says which.

    Returns:
        the adapter.

    Raises:
        ConfigError: an unknown method, objective or hyper-parameter, or one out of range.
        ModelError: a model with nothing to adapt, or one that is being adapted already.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        >>> classifier = adapt(model, "sar", objective="come", lr=1e-3)
        >>> classifier(torch.randn(8, 4)).shape
        torch.Size([8, 3])
    """
    chosen = methods.get(method)
    known = chosen.hyperparameters()
    for name in hyperparameters:
        if name not in known:
            raise unknown(f"hyper-parameter of {chosen.name}", name, known)
    if not isinstance(guard, (bool, Guard)):
        raise ConfigError(f"guard is {guard!r}; it must be True, False or a come.Guard")
    made = chosen(model, objective=objective, **hyperparameters)
    if guard is not False:
        made.guard = Guard() if guard is True else guard
    return made

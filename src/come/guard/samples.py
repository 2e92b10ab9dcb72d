"""Which samples of a batch are valid: judged before the model sees them, on the device.

A sample is invalid if it has an entry that is NaN, infinite, beyond `largest_input`, or 1000 times the usual magnitude: the
median over the last nine batches, each by its own median, valid or not. So a brighter stream is accepted after five batches at
the latest, and `largest_input` bounds a growing one. Only tensors with one entry per sample count; of several, one of zeros
and very negative numbers is an additive mask, and is not judged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from come.model.inputs import Inputs, at_least_float32

UNUSUAL = 1000.0
REMEMBERED = 9


def no_history(device: torch.device) -> Tensor:
    """The history before the first batch, (9,): all NaN."""
    return torch.full((REMEMBERED,), torch.nan, device=device)


def judge(x: Inputs, history: Tensor, largest: float, branch: bool = False) -> tuple[Inputs, Tensor, Tensor]:
    """Replace each invalid sample by a valid one, so that BatchNorm and sums over the batch stay sound.

    Returns the new batch, the mask (B,) of the valid samples, and the new history of typical magnitudes (9,). `largest` limits
    any entry; `branch`: Python may branch on values, which saves work on a CPU, for one stream.

    >>> x = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [1e5, 1.0]])
    >>> _, valid, _ = judge(Inputs.of(x), no_history(x.device), 1e6)
    >>> valid
    tensor([ True, False, False])
    """
    given = x.per_sample()
    judged = [value.detach() for value in given if value.is_floating_point()]
    if not judged:
        return x, torch.ones(x.size, dtype=torch.bool, device=given[0].device), history
    sizes = _magnitude(judged[0], len(given) > 1, branch)
    for value in judged[1:]:
        sizes = torch.maximum(sizes, _magnitude(value, True, branch).to(sizes))
    sizes = sizes.to(history)
    finite = sizes.isfinite()
    median = Tensor.nanmedian if branch else _median
    middle = median(torch.where(finite & (sizes > 0), sizes, torch.nan))  # a few large samples do not move it
    history = torch.cat([history[1:], torch.where(middle.isnan(), history[-1], middle)[None]])
    valid = finite & (sizes <= largest) & ~(sizes > UNUSUAL * median(history))
    return _replaced(x, valid, branch), valid, history


def _median(values: Tensor) -> Tensor:
    """`torch.nanmedian` (0-d) for GPUs: without its synchronization, and without a sort, which compilers cannot fuse."""
    known, place = ~values.isnan(), torch.arange(len(values), device=values.device)
    v = torch.where(known, values, torch.inf)  # last
    smaller = (v < v[:, None]) | ((v == v[:, None]) & (place < place[:, None]))
    middle = (known.sum() - 1).clamp_min(0) // 2
    return torch.where(smaller.sum(dim=1) == middle, values, 0).sum()


def _magnitude(value: Tensor, may_mask: bool, branch: bool) -> Tensor:
    """The largest absolute entry of each sample, (B,); NaN if it has one; 0 in an attention mask, if it may be one."""
    flat = at_least_float32(value)[:, None].flatten(1)
    if not flat.shape[1]:
        return flat.new_zeros(len(flat))
    low, high = flat.amin(dim=1), flat.amax(dim=1)  # on a CPU many times faster than aminmax
    found = torch.maximum(high, -low)
    if may_mask and value.ndim in (2, 3, 4) and not (branch and bool((low >= -1e4).all())):
        # an additive attention mask: zeros, and -inf or the like
        mask = ((flat == 0) | (flat <= -1e4)).all() & (low < -1e4).any()
        found = torch.where(mask, 0, found)
    return found


def _replaced(x: Inputs, valid: Tensor, branch: bool) -> Inputs:
    """Replace each invalid sample by the first valid one; by zeros if there is none."""
    if branch and bool(valid.all()):
        return x
    good, some = valid.to(torch.uint8).argmax().view(1), valid.any()

    def one(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        filler = torch.where(some, value.index_select(0, good), 0)
        return torch.where(valid.view(-1, *[1] * (value.ndim - 1)), value, filler)

    return x.map_samples(one)

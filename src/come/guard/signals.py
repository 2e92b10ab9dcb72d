"""What a batch shows, on the device: which samples are valid, and six signals of the model's health that need no labels.

**Samples** are judged before the model sees them. One is invalid if it has an entry that is NaN, infinite, beyond
`largest_input`, or 1000 times the usual magnitude: the median over the last nine batches, each by its own median, valid or not.
So a brighter stream is accepted after five batches at the latest, and `largest_input` bounds a growing one. Only tensors with
one entry per sample count; of several, one of zeros and very negative numbers is an additive mask, and is not judged.

**Signals** of a batch are the share of the most predicted class, entropy and uncertainty of the objective, the norm of the
logits, the distance of the weights from the source, and the confidence (mean largest softmax probability). `Bands` learns the
usual ranges of the first five. Leaving a band, or a change of confidence, only triggers a source check;
`come.guard.verdict` decides.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from come.model.inputs import Inputs, answered, at_least_float32
from come.model.positions import by_position, everywhere, parts
from come.objectives import Objective

SIGNALS = ("share", "entropy", "uncertainty", "norm", "distance", "confidence")
BANDED = SIGNALS[:-1]
LOW = {"entropy", "uncertainty"}  # a collapse lowers these and raises the others
FIRST = 3  # windows that give the middle of a band: the weights have hardly moved by then


# ---- which samples are valid ----

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


# ---- signals ----


def observe(
    objective: Objective,
    logits: Tensor,
    samples: Tensor,
    valid: Tensor,
    positions: tuple[int, ...],
    ok: Tensor,
    weights: Tensor,
    source: Tensor,
    closely: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which samples have a usable answer (B,), whether the update may be kept (0-d), and what is reported, (10,) float64:
    this flag, how many samples are invalid and how many unanswered, whether the logits are probabilities, the six signals.

    From logits (N, K), the valid `samples` (B,) and the rows that count (`valid`, (N,)), the positions of a sample's rows,
    whether the update was finite (`ok`), and adapted and source weights (P,); `closely`: test whether the logits are
    probabilities. A sample is answered if all of its positions are.
    """
    usable = samples & everywhere(answered(logits), positions)
    counts = torch.stack([~samples, samples & ~usable]).sum(dim=1)
    ok = ok & (counts[1] == 0)  # not the method's fault, but nothing may be learned from it
    chances = counts.new_zeros(1)
    if closely:
        chances = torch.stack([_probabilities(at_least_float32(part)) for (part,) in parts(logits)]).all()[None]
    rows = valid & by_position(usable, positions) if positions else usable
    return usable, ok, torch.cat([ok[None], counts, chances, measure(objective, logits, rows, weights, source)])


def _probabilities(z: Tensor) -> Tensor:
    return (z >= 0).all() & ((z.sum(dim=1) - 1).abs() < 1e-3).all()


def measure(objective: Objective, logits: Tensor, usable: Tensor, weights: Tensor, source: Tensor) -> Tensor:
    """The six signals of a batch, (6,) float64, on the device: means over the `usable` rows; arguments as in `observe`."""
    count = usable.sum().clamp_min(1)
    found = [_sums(objective, at_least_float32(z), mine) for z, mine in parts(logits, usable)]
    means, sure = found[0] if len(found) == 1 else map(sum, zip(*found, strict=True))
    most = votes(logits, usable).max() / count
    distance = torch.linalg.vector_norm(weights - source)
    return torch.cat([most[None], (means / count).double(), torch.stack([distance, sure / count]).double()])


def _sums(objective: Objective, z: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the `usable` rows of entropy, uncertainty and norm, (3,), and of the largest probability."""
    mass = objective.log_mass(z)  # once for entropy and u
    chances = mass.exp()
    entropy = -(chances * mass).sum(dim=1)
    doubt = chances[:, -1] if mass.shape[1] > z.shape[1] else 1 - chances.amax(dim=1)
    size = torch.linalg.vector_norm(z.masked_fill(z.isneginf(), 0), dim=1)
    sums = torch.where(usable, torch.stack([entropy, doubt, size.to(entropy)]), 0).sum(dim=1)
    return sums, torch.where(usable, z.softmax(dim=1).amax(dim=1), 0).sum()


def votes(logits: Tensor, usable: Tensor) -> Tensor:
    """How many of the `usable` rows (N,) are predicted as each class, (N, K) -> (K,) float64."""
    counts = usable.double()
    return counts.new_zeros(logits.shape[1]).scatter_add(0, logits.argmax(dim=1), counts)


class Bands(NamedTuple):
    """The usual ranges of the signals: around their first values, as wide as they jump from one window to the next.

    A drift during the warm-up moves neither: a model that collapses at once does not make its collapse usual.

    Example:
        >>> bands = Bands(4)
        >>> for entropy in (2.0, 2.1, 1.9, 2.0):
        ...     bands = bands.learned((0.1, entropy, 0.5, 9.0, 0.0, 0.6))
        >>> bands.ready, bands.outside((0.1, 0.3, 0.5, 9.0, 0.0, 0.6)), bands.outside((0.1, 1.9, 0.5, 9.0, 0.0, 0.6))
        (True, {'entropy': 1.7}, {})
    """

    warmup: int
    rows: tuple[tuple[float, ...], ...] = ()
    seen: int = 0  # windows, warm-up included

    @property
    def ready(self) -> bool:
        """Whether the warm-up is over."""
        return len(self.rows) >= self.warmup

    def learned(self, row: tuple[float, ...]) -> Bands:
        """Count the signals of one more window, and learn from them during the warm-up."""
        return self._replace(rows=self.rows if self.ready else (*self.rows, row), seen=self.seen + 1)

    def outside(self, row: tuple[float, ...]) -> dict[str, float]:
        """The signals beyond their limit, on the side of a collapse, and that limit."""
        found = {}
        for name, value, values in zip(BANDED, row, zip(*self.rows, strict=True), strict=False):
            middle = median(values[:FIRST])
            width = max(2.8 * median(abs(b - a) for a, b in pairwise(values)), 0.15 * abs(middle), 1e-6)
            limit = middle - width if name in LOW else middle + width
            if name == "distance":  # it grows by itself; twice as fast as during the warm-up is too fast
                limit = 2 * max(values[-1], 1e-6) * self.seen / self.warmup
            if value < limit if name in LOW else value > limit:
                found[name] = round(limit, 12)
        return found

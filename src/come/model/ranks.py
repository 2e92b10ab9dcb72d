"""One stream over several processes: N ranks with batches of B adapt as one process with a batch of N x B does.

Every rank gathers the batches of all ranks, in rank order, and computes the same step. Only calls of the model are divided:

    x (n, ...)  -> this rank's rows -> model -> logits of these rows -> gathered: logits (n, K) on every rank

So everything else (objective, selection, random draws, the guard) sees the whole batch and is the same on every rank. In the
backward each rank takes its rows of the gradient, and the gradients of the weights are summed over the ranks:

    _Gathered   forward: rows of all ranks          backward: own rows
    _Summed     forward: the identity               backward: sum over the ranks

BatchNorm statistics are those of all ranks' rows (`RankRows.moments`), with gradients. A call with fewer rows than ranks is not
divided: every rank computes all of it, and the answer of the first one counts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from come.errors import ComeError, ConfigError, InputError, RankError, StateError, shown
from come.model.batchnorm import Estimate, Layer, Statistics
from come.model.heads import Head
from come.model.inputs import Inputs, at_least_float32

if TYPE_CHECKING:
    from typing_extensions import Self

    from come.model.functional import FunctionalModel


class Ranks:
    """The processes that share one stream, and their communication.

    Args:
        group: a process group of `torch.distributed`; None is the default one.

    Example:
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> ranks = Ranks()
        >>> ranks.rank, ranks.size, ranks.gathered(torch.ones(2, 3), [2]).shape
        (0, 1, torch.Size([2, 3]))
        >>> dist.destroy_process_group()
    """

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "ranks=True needs a process group: start the script with torchrun, and call "
                "torch.distributed.init_process_group() before come.adapt()"
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError(
                "ranks: this process is not in the given process group; call come.adapt() in its members only"
            )
        self.device = torch.device("cpu")  # of the model
        self.lost = ""  # why the ranks can no longer work together; empty while they can

    @classmethod
    def of(cls, value: Any) -> Ranks | None:
        """Read `ranks=` of `come.adapt`: False, True or a process group; None if there is one process only."""
        if value is False:
            return None
        if value is not True and not (dist.is_available() and isinstance(value, dist.ProcessGroup)):
            raise ConfigError(f"ranks must be True, False or a torch.distributed process group, got {shown(value)}")
        found = cls(None if value is True else value)
        return found if found.size > 1 else None

    def __str__(self) -> str:
        return f", ranks={self.size}"  # in the repr of an adapter

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of an adapter is on the same ranks

    def __reduce__(self) -> Any:
        if self.group is not None:
            raise ConfigError("an adapter on a process group of its own cannot be pickled; save() its state")
        return Ranks, ()

    @property
    def writes(self) -> bool:
        """Whether this rank writes files: the first one does, and every one if the ranks have lost each other."""
        return self.rank == 0 or bool(self.lost)

    # ---- before a step ----

    def check_model(self, model: nn.Module, method: str, reason: str) -> None:
        """Raise if the model or the method cannot be divided; `reason` is why the method cannot."""
        if reason:
            raise ConfigError(f"{method} cannot run on several ranks: {reason}; use ranks=False, or another method")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "the ranks exchange gradients themselves; adapt the module in DistributedDataParallel: model.module"
            )

    def agree(
        self, fixed: dict[str, Any], configuration: str, fingerprint: Callable[[], bytes], device: torch.device
    ) -> None:
        """Raise unless all ranks adapt the same model in the same way.

        `fixed` is what `Method.setup` returned: its tensors are replaced by the first rank's. The fingerprint is that of the
        source model and of `fixed`.
        """
        self.device = device
        found = {name: value for name, value in sorted(fixed.items()) if isinstance(value, Tensor)}
        kinds = [(name, tuple(value.shape), value.dtype) for name, value in found.items()]
        self._same(f"{configuration} {kinds}".encode(), "method, hyperparameters, objective, guard or source data")
        fixed |= {name: self.first(value) for name, value in found.items()}
        self._same(fingerprint(), "model: load the same weights on every rank")

    def _same(self, mine: bytes, what: str) -> None:
        digest = torch.tensor(list(hashlib.sha256(mine).digest()), dtype=torch.uint8)[None]
        others = self.gathered(digest, [1] * self.size)
        different = (others != others[0]).any(dim=1).nonzero().flatten().tolist()
        if different:
            raise ConfigError(f"rank {different[0]} and rank 0 do not have the same {what}")

    def batch(self, read: Callable[[], Inputs], count: int, state: str, device: torch.device) -> tuple[Inputs, slice]:
        """The batch of all ranks, and the slice of this rank's rows.

        `read` returns this rank's batch, which may be empty. If one rank refuses its batch, has seen another `count` of batches
        or has another `state`, all ranks raise and none takes a step.
        """
        if self.lost:
            raise RankError(
                f"the ranks have lost each other ({self.lost}); start the job again and load() the last snapshot on every rank"
            )
        self.device, header = device, [0, 0, count, _number(state), 0]
        problem: ComeError | None = None
        try:
            x = read()
            form = str(x.map_samples(lambda v: (v.shape[1:], v.dtype), _form).items())
            header = [1, x.size, count, _number(state), _number(form)]
        except ComeError as error:
            problem = error
        table = self.gathered(torch.tensor([header], dtype=torch.int64), [1] * self.size).tolist()
        if problem is not None:
            raise problem
        accepted, sizes, counts, states, forms = (list(column) for column in zip(*table, strict=True))
        if not all(accepted):
            rank = accepted.index(0)
            raise InputError(f"rank {rank} cannot take its batch, see its own error; no rank has adapted to this one")
        repair = "load() the same file or reset() on every rank"
        if len(set(counts)) > 1:
            raise StateError(f"the ranks have seen {_listed(counts)} batches; {repair}")
        if len(set(states)) > 1:
            raise StateError(
                f"the ranks are in different states after the same number of batches; {repair}. If the states were the same, "
                "use the same kind of device and the same torch on all ranks"
            )
        if len(set(forms)) > 1:
            raise InputError("the batches of the ranks differ in more than their size: in shape, type or arguments")
        if not sum(sizes):
            raise InputError("the batch is empty on every rank; skip it")
        whole = x.map_samples(lambda v: self.gathered(v, sizes))
        begin = sum(sizes[: self.rank])
        return whole, slice(begin, begin + sizes[self.rank])

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Run a step: an error that other ranks may not have leaves them waiting, so this rank must not talk to them again.

        `ComeError`s follow from the batch of all ranks, and all of them raise it.
        """
        try:
            yield
        except dist.DistError as error:  # of an operation on a GPU that was begun before
            raise self._gone(error) from error
        except BaseException as error:
            if not isinstance(error, ComeError) and not self.lost:
                self.lost = f"a step failed on rank {self.rank}: {type(error).__name__}"
            raise

    # ---- calls of the model ----

    def forward(
        self,
        model: FunctionalModel,
        x: Inputs,
        weights: Tensor,
        statistics: Statistics,
        hooks: Sequence[Callable[[], Any]] = (),
    ) -> Tensor:
        """Logits (n, K) of all rows, each computed by one rank; `hooks` must be empty, since they see one rank's rows."""
        if hooks:
            raise ConfigError("this method looks into the model with hooks of its own, and cannot run on several ranks")
        logits, counts = self._rows(model, x, weights, statistics, ())
        return self._of_all(logits, counts)

    def features(
        self, model: FunctionalModel, x: Inputs, weights: Tensor, statistics: Statistics, head: Head
    ) -> tuple[Tensor, Tensor]:
        """Features (n, d) that go into the classifier head, and logits (n, K), of all rows."""
        seen: list[tuple[Tensor, Tensor]] = []

        def register() -> Any:
            return head.linear.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], out)))

        logits, counts = self._rows(model, x, weights, statistics, [register])
        return self._of_all(head.pick(seen, logits), counts), self._of_all(logits, counts)

    def _rows(
        self,
        model: FunctionalModel,
        x: Inputs,
        weights: Tensor,
        statistics: Statistics,
        hooks: Sequence[Callable[[], Any]],
    ) -> tuple[Tensor, list[int]]:
        """Logits of this rank's rows, and how many rows of each rank are used."""
        weights = self._summed(weights)
        x = x.map(lambda v: self._summed(v) if isinstance(v, Tensor) else v)
        if x.size >= self.size:
            rows = RankRows(self, split(x.size, self.size))
            model.rank_rows = rows
            try:
                some = x.take(rows.rows)
                return model.logits(model.call(some, weights, statistics, hooks), some.size), rows.counts
            except NotDivided:  # on every rank: it is the same code
                pass
            finally:
                model.rank_rows = None
        whole = [x.size] + [0] * (self.size - 1)
        return model.logits(model.call(x, weights, statistics, hooks), x.size), whole

    def _of_all(self, values: Tensor, counts: list[int]) -> Tensor:
        found: Tensor = _Gathered.apply(values[: counts[self.rank]], self, counts)
        return found

    def _summed(self, values: Tensor) -> Tensor:
        if not (values.requires_grad and torch.is_grad_enabled()):
            return values
        found: Tensor = _Summed.apply(values, self)
        return found

    def shared(self, values: Tensor) -> Tensor:
        """One tensor of each rank, (...) -> (ranks, ...), which every rank may use differently: gradients are summed."""
        return self._summed(self._of_all(values[None], [1] * self.size))

    # ---- what is exchanged ----

    def gathered(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks in order, (counts[rank], ...) -> (n, ...), bit for bit and without a gradient."""
        width, kind, device = math.prod(values.shape[1:]), values.dtype, values.device
        rows = self._here(values.reshape(len(values), width)).view(torch.uint8)
        mine = rows.new_zeros(max(counts), rows.shape[1])
        mine[: len(rows)] = rows
        all_of_them = [torch.empty_like(mine) for _ in counts]
        self._talk(lambda: dist.all_gather(all_of_them, mine, group=self.group))
        found = torch.cat([part[:count] for part, count in zip(all_of_them, counts, strict=True)])
        return found.view(kind).reshape(sum(counts), *values.shape[1:]).to(device)

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each of them."""
        total = self._here(at_least_float32(values)).clone()
        self._talk(lambda: dist.all_reduce(total, group=self.group))
        return total.to(values)

    def first(self, values: Tensor) -> Tensor:
        """The values of the first rank."""
        sent = self._here(values.reshape(-1)).clone().view(torch.uint8)
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        self._talk(lambda: dist.broadcast(sent, source, group=self.group))
        return sent.view(values.dtype).reshape(values.shape).to(values.device)

    def _here(self, values: Tensor) -> Tensor:
        """The values where the backend can send them from."""
        backend = dist.get_backend(self.group)
        device = {"gloo": torch.device("cpu"), "nccl": self.device}.get(backend, values.device)
        return values.detach().to(device).contiguous()

    def _talk(self, exchange: Callable[[], Any]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> RankError:
        self.lost = _reason(error)
        return RankError(
            f"rank {self.rank} of {self.size} no longer reaches the others ({self.lost}): one has ended, or is later than the "
            "timeout of init_process_group() allows. The step has not happened; save() works on this rank. Start the job "
            "again and load() the last snapshot on every rank, see come.callbacks.Snapshots"
        )


class NotDivided(Exception):  # noqa: N818 - not an error: the call is made in another way
    """BatchNorm statistics were estimated from the rows of one rank."""


class RankRows:
    """The rows of a call that this rank computes, `counts[rank]` of them."""

    def __init__(self, ranks: Ranks, counts: list[int]) -> None:
        self.ranks, self.counts, self.total = ranks, counts, sum(counts)
        ends = list(accumulate(counts))
        self.rows = slice(ends[ranks.rank] - counts[ranks.rank], ends[ranks.rank])
        self.asked = 0  # number of requests for statistics

    def values(self, x: Tensor, groups: int = 1) -> int:
        """Number of values per channel in the inputs (B, C, ...) of all ranks, in each of `groups` equal parts."""
        self.asked += 1
        return self.total // groups * math.prod(x.shape[2:])

    def moments(self, x: Tensor, used: Tensor | None = None, groups: int = 1) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over the inputs (B, C, ...) of a layer on all ranks, with a gradient.

        Args:
            x: the input of this rank.
            used: (n,) bool, of all ranks: of these samples, or of all if there are none.
            groups: equal parts of the rows of all ranks.

        Returns:
            (1, C), or with several groups (B, C): for each row of this rank those of its part.
        """
        self.asked += 1
        if used is not None:
            return self._of_groups(x, torch.where(used | ~used.any(), 0, -1), 1)
        if groups > 1:
            group = torch.arange(self.total, device=x.device) // (self.total // groups)
            mean, var = self._of_groups(x, group, groups)
            return mean[group[self.rows]], var[group[self.rows]]
        var, mean = torch.var_mean(at_least_float32(x), dim=[0, *range(2, x.ndim)], correction=0)
        counts = torch.tensor(self.counts, dtype=mean.dtype, device=mean.device)[:, None, None] * math.prod(x.shape[2:])
        return self._joined(mean[None], var[None], counts)

    def estimated(self, layer: Layer, x: Tensor, estimate: Estimate) -> tuple[Tensor, Tensor]:
        """Run an estimate of statistics; `NotDivided` if it has used the rows of this rank only."""
        before = self.asked
        found = estimate(layer, x)
        if self.asked == before:
            raise NotDivided
        return found

    def _of_groups(self, x: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Mean and biased variance (G, C) of each group; `group` (n,) is -1 for rows in none."""
        self.asked += 1
        flat = at_least_float32(x).flatten(2) if x.ndim > 2 else at_least_float32(x)[..., None]
        member = (group[:, None] == torch.arange(groups, device=group.device)).to(flat)
        mine = member[self.rows]
        counts = torch.stack([part.sum(dim=0) for part in torch.split(member, self.counts)])[..., None] * flat.shape[2]
        own = counts[self.ranks.rank].clamp_min(1)
        mean = mine.T @ flat.sum(dim=2) / own
        var = mine.T @ (flat - (mine @ mean)[..., None]).square().sum(dim=2) / own
        return self._joined(mean, var, counts)

    def _joined(self, mean: Tensor, var: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Moments (G, C) of this rank -> of all ranks, by Chan et al. (1979); counts (ranks, G, 1)."""
        means, variances = self.ranks.shared(torch.stack([mean, var])).unbind(dim=1)
        share = counts / counts.sum(dim=0).clamp_min(1)
        mean = (share * means).sum(dim=0)
        return mean, (share * (variances + (means - mean).square())).sum(dim=0)


class _Gathered(torch.autograd.Function):
    """(counts[rank], ...) -> (n, ...), the rows of all ranks. Every rank goes on alike, so the backward takes its own rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks, counts: list[int]) -> Tensor:
        begin = sum(counts[: ranks.rank])
        ctx.rows = slice(begin, begin + counts[ranks.rank])
        return ranks.gathered(values, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.rows], None, None


class _Summed(torch.autograd.Function):
    """The identity. Every rank goes on in its own way, so the backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.summed(gradient), None


def split(rows: int, parts: int) -> list[int]:
    """Divide `rows` as evenly as possible.

    >>> split(7, 3)
    [3, 2, 2]
    """
    each, more = divmod(rows, parts)
    return [each + (i < more) for i in range(parts)]


def _form(value: Any) -> Any:
    """What must be equal on all ranks in a shared argument."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


def _number(text: str) -> int:
    """A 63-bit hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _reason(error: Exception) -> str:
    """The error of a backend, without addresses and advice.

    >>> _reason(RuntimeError("[pair.cc:545] Read error [10.0.0.1]:53440: Connection reset by peer. This is typically ..."))
    'Connection reset by peer'
    """
    known = re.search(r"connection \w+ by peer|timed out[^.;\n]{0,40}", str(error), flags=re.IGNORECASE)
    return known[0] if known else shown(f"{type(error).__name__}: {str(error).strip()}")


def _listed(values: Sequence[int]) -> str:
    return f"{', '.join(map(str, values[:-1]))} and {values[-1]}"


def bits(values: Tensor) -> int:
    """A checksum of the bits of a tensor; synchronizes with the device.

    >>> bits(torch.tensor([1.0, 2.0])) == bits(torch.tensor([1.0, 2.0])), bits(torch.zeros(1)) == bits(torch.ones(1))
    (True, False)
    """
    whole = torch.int64 if values.dtype == torch.float64 else torch.int32
    return int(values.detach().contiguous().view(whole).sum())

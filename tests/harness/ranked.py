"""One stream over several processes: the cases, and what each rank does. `tests/test_ranks.py` compares with one process.

python ranked.py RANK FOLDER
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

import come
from come import testing

NORMALIZATION = ((0.45,), (0.07,))  # testing.batches() are no images in [0, 1], but normalized
SMALL = {
    "cotta": {"views": 3, "confident": 0.6, "lr": 1e-3},
    "eata": {"redundancy": 0.6, "margin": 0.25, "lr": 3e-3},
    "memo": {"views": 3},
    "rotta": {"capacity": 8, "every": 10},
    "sar": {"margin": 0.25},
    "t3a": {"supports": 3},
    "tea": {"dreams": 2, "buffer": 20},
    "lame": {"k": 1, "affinity": "rbf"},
}
PARTS = {
    2: ((12, 12), (24, 0), (11, 13), (12, 12), (20, 4), (7, 6), (0, 1)),
    3: ((8, 8, 8), (5, 0, 19), (8, 8, 8), (8, 8, 8), (1, 22, 1), (5, 5, 3), (1, 1, 0)),
}
"""How many samples of each batch come from which rank. The last batch has fewer samples than there are ranks."""
INVALID, SORTED = 2, 3
"""The batch with an invalid sample; and the one whose least certain samples are last, so that the last rank selects none."""
FAILS_AT = 3
"""The batch in which a rank is lost."""
TIMEOUT = 2.0


class Case(NamedTuple):
    """A stream over ranks, and in one process."""

    method: str
    objective: str
    norm: str
    ranks: int
    guard: bool = True
    exact: bool = False
    """In double precision, with half of the batches."""
    arguments: tuple[tuple[str, object], ...] = ()
    times: int = 1
    """How large batches are."""

    @property
    def name(self) -> str:
        more = "".join(f"-{key}={value}" for key, value in self.arguments) + ("-float64" if self.exact else "")
        return f"{self.method}-{self.objective}-{self.norm}-{self.ranks}{'' if self.guard else '-bare'}{more}"

    def model(self) -> nn.Module:
        model = testing.TinyClassifier(testing.NORMS[self.norm])
        return model.double() if self.exact else model

    def adapter(self, model: nn.Module, ranks: object) -> come.Adapter:
        known = come.methods.get(self.method).hyperparameters()
        given = {"lr": 1e-2} | SMALL.get(self.method, {})
        if "source" in known:
            given["source"] = [self._typed(x) for x in testing.batches(2, seed=9)]
        if "normalization" in known:
            given["normalization"] = NORMALIZATION
        given |= dict(self.arguments)
        return come.adapt(model, self.method, objective=self.objective, guard=self.guard, ranks=ranks, **given)

    def _typed(self, x: Tensor) -> Tensor:
        return x.double() if self.exact else x

    def parts(self) -> list[tuple[int, ...]]:
        parts = [tuple(size * self.times for size in each) for each in PARTS[self.ranks]]
        return parts[1::2] + parts[-1:] if self.exact and self.times == 1 else parts

    def batches(self) -> list[Tensor]:
        sizes = [sum(each) for each in self.parts()]
        made = [self._typed(x[:size]) for x, size in zip(testing.batches(len(sizes), max(sizes)), sizes, strict=True)]
        with torch.no_grad():
            entropy = come.Softmax().entropy(self.model().eval()(made[SORTED]))
        made[SORTED] = made[SORTED][entropy.argsort()]
        if self.guard:
            made[INVALID][0] = torch.nan
        return made

    def mine(self, rank: int) -> list[Tensor]:
        return [x.split(parts)[rank] for x, parts in zip(self.batches(), self.parts(), strict=True)]


ISSUED = [  # every pair of number of ranks, objective and norm
    Case(method, objective, norm, ranks)
    for ranks, objective, norm in ((2, "em", "layer"), (2, "come", "batch"), (3, "em", "batch"), (3, "come", "layer"))
    for method in ("tent", "eata", "sar", "cotta")
]
UNDIVIDED = ("foa",)
FURTHER = [
    *(Case(method, "come", "batch", 3, False, True) for method in ("tent", "eata", "sar", "cotta")),
    *(
        Case(method, "come", "batch", 3, exact=True)
        for method in come.methods.names()
        if method not in ("tent", "eata", "sar", "cotta", *UNDIVIDED)
    ),
    *(Case(method, "come", "layer", 2, exact=True) for method in ("deyo", "roid", "t3a", "tea")),
    *(Case(method, "em", "batch", 2, exact=True) for method in ("tent", "eata", "sar", "cotta")),
    Case("tent", "em", "layer", 2, exact=True, arguments=(("lr", 1.0),), times=6),  # collapses, and recovers
    Case(
        "tent", "come", "layer", 3, exact=True, arguments=(("lr", None),)
    ),  # a rate that depends on the size of the batch
    Case("eata", "come", "layer", 2, exact=True, arguments=(("margin", 0.15),)),  # few: they go through the model again
    Case("sar", "come", "group", 3, exact=True, arguments=(("margin", 0.3),)),
]
CASES = [*ISSUED, *FURTHER]


def trajectory(adapter: come.Adapter, batches: list[Tensor]) -> dict[str, object]:
    steps = [adapter.step(x)._asdict() for x in batches]
    return {"steps": steps, "state": adapter.state_dict(), "health": adapter.health()}


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except come.ComeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].nan_to_num(), b[name].nan_to_num()) for name in a)


class ByHalves(come.methods.Tent):
    """Estimates BatchNorm's statistics in a way of its own, which knows nothing of ranks."""

    name = "by_halves"

    def adapt(self, ctx, x):
        @torch.no_grad()
        def estimate(layer, features):
            half, dims = features[: len(features) // 2], [0, *range(2, features.ndim)]
            return half.mean(dim=dims), half.var(dim=dims) + 0.1

        logits = ctx.forward(x, statistics=estimate)
        loss = self.objective.entropy(logits)
        ctx.descend(loss.mean())
        return come.Step(logits, loss, ctx.valid)


class Hooked(come.methods.Tent):
    """Looks into the model."""

    name = "hooked"

    def adapt(self, ctx, x):
        ctx.forward(x, hooks=[lambda: ctx.model.model.register_forward_hook(lambda *_: None)])
        return super().adapt(ctx, x)


def equal(rank: int, pair: object, folder: Path) -> dict[str, object]:
    """All cases, and what is no trajectory."""
    found: dict[str, object] = {}
    for case in CASES:
        if rank < case.ranks:
            found[case.name] = trajectory(
                case.adapter(case.model(), pair if case.ranks == 2 else True), case.mine(rank)
            )
    case = Case("eata", "come", "batch", 3)
    found |= refused(rank, case) | alive(rank, case, folder)
    return found


def refused(rank: int, case: Case) -> dict[str, object]:
    """Errors, the same on every rank, that change nothing."""
    model, (x, *more) = case.model(), case.mine(rank)
    tiny = testing.TinyTransformer(testing.NORMS["layer"])
    found = {
        "foa": error_of(lambda: come.adapt(tiny, "foa", ranks=True)),
        "wrapped": error_of(lambda: come.adapt(nn.parallel.DistributedDataParallel(tiny), "tent", ranks=True)),
        "other method": error_of(lambda: come.adapt(model, "tent", lr=1.0 + rank, ranks=True)),
        "other model": error_of(lambda: come.adapt(nn.Sequential(model, nn.LayerNorm(5 + rank // 2)), ranks=True)),
        "hooks": error_of(lambda: come.adapt(model, Hooked(lr=0.1), ranks=True).step(x)),
    }
    adapter = case.adapter(model, True)
    adapter.step(x)
    before = adapter.state_dict()
    found["bad input"] = error_of(lambda: adapter.step(x.long() if rank == 1 else x))
    found["other shape"] = error_of(lambda: adapter.step(x[..., :4] if rank == 1 else x))
    found["empty"] = error_of(lambda: adapter.step(x[:0]))
    found["pass"] = error_of(lambda: adapter.check(x))
    unchanged = same(before, adapter.state_dict())
    promise = adapter.calibrate(testing.batches(4), coverage=0.6, follow=True)  # the same on each
    predicted, step = adapter.predict(x), adapter.step(more[0])
    promised = {"threshold": promise.threshold, "abstain": step.abstain}
    if rank == 1:
        adapter.reset()
    found["other state"] = error_of(lambda: adapter.step(x))
    if rank == 1:
        adapter.close()
    found["closed"] = error_of(lambda: adapter.step(x))
    return {"refused": found, "unchanged": unchanged, "predicted": predicted, "after": step.logits} | promised


def alive(rank: int, case: Case, folder: Path) -> dict[str, object]:
    """Files, copies, other ways to run."""
    data = case.mine(rank)
    adapter = case.adapter(case.model(), True)
    adapter.callbacks.append(come.callbacks.Snapshots(folder / "snapshots", every=1, keep=2))
    adapter.step(data[0])
    adapter.save(folder / "shared.safetensors")
    adapter.save(folder / f"rank{rank}.safetensors")
    expected = [adapter.step(x).logits for x in data[1:4]]
    dist.barrier()
    resumed = case.adapter(case.model(), True)
    resumed.load(folder / "shared.safetensors")
    found: dict[str, object] = {"repr": repr(resumed)}
    found["resumed"] = all(torch.equal(a, resumed.step(x).logits) for a, x in zip(expected, data[1:4], strict=True))
    copied = pickle.loads(pickle.dumps(resumed))
    found["copied"] = torch.equal(copied.step(data[4]).logits, resumed.step(data[4]).logits)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        come.adapt(case.model(), "tent", compile=True, ranks=True).step(data[0])
    found["compiled"] = [str(one.message) for one in said if "compile=True" in str(one.message)]
    found["by halves"] = come.adapt(case.model(), ByHalves(lr=0.1), guard=False, ranks=True).step(data[0]).logits
    return found


@contextlib.contextmanager
def timed(found: dict[str, object], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        found[name] = time.perf_counter() - begin


def lost(rank: int, ranks: int, group: object, folder: Path, fail: Callable[[Tensor], None]) -> dict[str, object]:
    """The last rank fails in the middle of a step; each rank saves what it has."""
    case = Case("cotta", "come", "batch", ranks)
    model = case.model()
    adapter = case.adapter(model, group)

    def failing(_: nn.Module, __: object, out: Tensor) -> None:
        if adapter.count == FAILS_AT and rank == ranks - 1:
            fail(out)

    model.blocks[2].register_forward_hook(failing)
    found: dict[str, object] = {}
    for x in case.mine(rank):
        before = adapter.state_dict()
        try:
            with timed(found, "waited"):
                adapter.step(x)
        except (come.RankError, OSError) as error:
            found["error"] = f"{type(error).__name__}: {error}"
            found["unchanged"] = same(before, adapter.state_dict())
            with timed(found, "waited again"):
                found["again"] = error_of(lambda x=x: adapter.step(x))
            adapter.save(folder / f"{fail.__name__}{rank}.safetensors")
            break
    return found


def dies(_: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails_in_the_backward(out: Tensor) -> None:
    def fail(_: Tensor) -> None:
        raise OSError("no room on this rank")

    if out.requires_grad:
        out.register_hook(fail)


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=3, timeout=timedelta(seconds=120))
    pair, other = dist.new_group([0, 1]), dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT))
    torch.save(equal(rank, pair, folder), folder / f"equal{rank}.pt")
    if rank < 2:
        torch.save(lost(rank, 2, other, folder, fails_in_the_backward), folder / f"late{rank}.pt")
    torch.save(lost(rank, 3, True, folder, dies), folder / f"killed{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

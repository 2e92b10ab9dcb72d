"""One stream over several processes: the cases, and what each rank does. `tests/test_ranks.py` compares with one process.

    python ranked.py RANK RANKS FOLDER equal|killed
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed as dist
from torch import nn

import come
from come import testing

LR = 1e-2
NORMALIZATION = ((0.45,), (0.07,))  # testing.batches() are no images in [0, 1], but normalized
KILLED_AT = 4
PARTS = {
    2: [(6, 6), (8, 4), (6, 6), (12, 0), (5, 7), (6, 6), (6, 6), (3, 9), (6, 6), (6, 6), (4, 3), (0, 1)],
    3: [(4, 4, 4), (5, 0, 7), (4, 4, 4), (4, 4, 4), (1, 10, 1), (4, 4, 4), (4, 4, 4), (4, 4, 4), (2, 6, 4), (4, 4, 4), (3, 3, 1), (1, 1, 0)],
}  # fmt: skip
"""How many samples of each batch come from which rank; the last batches are smaller than the others, and than the ranks are many."""
NOTHING = 5
"""The batch whose last samples are the least certain, so that the last rank selects none."""


class Case(NamedTuple):
    """A stream over ranks, and in one process."""

    method: str
    objective: str
    norm: str
    ranks: int
    guard: bool = True
    arguments: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        more = "".join(f"-{key}" for key, _ in self.arguments)
        return f"{self.method}-{self.objective}-{self.norm}-{self.ranks}{'' if self.guard else '-bare'}{more}"

    def model(self) -> nn.Module:
        return testing.TinyClassifier(testing.NORMS[self.norm])

    def adapter(self, model: nn.Module, ranks: object) -> come.Adapter:
        known = come.methods.get(self.method).hyperparameters()
        small = {
            "cotta": {"views": 3, "confident": 0.6},
            "memo": {"views": 3},
            "rotta": {"capacity": 8, "every": 10},
            "t3a": {"supports": 3},
            "tea": {"dreams": 2, "buffer": 20},
            "lame": {"k": 1, "affinity": "rbf"},
        }
        given = {"lr": LR} | small.get(self.method, {})
        if "source" in known:
            given["source"] = testing.batches(2, seed=9)
        if "normalization" in known:
            given["normalization"] = NORMALIZATION
        given |= dict(self.arguments)
        return come.adapt(model, self.method, objective=self.objective, guard=self.guard, ranks=ranks, **given)

    def batches(self) -> list[torch.Tensor]:
        sizes = [sum(parts) for parts in PARTS[self.ranks]]
        made = [x[:size] for x, size in zip(testing.batches(len(sizes)), sizes, strict=True)]
        model = self.model().eval()
        with torch.no_grad():
            entropy = come.Softmax().entropy(model(made[NOTHING]))
        made[NOTHING] = made[NOTHING][entropy.argsort()]
        made[2][3] = torch.nan  # an invalid sample
        return made if self.guard else [x.nan_to_num(0.5) for x in made]

    def mine(self, rank: int) -> list[torch.Tensor]:
        return [x.split(parts)[rank] for x, parts in zip(self.batches(), PARTS[self.ranks], strict=True)]


FIRST = ("tent", "eata", "sar", "cotta")
OTHERS = ("deyo", "lame", "memo", "norm", "pl", "rdumb", "roid", "rotta", "source", "t3a", "tea")
CASES = [
    *(Case(m, o, n, r) for m in FIRST for o in ("em", "come") for n in ("layer", "batch") for r in (2, 3)),
    *(Case(m, "come", "batch", 3, guard=False) for m in FIRST),
    *(Case(m, "come", n, 3) for m in OTHERS for n in ("layer", "batch")),
    Case("tent", "em", "layer", 2, arguments=(("lr", 3.0),)),  # collapses, and recovers
    Case("tent", "em", "batch", 3, arguments=(("lr", 3.0),)),
    Case("eata", "come", "layer", 2, arguments=(("margin", 0.15),)),  # few are selected: they go through the model again
    Case("sar", "come", "group", 3, arguments=(("margin", 0.15),)),
    Case("tent", "come", "layer", 3, arguments=(("lr", None),)),  # the paper's rate depends on the size of the batch
]


def trajectory(adapter: come.Adapter, batches: list[torch.Tensor]) -> dict[str, object]:
    steps = [adapter.step(x) for x in batches]
    return {"steps": [step._asdict() for step in steps], "state": adapter.state_dict(), "health": adapter.health()}


def equal(rank: int, folder: Path) -> None:
    """All cases, and then what must be refused."""
    pair = dist.new_group([0, 1])
    found = {}
    for case in CASES:
        if rank < case.ranks:
            adapter = case.adapter(case.model(), pair if case.ranks == 2 else True)
            begin = time.perf_counter()
            found[case.name] = trajectory(adapter, case.mine(rank))
            print(f"{case.name} {time.perf_counter() - begin:.2f}", flush=True)
    found["others"] = others(rank, folder, pair)
    torch.save(found, folder / f"rank{rank}.pt")


def error_of(call) -> str:
    try:
        call()
    except come.ComeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def others(rank: int, folder: Path, pair: object) -> dict[str, object]:
    """What is no trajectory, on all three ranks."""
    found: dict[str, object] = {}
    case = Case("eata", "come", "batch", 3)
    model, data = case.model(), case.mine(rank)
    x = data[0]

    if rank < 2:
        found["group"] = repr(Case("tent", "come", "layer", 2).adapter(case.model(), pair))
    found["foa"] = error_of(lambda: come.adapt(testing.TinyTransformer(testing.NORMS["layer"]), "foa", ranks=True))
    found["wrapped"] = error_of(lambda: come.adapt(nn.parallel.DistributedDataParallel(case.model()), "tent", ranks=True))
    found["other model"] = error_of(lambda: come.adapt(testing.TinyClassifier(testing.NORMS["layer"], seed=rank), "tent", ranks=True))
    found["other method"] = error_of(lambda: come.adapt(model, "tent", lr=1.0 + rank, ranks=True))

    adapter = case.adapter(model, True)
    adapter.step(x)
    before = adapter.state_dict()
    found["bad input"] = error_of(lambda: adapter.step(x.long() if rank == 1 else x))
    found["other shape"] = error_of(lambda: adapter.step(x[..., :4] if rank == 1 else x))
    found["empty"] = error_of(lambda: adapter.step(x[:0]))
    found["check"] = error_of(lambda: adapter.check(x))
    found["unchanged"] = [name for name, value in adapter.state_dict().items() if not torch.equal(value, before[name])]
    found["predicted"] = adapter.predict(x)
    found["after errors"] = adapter.step(data[1])._asdict()

    adapter.save(folder / "shared.safetensors")
    adapter.save(folder / f"only-the-first-{rank}.safetensors")
    adapter.callbacks.append(come.callbacks.Snapshots(folder / "snapshots", every=1, keep=2))
    later = [adapter.step(one) for one in data[2:5]]
    dist.barrier()
    resumed = case.adapter(case.model(), True)
    resumed.load(folder / "shared.safetensors")
    found["resumed"] = all(torch.equal(adapter_step.logits, resumed.step(one).logits) for adapter_step, one in zip(later, data[2:5], strict=True))
    copied = pickle.loads(pickle.dumps(resumed))
    found["copied"] = torch.equal(copied.step(data[6]).logits, resumed.step(data[6]).logits)
    if rank == 1:
        resumed.reset()
    found["other state"] = error_of(lambda: resumed.step(x))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        come.adapt(model, "tent", compile=True, ranks=True).step(x)
    found["compile"] = [str(one.message) for one in said if "compile=True" in str(one.message)]

    own = come.adapt(model, ByHalves(lr=LR), guard=False, ranks=True)
    found["own estimate"] = own.step(x).logits
    hooked = come.adapt(model, Hooked(lr=LR), ranks=True)
    found["hooks"] = error_of(lambda: hooked.step(x))
    return found


class ByHalves(come.methods.Tent):
    """Estimates BatchNorm statistics in a way of its own, which knows nothing of ranks."""

    name = "by_halves"

    def adapt(self, ctx, x):
        @torch.no_grad()
        def estimate(layer, features):
            half = features[: len(features) // 2]
            dims = [0, *range(2, features.ndim)]
            return half.mean(dim=dims), half.var(dim=dims) + 0.1

        logits = ctx.forward(x, statistics=estimate)
        loss = self.objective.entropy(logits)
        ctx.descend(loss.mean())
        return come.Step(logits, loss, ctx.valid)


class Hooked(come.methods.Tent):
    name = "hooked"

    def adapt(self, ctx, x):
        ctx.forward(x, hooks=[lambda: ctx.model.model.register_forward_hook(lambda *_: None)])
        return super().adapt(ctx, x)


def killed(rank: int, ranks: int, folder: Path) -> None:
    """The last rank dies in the middle of a step; the others save what they have."""
    case = Case("cotta", "come", "batch", ranks)
    model = case.model()
    adapter = case.adapter(model, True)
    calls = []

    def die(*_: object) -> None:
        calls.append(1)
        if adapter.count == KILLED_AT and len(calls) > 1 and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    model.blocks[2].register_forward_hook(die)
    done = 0
    for x in case.mine(rank):
        begin = time.perf_counter()
        try:
            adapter.step(x)
        except come.RankError as error:
            waited = time.perf_counter() - begin
            adapter.save(folder / f"left{rank}.safetensors")
            again = time.perf_counter()
            second = error_of(lambda x=x: adapter.step(x))
            torch.save(
                {"error": str(error), "waited": waited, "done": done, "again": second, "wait": time.perf_counter() - again},
                folder / f"left{rank}.pt",
            )
            return
        done += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    if sys.argv[4] == "equal":
        equal(rank, folder)
        dist.barrier()
        dist.destroy_process_group()
    else:
        killed(rank, ranks, folder)

"""Random models, batches and values for any method: what the tests sample and `fuzz.py` runs by the thousand."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import nn

import come
from come import testing

sys.path.insert(0, str(Path(__file__).parents[1]))
from asking import ask_the_source

NORMS = ("batch", "group", "layer", "instance", "rms", "none")
VALUES = (float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 1e-42, 0.0, 1e4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SMALL = {
    "cotta": {"views": 2},
    "foa": {"prompts": 1, "population": 3},
    "memo": {"views": 2},
    "rotta": {"capacity": 4, "every": 3},
    "t3a": {"supports": 2},
    "tea": {"dreams": 1, "buffer": 8},
}


class Channels(nn.Module):
    """A norm over channels of images."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


def norm_layer(kind, width):
    return {
        "batch": lambda: nn.BatchNorm2d(width),
        "group": lambda: nn.GroupNorm(2, width),
        "layer": lambda: Channels(nn.LayerNorm(width)),
        "instance": lambda: nn.InstanceNorm2d(width, affine=True),
        "rms": lambda: Channels(nn.RMSNorm(width)),
        "none": nn.Identity,
    }[kind]()


class Network(nn.Module):
    """A few convolutions with norms of any kind between them."""

    def __init__(self, norms, width, classes, seed):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = []
            for i, kind in enumerate(norms):
                layers.append(
                    nn.Sequential(nn.Conv2d(width if i else 3, width, 3, padding=1), norm_layer(kind, width), nn.GELU())
                )
            self.blocks = nn.Sequential(*layers)
            self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(x).mean(dim=(2, 3)))


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@dataclass(frozen=True)
class Case:
    """One model, one method, a few batches with something wrong in them."""

    method: str
    objective: str
    norms: tuple[str, ...]
    width: int
    classes: int
    size: int
    dtype: torch.dtype
    layout: str
    batches: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]
    lr: float
    seed: int
    nervous: bool

    def run(self):
        """ "refused" for a typed error, "answered" otherwise; anything that is not finite in the end is an AssertionError."""
        model, size, classes = Network(self.norms, self.width, self.classes, self.seed), self.size, self.classes
        if "ViT" in come.methods.get(self.method).needs:
            norms = list(testing.NORMS.values())
            model, size, classes = testing.TinyTransformer(norms[self.size % len(norms)], self.seed), 8, testing.CLASSES
        model = model.to(self.dtype)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        known = come.methods.get(self.method).hyperparameters()
        arguments = dict(SMALL.get(self.method, {}))
        generator = torch.Generator().manual_seed(self.seed)
        if "source" in known:
            arguments["source"] = [torch.rand(4, 3, size, size, generator=generator).to(self.dtype)]
        try:
            guard = come.Guard(samples=4) if self.nervous else True
            adapter = come.adapt(model, self.method, objective=self.objective, lr=self.lr, guard=guard, **arguments)
            for count, spoiled in self.batches:
                x = torch.rand(count, 3, size, size, generator=generator)
                for place, value in spoiled:
                    x[place % count].flatten()[place % x[0].numel()] = value
                if self.nervous:
                    ask_the_source(adapter)
                step = adapter.step(self.laid_out(x.to(self.dtype)))
                assert step.logits.shape == (count, classes)
                assert step.logits.isfinite().all(), "logits that are not finite"
                assert step.valid.shape == (count,)
                bad = [name for name, p in adapter.adapted_parameters.items() if not p.isfinite().all()]
                assert not bad, f"parameters that are not finite: {bad}"
        except come.ComeError:
            return "refused"
        finally:
            after = model.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before.items()), "the model was changed"
        return "answered"

    def laid_out(self, x):
        # torch 2.4 to 2.11 crash in the backward of GroupNorm on half-precision, channels-last batches on the CPU
        crashes = "group" in self.norms and x.dtype != torch.float32 and TORCH < (2, 15)
        if self.layout == "channels_last" and not crashes:
            return x.contiguous(memory_format=torch.channels_last)
        if self.layout == "strided":
            return torch.stack([x, x], dim=-1)[..., 0]
        return x


@st.composite
def cases(draw):
    def batch():
        count = draw(st.integers(1, 70) if draw(st.integers(0, 9)) == 0 else st.integers(1, 8))
        spoiled = draw(st.lists(st.tuples(st.integers(0, 500), st.sampled_from(VALUES)), max_size=3))
        return count, tuple(spoiled)

    return Case(
        method=draw(st.sampled_from(come.methods.names())),
        objective=draw(st.sampled_from(["em", "come", "come:evidence=relu", "em:freeze_norm=true", "come:tau=50"])),
        norms=tuple(draw(st.lists(st.sampled_from(NORMS), min_size=1, max_size=4))),
        width=draw(st.sampled_from([2, 4, 8])),
        classes=draw(st.sampled_from([2, 3, 10, 50])),
        size=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(["plain", "channels_last", "strided"])),
        batches=tuple(batch() for _ in range(draw(st.integers(1, 3)))),
        lr=draw(st.sampled_from([1e-3, 1.0, 1e3, 1e30])),
        seed=draw(st.integers(0, 5)),
        nervous=draw(st.booleans()),
    )

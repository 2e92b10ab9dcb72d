"""The speed of `come`, as ratios to named baselines that are measured in the same run.

    python benchmarks/speed.py --out speed.json     # one GPU; no row is begun once --budget seconds are over
    python benchmarks/speed.py --only vit_b,profile --modes published,compiled --budget 0
    python benchmarks/speed.py --tiny               # small models on a CPU: does everything run?

Random weights, batches of 64. Baselines are in `published.py`: classic loops in float32 without TF32, a fast loop written by
hand (bf16 autocast, torch.compile), and torch-ttt where it is installed. A row has the median of blocks of ten steps after the
warm-up, images per second, the peak of allocated memory with the model and one batch counted (warm-up and compilation
included, because what a CUDA graph uses is seen only when it is captured), the peak of reserved memory, seconds until the
warm-up was over, and how many times as fast it is as its baselines. The learning rate is tiny on both sides: the work is the
same, and random weights do not drift to where no sample is selected or the guard steps in.

Parts (--only): vit_b, resnet50, vit_s: rows of that model; guard: what the guard costs the compiled step, in interleaved
blocks, and profile: where the time of the GPU goes, both on the models that are chosen, or all three; bench: `come bench` from
JPEG files, where the first stream of each method includes its compilation; heavy: CoTTA, MEMO, TEA, FOA on ViT-B; scaling:
batch, classes, depth. Two more run only when they are named: methods and memory, time and memory of every method next to
the paper's (`methods.py`).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import methods
import published
import timm
import torch
from torch import Tensor, nn

import come
from come.state.files import replacing

MODELS = ("vit_b", "resnet50", "vit_s")
PARTS = (*MODELS, "guard", "profile", "bench", "heavy", "scaling")
OF_METHODS = ("methods", "memory")
MODES = (
    *("forward", "published", "fast", "float32", "tf32", "bf16", "compiled", "sar", "eata", "ttt"),  # of the models
    *("cotta", "memo", "tea", "foa", "eager"),  # of "heavy", with "published" and "compiled"
    *("batch", "classes", "depth"),  # of "scaling"
)
LR = 1e-6
BLOCK = 10
BLOCKS = 5
SHARE_BLOCK = 20
START = 100
"""Steps after which the guard's questions to the source model have become rare."""

Step = Callable[[Tensor], Any]


@dataclass
class Row:
    """One line of the table."""

    part: str
    name: str
    ms: float = math.nan
    batch: int = 0
    mb: float | None = None
    reserved_mb: float | None = None
    steady_mb: float | None = None
    warm_s: float = math.nan
    """Seconds to make it and to warm it up, compilation included."""
    spread: tuple[float, float] = (math.nan, math.nan)
    """Fastest and slowest block, in ms for a step."""
    times_as_fast: dict[str, float] = field(default_factory=dict)
    memory_ratio: dict[str, float] = field(default_factory=dict)
    note: str = ""
    error: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def images_per_second(self) -> float:
        return 1000 * self.batch / self.ms

    def line(self) -> str:
        """As text."""
        if self.error:
            return f"{self.part:<9} {self.name:<34} FAILED: {self.error}"
        if math.isnan(self.ms):
            return f"{self.part:<9} {self.name:<34} {self.note}"
        memory = f"{self.mb:>8,.0f} {self.reserved_mb:>8,.0f}" if self.mb is not None else f"{'':>8} {'':>8}"
        ratios = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in self.times_as_fast.items())
        return (
            f"{self.part:<9} {self.name:<34} {self.ms:>9.2f} {self.images_per_second:>9,.0f} {memory} {self.warm_s:>6.1f}  "
            f"{ratios}{'; ' if ratios and self.note else ''}{self.note}"
        ).rstrip()


HEAD = (
    f"{'part':<9} {'what':<34} {'ms/step':>9} {'images/s':>9} {'MB':>8} {'reserved':>8} {'warm s':>6}  times as fast as"
)


class OutOfTimeError(Exception):
    """The budget is spent."""


class Lab:
    """Measures rows, prints each at once, and keeps all of them in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tiny: bool = options.tiny
        self.device = torch.device("cpu" if options.tiny or not torch.cuda.is_available() else "cuda")
        self.cuda = self.device.type == "cuda"
        if self.tiny:
            torch.set_num_threads(1)
        self.parts, self.modes = options.only, options.modes
        self.budget: float = options.budget or math.inf
        self.out: Path | None = options.out
        self.rows: list[Row] = []
        self.began = time.perf_counter()
        self.batch = 8 if self.tiny else 64
        self.blocks, self.block = (2, 2) if self.tiny else (BLOCKS, BLOCK)

    def chosen(self, modes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the modes that were asked for; all, if none of them was."""
        return tuple(mode for mode in modes if mode in self.modes) or modes

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def add(self, row: Row) -> Row:
        """Print a row and write all of them down."""
        self.rows.append(row)
        print(row.line(), flush=True)
        if self.out is not None:
            kept = [asdict(r) | {"images_per_second": r.images_per_second} for r in self.rows]
            found = {"machine": machine(self.device), "seconds": round(self.elapsed, 1), "rows": kept}
            with replacing(self.out) as new:
                new.write_text(json.dumps(plain(found), indent=1))
        return row

    @contextmanager
    def attempt(self, part: str, name: str) -> Iterator[None]:
        """What fails is a line of the table; afterwards memory and compiled code are given back."""
        if self.elapsed > self.budget:
            raise OutOfTimeError
        try:
            yield
        except OutOfTimeError:
            raise
        except Exception as error:
            said = next((line for line in str(error).splitlines() if line.strip()), "")
            self.add(Row(part, name, error=f"{type(error).__name__}: {said}"[:200]))
        finally:
            full_precision()
            self.free()

    def free(self, compiled: bool = False) -> None:
        """Give memory back; with `compiled` also what torch.compile keeps."""
        if compiled:
            torch._dynamo.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def timed(self, step: Step, batches: list[Tensor], steps: int) -> float:
        """Seconds for a step, over a block."""
        self.sync()
        began = time.perf_counter()
        for i in range(steps):
            step(batches[i % len(batches)])
        self.sync()
        return (time.perf_counter() - began) / steps

    def measure(
        self,
        part: str,
        name: str,
        make: Callable[[], Step],
        batches: list[Tensor],
        *,
        model: nn.Module | None = None,
        versus: Iterable[str] = (),
        warm: int = 3,
        blocks: int | None = None,
        block: int | None = None,
        note: Callable[[Step], str] | None = None,
    ) -> Step | None:
        """Make something, warm it up, time it, and add its row; None if it failed.

        Args:
            model: is on the device already and counts; without it what `make` makes includes the model.
            versus: names of rows of this part that it is compared with, if they were measured.
            note: what to say of it, asked after the timing.
        """
        row, step = Row(part, name, batch=len(batches[0])), None
        blocks, block = blocks or self.blocks, block or self.block
        with self.attempt(part, name):
            self.free()
            counted = batches[0].nbytes + (0 if model is None else sum(p.nbytes for p in model.parameters()))
            before, reserved = self.allocated() - counted, 0
            if self.cuda:
                reserved = torch.cuda.memory_reserved() - counted
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            made = make()
            self.timed(made, batches, min(warm, 4) if self.tiny else warm)
            row.warm_s = time.perf_counter() - began
            if self.cuda:
                row.mb = (torch.cuda.max_memory_allocated() - before) / 2**20
                torch.cuda.reset_peak_memory_stats()
            times = [self.timed(made, batches, block) for _ in range(blocks)]
            if self.cuda:
                row.steady_mb = (torch.cuda.max_memory_allocated() - before) / 2**20
                row.mb = max(row.mb or 0.0, row.steady_mb)
                row.reserved_mb = (torch.cuda.max_memory_reserved() - reserved) / 2**20
            row.ms = 1000 * statistics.median(times)
            row.spread = (1000 * min(times), 1000 * max(times))
            self.compare(row, versus)
            row.note = note(made) if note else ""
            self.add(row)
            step = made
        return step

    def compare(self, row: Row, versus: Iterable[str]) -> None:
        """Fill in the ratios to the rows of the same part that have these names."""
        for name in versus:
            other = next((r for r in self.rows if (r.part, r.name) == (row.part, name) and not r.error), None)
            if other is not None:
                row.times_as_fast[name] = row.images_per_second / other.images_per_second
                if row.mb is not None and other.mb:
                    row.memory_ratio[name] = row.mb / other.mb


def plain(value: Any) -> Any:
    """For JSON, which has no NaN."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine(device: torch.device) -> dict[str, str]:
    """Where this was measured."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "timm": timm.__version__, "come": come.__version__}
    return {"device": name, "python": platform.python_version(), **versions}


def tensor_float(on: bool) -> None:
    """Matrix products and convolutions in TF32, or not."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def full_precision() -> None:
    """As every row begins."""
    tensor_float(False)


# ---- models and batches ----


def build(name: str, tiny: bool, **changes: Any) -> nn.Module:
    """A model with random weights, on the CPU."""
    torch.manual_seed(0)
    if tiny and name == "resnet50":
        return timm.create_model("resnet18", num_classes=10, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)).eval()
    if tiny:
        small = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3, "num_classes": 10}
        return timm.create_model("vit_tiny_patch16_224", **(small | changes)).eval()
    if name == "vit_s":
        small = {"img_size": 64, "patch_size": 8, "num_classes": 200}
        return timm.create_model("vit_small_patch16_224", **(small | changes)).eval()
    return timm.create_model({"vit_b": "vit_base_patch16_224", "resnet50": "resnet50"}[name]).eval()


def images(lab: Lab, name: str, size: int | None = None, count: int = 4) -> list[Tensor]:
    """Batches of different images in [0, 1]."""
    side = 32 if lab.tiny else 64 if name == "vit_s" else 224
    draw = torch.Generator(lab.device).manual_seed(1)
    how: dict[str, Any] = {"generator": draw, "device": lab.device}
    size = size or lab.batch
    # Each image has a colour and a contrast of its own, so that entropies differ.
    return [torch.rand(size, 3, 1, 1, **how) * torch.rand(size, 3, side, side, **how) for _ in range(count)]


def ours(model: nn.Module, method: str = "tent", *, guard: bool | come.Guard = True, **more: Any) -> come.Adapter:
    """`come.adapt` with the tiny learning rate; what is the default is not said, so that older versions can be measured."""
    return come.adapt(model, method, guard=guard, **({"lr": LR} | {k: v for k, v in more.items() if v is not False}))


# ---- the rows of a model ----


class ModelRows:
    """All rows of one model."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab, self.name = lab, name
        self.master = build(name, lab.tiny)
        self.batches = images(lab, name)
        self.convolutional = name == "resnet50"
        self.bf16: dict[str, Any] = {"precision": "bf16", "channels_last": self.convolutional}
        self.asked = 0.0
        self.shared: nn.Module | None = None

    def fresh(self) -> nn.Module:
        """The model on the device, to be changed."""
        return deepcopy(self.master).to(self.lab.device)

    @property
    def model(self) -> nn.Module:
        """The model on the device, not to be changed: `come.adapt` does not."""
        if self.shared is None:
            self.shared = self.fresh()
        return self.shared

    def baseline(self, name: str, make: Callable[[], Step], **more: Any) -> None:
        """A row of something that has a model of its own."""
        self.lab.measure(self.name, name, make, self.batches, **more)

    def adapted(self, name: str, method: str = "tent", **more: Any) -> come.Adapter | None:
        """A row of ours."""
        row = {key: more.pop(key) for key in ("versus", "note") if key in more}
        row.setdefault("versus", ["published tent+come"])
        warm = 16 if more.get("guard", True) else 3  # the guard's first three questions are over by then
        make: Callable[[], Any] = lambda: ours(self.model, method, **more)  # noqa: E731
        return self.lab.measure(self.name, name, make, self.batches, model=self.model, warm=warm, **row)  # type: ignore[return-value]

    def run(self) -> None:
        modes = {
            "forward": self.forward,
            "published": self.published,
            "fast": self.fast,
            "float32": self.float32,
            "tf32": lambda: self.adapted("ours tf32, guard", precision="tf32"),
            "bf16": lambda: self.adapted("ours bf16, guard", **self.bf16),
            "compiled": self.compiled,
            "sar": self.sar,
            "eata": self.eata,
            "ttt": self.ttt,
        }
        few = ("forward", "published", "float32", "compiled") if self.name == "vit_s" else tuple(modes)
        chosen = self.lab.chosen(few)
        for mode in few:
            if mode in chosen:
                modes[mode]()
            elif mode == "compiled" and {"guard", "profile"} & set(self.lab.parts):
                self.compiled(rows=False)

    def forward(self) -> None:
        """The model alone, in evaluation mode, without gradients."""
        kinds = ["float32", "tf32", "bf16", "bf16 compiled"] if self.name != "vit_s" else ["float32", "bf16"]
        for kind in kinds:
            self.baseline(f"forward {kind}", lambda kind=kind: self._forward(kind), versus=["forward float32"])
        self.lab.free(compiled=True)

    def _forward(self, kind: str) -> Step:
        model = self.fresh()
        tensor_float(kind == "tf32")
        layout = torch.channels_last if self.convolutional and "bf16" in kind else torch.contiguous_format
        model = model.to(memory_format=layout)
        called = torch.compile(model) if "compiled" in kind else model

        @torch.inference_mode()
        def step(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled="bf16" in kind):
                return called(x.contiguous(memory_format=layout))

        return step

    def published(self) -> None:
        self.baseline("published tent+come", lambda: published.Tent(self.fresh(), LR), versus=["forward float32"])

    def fast(self) -> None:
        make = lambda: published.FastTent(self.fresh(), LR, channels_last=self.convolutional)  # noqa: E731
        self.baseline("hand-written fast tent+come", make, versus=["published tent+come"], warm=5)
        self.lab.free(compiled=True)

    def float32(self) -> None:
        if self.name != "vit_s":
            self.adapted("ours float32", guard=False)
        self.adapted("ours float32, guard")

    def compiled(self, rows: bool = True) -> None:
        """The compiled step without and with the guard: rows, and the parts "guard" and "profile", which need both again."""
        how = self.bf16 | {"compile": True}
        versus = ["published tent+come", "hand-written fast tent+come", "forward bf16"]
        pair: dict[bool, come.Adapter] = {}
        for guard in (False, True):
            name = f"ours bf16 compiled{', guard' if guard else ''}"
            watched = guard and come.Guard(on_event=self._count)
            if rows:
                made = self.adapted(name, guard=watched, versus=versus, **how)
                pair |= {} if made is None else {guard: made}
            else:
                with self.lab.attempt(self.name, name):
                    pair[guard] = ours(self.model, guard=watched, **how)
        if len(pair) == 2 and "guard" in self.lab.parts:
            self.guard(pair)
        if True in pair and "profile" in self.lab.parts and self.lab.cuda:
            self.profile(pair[True])
        pair.clear()
        self.lab.free(compiled=True)

    def _count(self, event: Any) -> None:
        if "agreement" in event.details:
            self.asked += event.details["samples"] / self.lab.batch

    def sar(self) -> None:
        def make() -> published.SAR:
            model = self.fresh()
            return published.SAR(model, LR, come.select.norm_affine(skip_last=0.25)(model).values(), margin=10.0)

        self.baseline("published sar+come", make)
        self.adapted(
            "sar+come bf16 compiled, guard",
            "sar",
            margin=10.0,
            compile=True,
            versus=["published sar+come"],
            **self.bf16,
        )
        self.lab.free(compiled=True)

    def eata(self) -> None:
        source = self.batches[:1]

        def make() -> published.EATA:
            tent = published.Tent(self.fresh(), 1e-12)
            margin = self._margin([published.opinion_entropy(tent(x)) for x in self.batches])
            return published.EATA(self.fresh(), 1e-12, source, margin, redundancy=2.0)

        def share(step: published.EATA) -> str:
            shares = []
            for x in self.batches:
                step(x)
                shares.append(step.share)
            return selected(shares)

        self.baseline("published eata+come", make, note=share)
        name = "eata+come bf16 compiled, guard"
        with self.lab.attempt(self.name, name):
            with ours(self.model, lr=1e-12, **self.bf16) as probe:
                margin = self._margin([probe.step(x).loss for x in self.batches])
            self.adapted(
                name,
                "eata",
                margin=margin,
                redundancy=2.0,
                source=source,
                lr=1e-12,
                compile=True,
                versus=["published eata+come"],
                note=lambda a: selected([float(a.step(x).used.float().mean()) for x in self.batches]),
                **self.bf16,
            )
        self.lab.free(compiled=True)

    def _margin(self, entropies: list[Tensor]) -> float:
        """Below which half of the samples lie, as a share of ln K."""
        return float(torch.cat(entropies).detach().median()) / math.log(self.master.num_classes)

    def ttt(self) -> None:
        """torch-ttt, which adapts BatchNorm layers only; its Tent minimizes the softmax's entropy."""
        if not self.convolutional:
            return
        if importlib.util.find_spec("torch_ttt") is None:
            self.lab.add(Row(self.name, "torch-ttt tent+em", note="not installed"))
            return
        em = published.entropy
        self.baseline("published tent+em", lambda: published.Tent(self.fresh(), LR, em))
        once = {"num_steps": 1, "copy_model": False}
        for name, how in (("torch-ttt tent+em, one step", once), ("torch-ttt tent+em, its defaults", {})):
            make: Callable[[], Any] = lambda how=how: published.torch_ttt(self.fresh(), LR, **how)  # noqa: E731
            self.baseline(name, make, versus=["published tent+em", "ours bf16 compiled, guard"])
        self.lab.rows[-1].details["note"] = "3 steps on a copy of the model; both make one more forward for the answer"

    def guard(self, pair: dict[bool, come.Adapter]) -> None:
        """What the guard costs the compiled step: blocks with and without it in turn, from the first step and after 100."""
        lab, name = self.lab, "guard / no guard, compiled"
        with lab.attempt(self.name, name):
            size, start = (2, 4) if lab.tiny else (SHARE_BLOCK, START)
            for adapter in pair.values():
                adapter.reset()
                lab.timed(adapter, self.batches, SHARE_BLOCK)  # all that is compiled is compiled
                adapter.reset()
            self.asked = 0.0
            early = self._turns(pair, start // size, size)
            asked, self.asked = self.asked, 0.0
            late = self._turns(pair, 6, size)
            ratios = [with_guard / without for without, with_guard in late]
            first = sum(b for _, b in early) / sum(a for a, _ in early)
            found = {
                "first_ratio": first,
                "first_asked": asked,
                "later_ratio": statistics.median(ratios),
                "later_range": [min(ratios), max(ratios)],
                "later_asked": self.asked,
            }
            text = (
                f"{statistics.median(ratios):.3f} after step {start} ({min(ratios):.3f} to {max(ratios):.3f}, "
                f"{self.asked:.0f} batches asked), {first:.3f} in the first {start} ({asked:.0f} asked)"
            )
            lab.add(Row(self.name, name, note=text, details=found))

    def _turns(self, pair: dict[bool, come.Adapter], turns: int, size: int) -> list[tuple[float, float]]:
        """Seconds for a step without and with the guard, block by block."""
        found = []
        for turn in range(turns):
            order = (False, True) if turn % 2 else (True, False)
            seconds = {guard: self.lab.timed(pair[guard], self.batches, size) for guard in order}
            found.append((seconds[False], seconds[True]))
        return found

    def profile(self, adapter: come.Adapter) -> None:
        """Where the GPU's time goes in 20 compiled steps with the guard."""
        name = "profile, compiled, guard"
        with self.lab.attempt(self.name, name):
            self.lab.timed(adapter, self.batches, START)
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=kinds) as profiler:
                self.lab.timed(adapter, self.batches, SHARE_BLOCK)
            spent, unused = kernels(profiler)
            total = sum(ms for ms, _ in spent.values()) or math.nan
            text = ", ".join(f"{kind} {100 * ms / total:.1f}%" for kind, (ms, _) in spent.items())
            per_step = f"{total / SHARE_BLOCK:.2f} ms of kernels for a step, GPU idle {100 * unused:.1f}%"
            shares = {kind: {"ms": ms / SHARE_BLOCK, "kernels": n / SHARE_BLOCK} for kind, (ms, n) in spent.items()}
            self.lab.add(Row(self.name, name, note=f"{per_step}: {text}", details={"idle": unused, "kinds": shares}))


def selected(shares: list[float]) -> str:
    """The mean share of the samples that drove the update."""
    return f"{100 * statistics.fmean(shares):.0f}% of the samples selected"


# ---- profile ----

KINDS = (
    ("matrix multiplication", r"^triton_tem\w*_(mm|addmm|bmm)"),
    ("copies and casts", r"^triton_poi_fused_(_?_to_copy|copy|clone|_)+_?\d+$"),
    ("norm and elementwise", r"^triton_"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("convolution", r"conv|implicit_gemm|wgrad|dgrad|fprop|winograd"),
    ("matrix multiplication", r"gemm|gemv|cutlass|cublas|nvjet|matmul|splitk"),
    ("copies and casts", r"memcpy|memset|copy|catarray|transpose|nchwto|nhwcto"),
    ("norm and elementwise", r"elementwise|reduce|norm|softmax|bn_|pool"),
)


def kind_of(kernel: str) -> str:
    """What a kernel of that name does."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "rest")


def kernels(profiler: torch.profiler.profile) -> tuple[dict[str, tuple[float, int]], float]:
    """Milliseconds and number of kernels by kind, longest first; and the share of the time in which none ran."""
    spent: dict[str, tuple[float, int]] = {}
    spans: list[tuple[float, float]] = []
    for event in profiler.events():
        marked = event.name.startswith("##") or getattr(event, "is_user_annotation", False)  # spans, not kernels
        if event.device_type != torch.autograd.DeviceType.CUDA or marked:
            continue
        begin, end = event.time_range.start, event.time_range.end
        ms, count = spent.get(kind_of(event.name), (0.0, 0))
        spent[kind_of(event.name)] = (ms + (end - begin) / 1000, count + 1)
        spans.append((begin, end))
    if not spans:
        raise RuntimeError("the profiler saw no kernel")
    return dict(sorted(spent.items(), key=lambda item: -item[1][0])), idle(spans)


def idle(spans: list[tuple[float, float]]) -> float:
    """The share of the whole that no span covers."""
    spans = sorted(spans)
    covered, until = 0.0, spans[0][0]
    for begin, end in spans:
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1 - covered / (until - spans[0][0])


# ---- heavy methods ----


def heavy(lab: Lab, kinds: tuple[str, ...]) -> None:
    """CoTTA, MEMO, TEA and FOA on ViT-B: published loops in float32, ours in bf16, eager and compiled, with the guard."""
    master = build("vit_b", lab.tiny)
    batches, few = images(lab, "vit_b"), images(lab, "vit_b", size=2 if lab.tiny else 8)
    views, dreams, population, buffer = (3, 2, 4, 16) if lab.tiny else (32, 20, 28, 1000)
    fresh: Callable[[], Any] = lambda: deepcopy(master).to(lab.device)  # noqa: E731
    shared = fresh()
    methods: dict[str, tuple[Callable[[], Step], list[Tensor], dict[str, Any]]] = {
        "cotta": (
            lambda: published.CoTTA(fresh(), LR, views),
            batches,
            {"views": views, "confident": 1.0},
        ),
        "memo": (lambda: published.MEMO(fresh(), LR, views), few, {"views": views}),
        "tea": (
            lambda: published.TEA(fresh(), LR, batches[0], buffer, dreams),
            batches,
            {"dreams": dreams, "buffer": buffer},
        ),
        "foa": (
            lambda: published.FOA(fresh(), batches[0], population=population),
            batches,
            {"population": population, "source": batches[:1]},
        ),
    }
    few_steps: dict[str, Any] = {"warm": 1, "blocks": 3, "block": 1}
    wanted = lab.chosen(("published", "eager", "compiled"))
    for kind in (kind for kind in kinds if kind in wanted):
        for name in lab.chosen(tuple(methods)):
            make, inputs, how = methods[name]
            if kind == "published":
                lab.measure("heavy", f"published {name}", make, inputs, **few_steps)
                continue
            compiled = kind == "compiled"
            made: Callable[[], Any] = lambda name=name, how=how, c=compiled: ours(  # noqa: E731
                shared, name, precision="bf16", compile=c, **how
            )
            lab.measure(
                "heavy",
                f"{name} bf16{' compiled' if compiled else ''}, guard",
                made,
                inputs,
                model=shared,
                versus=[f"published {name}"],
                **few_steps | {"warm": 3},
            )
            lab.free(compiled=compiled)


# ---- scaling ----


def scaling(lab: Lab) -> None:
    """Batch, number of classes and depth of a small ViT: published in float32, and ours compiled with the guard."""
    shallow = {"depth": 3 if lab.tiny else 4}
    sizes, classes, depths = ((1, 4), (10,), ()) if lab.tiny else ((1, 16, 64, 256), (1000, 21843), (12, 24))
    cases: list[tuple[str, str, dict[str, Any], int]] = []
    cases += [("batch", f"batch {n}", shallow, n) for n in sizes]
    cases += [("classes", f"K {k}", shallow | {"num_classes": k}, lab.batch) for k in classes]
    cases += [("depth", f"depth {d}", {"depth": d}, lab.batch) for d in depths]  # depth 4 is "batch 64"
    for mode, name, changes, size in cases:
        if mode not in lab.chosen(("batch", "classes", "depth")):
            continue
        with lab.attempt("scaling", name):
            model = build("vit_s", lab.tiny, **changes)
            batches = images(lab, "vit_s", size)
            make: Callable[[], Any] = lambda: published.Tent(deepcopy(model).to(lab.device), LR)  # noqa: E731, B023
            lab.measure("scaling", f"published, {name}", make, batches, blocks=3)
            model.to(lab.device)
            how: dict[str, Any] = {} if lab.tiny else {"precision": "bf16", "compile": True}
            made: Callable[[], Any] = lambda how=how: ours(model, **how)  # noqa: E731, B023
            versus = [f"published, {name}"]
            lab.measure(
                "scaling", f"ours compiled, {name}", made, batches, model=model, versus=versus, warm=16, blocks=3
            )
        lab.free(compiled=True)


# ---- come bench ----


def bench(lab: Lab) -> None:
    """`come bench` from JPEG files: No Adapt, then Tent on the same images, cell by cell."""
    from come.bench import Plan, run
    from come.bench.data.folders import FolderSource
    from come.bench.models import Model, Preprocess
    from come.bench.runner import Progress

    count, classes, side = (64, 10, 32) if lab.tiny else (10_000, 200, 64)
    fast: dict[str, Any] = {} if lab.tiny else {"precision": "bf16", "compile": True}

    class Watch(Progress):
        """The wall-clock time of each cell: what its record does not count is counted here."""

        def start(self, cell: Any, samples: int) -> None:
            self.began = time.perf_counter()

        def finish(self, cell: Any, record: Any, resumed: bool) -> None:
            seconds = time.perf_counter() - self.began
            found = record.result
            row = Row("bench", f"{cell.method}, {cell.corruptions[0]}", batch=lab.batch, warm_s=0.0)
            row.ms = 1000 * seconds / found.samples * lab.batch
            row.note = f"waited {found.seconds_waiting_for_data:.1f} of {seconds:.1f} s for data"
            row.details = {"seconds": found.seconds, "waited": found.seconds_waiting_for_data, "samples": found.samples}
            lab.compare(row, [f"source, {cell.corruptions[0]}"] if cell.method != "source" else [])
            lab.add(row)

    with lab.attempt("bench", "come bench"), tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        write_pictures(Path(folder) / "data", count, classes, side)
        print(f"bench     {count:,} JPEG files written in {time.perf_counter() - began:.1f} s", flush=True)
        preprocess = Preprocess(side, side)
        plan = Plan(
            methods=("source", "tent"),
            objectives=("come",),
            corruptions=("gaussian_noise", "contrast"),
            batch_size=lab.batch,
            data=f"folder:{folder}/data",
            **fast,
        )
        run(
            plan,
            Path(folder) / "run",
            device=str(lab.device),
            workers=0 if lab.tiny else min(8, os.cpu_count() or 1),
            source=FolderSource(plan.data, f"{folder}/data", preprocess),
            model=Model("mine", build("vit_s", lab.tiny), preprocess, classes),
            progress=Watch(),
        )
    lab.free(compiled=True)


def write_pictures(folder: Path, count: int, classes: int, side: int) -> None:
    """Smooth random pictures as JPEG files, a folder for each class."""
    from PIL import Image

    draw = torch.Generator().manual_seed(0)
    for k in range(classes):
        place = folder / f"{k:03d}"
        place.mkdir(parents=True)
        pixels = torch.randint(256, (-(-count // classes), 8, 8, 3), generator=draw, dtype=torch.uint8).numpy()
        for i, one in enumerate(pixels[: (count - k + classes - 1) // classes]):
            Image.fromarray(one).resize((side, side), Image.Resampling.BICUBIC).save(place / f"{i}.jpg", quality=90)


# ---- all of it ----


def of_models(lab: Lab) -> None:
    """The parts that belong to a model, so that each is made and compiled once."""
    chosen = [name for name in MODELS if name in lab.parts]
    if not chosen and {"guard", "profile"} & set(lab.parts):
        chosen = list(MODELS)
    for name in chosen:
        rows = ModelRows(lab, name)
        if name in lab.parts:
            rows.run()
        else:
            rows.compiled(rows=False)
        del rows
        lab.free(compiled=True)


def listed(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Names with commas between."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(part.strip() for part in text.split(","))
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def main(arguments: list[str] | None = None) -> list[Row]:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts_help = f"parts: {', '.join(PARTS)}; or {' and '.join(OF_METHODS)}"
    parser.add_argument("--only", type=listed((*PARTS, *OF_METHODS)), default=PARTS, help=parts_help)
    parser.add_argument(
        "--modes",
        type=listed(MODES),
        default=MODES,
        help=f"rows: {', '.join(MODES)}; all of a part if none of it is named",
    )
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--budget", type=float, default=360, help="seconds after which no row is begun; 0: no limit")
    parser.add_argument("--out", type=Path, help="a JSON file, written anew after every row")
    known = tuple(come.methods.names())
    of_methods = parser.add_argument_group("of methods and memory")
    of_methods.add_argument("--methods", type=listed(known), default=known, help="all if not given")
    of_methods.add_argument("--steps", type=int, default=100)
    of_methods.add_argument("--model", default="vit_base_patch16_224", help="of timm, with random weights")
    of_methods.add_argument("--tf32", action="store_true", help="matrix products in TF32")
    options = parser.parse_args(arguments)
    lab = Lab(options)
    full_precision()
    print(", ".join(f"{key} {value}" for key, value in machine(lab.device).items()))
    if "methods" in lab.parts:
        methods.on_device(options.methods, options.steps, options.model, options.tf32)
    if "memory" in lab.parts:
        methods.counted(options.methods)
    if not set(PARTS) & set(lab.parts):
        return []
    full_precision()
    print(HEAD, flush=True)
    # What takes longest to compile comes last: the budget may end before it.
    parts: list[tuple[str, Callable[[Lab], None]]] = [
        ("bench", bench),
        ("heavy", lambda lab: heavy(lab, ("published", "eager"))),
        ("scaling", scaling),
        ("heavy", lambda lab: heavy(lab, ("compiled",))),
    ]
    try:
        of_models(lab)
        for name, part in parts:
            if name in lab.parts:
                part(lab)
    except OutOfTimeError:
        print(f"stopped: {lab.elapsed:.0f} s are over the budget of {lab.budget:.0f} s; see --only and --budget")
    print(f"{len(lab.rows)} rows in {lab.elapsed:.0f} s")
    return lab.rows


if __name__ == "__main__":
    sys.exit(any(row.error for row in main()))

"""The baselines of the speed table do the work that ours does, and the table can be made anywhere."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import come

FOLDER = Path(__file__).parents[1] / "benchmarks"
LR, CLASSES = 1e-2, 6


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def published():
    load("methods")
    yield load("published")
    for name in ("published", "methods"):
        del sys.modules[name]


class Tiny(nn.Module):
    """A stack of four blocks with LayerNorm and a norm behind them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(8, 16)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.inlet(x))))


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(12, 8, generator=draw) for _ in range(6)]


def half(published):
    """The margin below which half of the samples lie."""
    with torch.no_grad():
        entropies = torch.cat([published.opinion_entropy(Tiny()(x)) for x in batches()])
    return float(entropies.quantile(0.5)) / math.log(CLASSES)


@pytest.mark.parametrize("name", ["tent", "tent_em", "eata", "sar"])
def test_a_baseline_gives_the_logits_of_the_method(published, name):
    model, margin, source = Tiny(), half(published), batches()[5:]
    if name.startswith("tent"):
        objective, loss = ("em", published.entropy) if name == "tent_em" else ("come", published.opinion_entropy)
        theirs = published.Tent(model, LR, loss)
        ours = come.adapt(Tiny(), "tent", objective=objective, lr=LR, guard=False)
    elif name == "eata":
        theirs = published.EATA(model, LR, source, margin, redundancy=0.9)
        ours = come.adapt(Tiny(), "eata", lr=LR, guard=False, source=source, margin=margin, redundancy=0.9)
    else:
        theirs = published.SAR(model, LR, come.select.norm_affine(skip_last=0.25)(model).values(), margin)
        ours = come.adapt(Tiny(), "sar", lr=LR, guard=False, margin=margin)
    used = []
    for x in batches()[:5]:
        step = ours.step(x)
        used.append(step.used.float().mean().item())
        torch.testing.assert_close(theirs(x).detach(), step.logits, atol=1e-4, rtol=0)
    assert name.startswith("tent") or 0.1 < sum(used) / len(used) < 0.9
    assert not torch.allclose(ours.predict(x), Tiny()(x), atol=1e-3), "nothing was adapted"


def test_the_table_is_made_and_written(published, tmp_path, capsys):
    speed = load("speed")
    out = tmp_path / "speed.json"
    arguments = ["--tiny", "--only", "vit_s", "--modes", "published,float32", "--out", str(out)]
    rows = speed.main(arguments)
    assert [row.name for row in rows if row.error] == []
    kept = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in kept][:2] == ["published tent+come", "ours float32, guard"]
    assert kept[1]["times_as_fast"]["published tent+come"] > 0
    assert "times as fast as" in capsys.readouterr().out


def test_heavy_baselines_run(published):
    rows = load("speed").main(["--tiny", "--only", "heavy", "--modes", "published"])
    assert [row.error for row in rows] == [""] * 4


def test_a_row_that_fails_is_one_line(published, capsys):
    speed = load("speed")
    lab = speed.Lab(speed.argparse.Namespace(tiny=True, only=speed.PARTS, modes=speed.MODES, budget=0.0, out=None))
    lab.measure("vit_s", "broken", lambda: 1 / 0, [torch.zeros(1)])
    assert lab.rows[-1].error == "ZeroDivisionError: division by zero"
    assert capsys.readouterr().out.splitlines()[-1].endswith("FAILED: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", "matrix multiplication"),
        ("triton_per_fused_native_layer_norm_native_layer_norm_backward_3", "norm and elementwise"),
        ("triton_poi_fused__to_copy_12", "copies and casts"),
        ("triton_poi_fused_convolution_relu_4", "norm and elementwise"),
        ("pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("sm90_xmma_wgrad_implicit_gemm_indexed_bf16bf16", "convolution"),
        ("Memcpy DtoH (Device -> Pinned)", "copies and casts"),
        ("void at::native::vectorized_elementwise_kernel<4>", "norm and elementwise"),
        ("something_else", "rest"),
    ],
)
def test_kernels_are_told_apart(published, kernel, kind):
    assert load("speed").kind_of(kernel) == kind


def test_idle_is_what_no_kernel_covers(published):
    assert load("speed").idle([(0, 4), (2, 5), (8, 10)]) == pytest.approx(0.3)

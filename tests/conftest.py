"""What the tests share. Their models are tiny: one thread is faster than two, and gives the same sums everywhere."""

import functools
import os
import sys
from typing import ClassVar

import pytest
import torch
from browsing import chromium

import come
from come import testing
from come.model import copies

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
torch.set_num_threads(1)
# On a GPU: no TF32, which other kernels round otherwise, and no additions in a changing order.
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.deterministic = True


class Conformance:
    """What the recorded trajectories have found, from whichever process, printed at the end."""

    def __init__(self):
        self.found = {}

    def pytest_runtest_logreport(self, report):
        for name, found in report.user_properties:
            if name == "conformance" and found["compared"]:
                old = self.found.get(found["case"], found)
                self.found[found["case"]] = max(old, found, key=lambda one: one["error"])

    def pytest_terminal_summary(self, terminalreporter):
        if self.found:
            terminalreporter.section("conformance with the published implementations")
            total = next(iter(self.found.values()))["of"]
            terminalreporter.write_line(
                f"{len(self.found)} of {total} recorded cases compared; largest error / tolerance:"
            )
            worst = {}
            for one in self.found.values():
                worst[one["method"]] = max(worst.get(one["method"], (0.0, "")), (one["error"], one["where"]))
            for method, (ratio, where) in sorted(worst.items()):
                terminalreporter.write_line(f"  {method:<10} {ratio:5.2f}  {where}")


def pytest_configure(config):
    config.pluginmanager.register(Conformance())


@pytest.fixture(autouse=True)
def forget_nets():
    """The pages call a user's file nets.py: what one test has imported of it is not that of the next one."""
    yield
    sys.modules.pop("nets", None)


class Build:
    """Puts a method around a tiny model as a user would, with source batches and the normalization where it takes them."""

    # What keeps the suite short; the code paths are those of the defaults.
    SMALL: ClassVar = {
        "cotta": {"views": 3, "confident": 0.6},
        "foa": {"prompts": 2, "population": 4, "chunk": 24},
        "memo": {"views": 3},
        "norm": {"statistics": "batch"},  # the guard leaves a random network on the source's statistics
        "rotta": {"capacity": 8, "every": 10},
        "t3a": {"supports": 3},
        "tea": {"dreams": 2, "buffer": 20},
        "tpt": {"views": 3, "keep": 0.7},
    }

    def __call__(self, model, method, objective="come", **more):
        arguments = {"lr": 1e-2} | self.SMALL.get(method, {})
        known = come.methods.get(method).hyperparameters()
        like = next(model.parameters())
        if "source" in known:
            named = hasattr(model, "inner")  # testing._Named
            source = [x.to(like) for x in testing.batches(2, seed=9)]
            arguments["source"] = [{"pixel_values": x} for x in source] if named else source
        if "normalization" in known:
            arguments["normalization"] = ((0.45,), (0.07,))  # testing.batches() are no images in [0, 1], but normalized
        return come.adapt(model, method, objective=objective, **(arguments | more))

    @staticmethod
    def model(method):
        """The kind of tiny model that the method can be put around."""
        return testing.TinyTransformer if "ViT" in come.methods.get(method).needs else testing.TinyClassifier


@pytest.fixture(scope="session")
def build():
    return Build()


CUDA = torch.cuda.is_available()


@pytest.fixture(params=["inductor"] if CUDA else ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request, monkeypatch):
    """The backend of `torch.compile`. On a CPU that of aot_eager, which traces the same graphs and skips the C++ compiler."""
    monkeypatch.setattr(copies, "_fused", {})
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver

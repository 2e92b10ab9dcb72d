"""On a GPU: the same numbers as on the CPU, and no step waits for the device."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import come
from come.testing import NORMS, batches

sys.path.insert(0, str(Path(__file__).parent))
from asking import ask_the_source

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# Random numbers of another device are other numbers; what is made of them is compared by the recorded cases.
RANDOM = {name for name in come.methods.names() if "seed" in come.methods.get(name).hyperparameters()}

# What a step has to know before it can go on, or does on the CPU.
WAITS = {name: come.methods.get(name).waits for name in come.methods.names() if come.methods.get(name).waits}
# These count the samples that are used, to run the model on those alone; not in a compiled step.
COUNTS = {"eata", "rdumb", "asr", "sar", "deyo"}


@pytest.fixture
def make(build):
    def make(method, objective, norm, device, **more):
        return build(build.model(method)(NORMS[norm]).to(device), method, objective, **more)

    return make


@contextmanager
def refusing_to_wait():
    """Whatever would wait for the device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its check is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("objective", come.objectives.names())
@pytest.mark.parametrize("method", [name for name in come.methods.names() if name not in RANDOM])
def test_same_as_on_the_cpu(method, objective, norm, make):
    cpu, gpu = make(method, objective, norm, "cpu"), make(method, objective, norm, "cuda")
    for x in batches(4):
        torch.testing.assert_close(gpu(x.cuda()).cpu(), cpu(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("objective", come.objectives.names())
@pytest.mark.parametrize("method", [name for name in come.methods.names() if name not in {*WAITS, *COUNTS}])
def test_no_step_waits_for_the_device(method, objective, make):
    adapter = make(method, objective, "layer", "cuda")
    data = [x.cuda() for x in batches(4)]
    adapter(data[0])  # loads kernels
    with refusing_to_wait():
        for x in data[1:]:
            adapter.step(x)


@pytest.mark.parametrize("method", ["tent", "roid", "pl", "t3a"])
def test_to_ask_the_source_waits_for_nothing(method, make):
    adapter = make(method, "come", "layer", "cuda", guard=come.Guard(samples=12))
    data = [x.cuda() for x in batches(6, size=12)]
    adapter(data[0])
    ask_the_source(adapter)
    adapter(data[1])
    with refusing_to_wait():
        for x in data[2:]:
            ask_the_source(adapter)
            adapter.step(x)
    assert adapter.health()["healthy"] + adapter.health()["collapse"] > 0


@pytest.mark.parametrize("method", come.methods.names())
def test_moving_the_model_in_the_middle_of_a_stream(method, make):
    adapter = make(method, "come", "layer", "cpu")
    adapter(batches(1)[0])
    adapter.to("cuda")
    assert adapter(batches(1)[0].cuda()).device.type == "cuda"
    adapter.reset()
    adapter.to("cpu")
    assert adapter(batches(1)[0]).device.type == "cpu"

"""On a GPU: the same numbers as on the CPU, and no step waits for the device."""

from __future__ import annotations

import pytest
import torch

import come
from come.testing import NORMS, TinyClassifier, batches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(method, objective, norm, device):
    model = TinyClassifier(NORMS[norm]).to(device)
    arguments = {}
    if "source" in come.methods.get(method).hyperparameters():
        arguments["source"] = [x.to(device) for x in batches(2, seed=9)]
    return come.adapt(model, method, objective, lr=1e-2, **arguments)


@pytest.fixture(autouse=True)
def exact():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("objective", come.objectives.names())
@pytest.mark.parametrize("method", come.methods.names())
def test_same_as_on_the_cpu(method, objective, norm):
    cpu, gpu = make(method, objective, norm, "cpu"), make(method, objective, norm, "cuda")
    for x in batches(4):
        torch.testing.assert_close(gpu(x.cuda()).cpu(), cpu(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("objective", come.objectives.names())
@pytest.mark.parametrize("method", come.methods.names())
def test_no_step_waits_for_the_device(method, objective):
    adapter = make(method, objective, "layer", "cuda")
    data = [x.cuda() for x in batches(4)]
    adapter(data[0])  # loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in data[1:]:
            adapter.step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", come.methods.names())
def test_moving_the_model_in_the_middle_of_a_stream(method):
    adapter = make(method, "come", "layer", "cpu")
    adapter(batches(1)[0])
    adapter.to("cuda")
    assert adapter(batches(1)[0].cuda()).device.type == "cuda"
    adapter.reset()
    adapter.to("cpu")
    assert adapter(batches(1)[0]).device.type == "cpu"

"""Save and resume: a stream goes on where it stopped, in another process or on another machine.

Finding: the logits after a restart are the same bit for bit. A state that does not fit the model is refused.
"""

import tempfile
from pathlib import Path

import torch

import come


def network(width):
    """The same network in every process; yours has trained weights."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 3)
    return torch.nn.Sequential(*layers)


batches = [torch.randn(32, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
first = come.adapt(network(16), "eata", beta=0.0, lr=0.01)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "state.safetensors"
    for x in batches[:3]:
        first(x)
    first.save(file)  # weights, momentum, what the method and the guard remember
    expected = [first(x) for x in batches[3:]]

    second = come.adapt(network(16), "eata", beta=0.0, lr=0.01)
    second.load(file)
    assert all(torch.equal(second(x), logits) for x, logits in zip(batches[3:], expected, strict=True))
    try:
        come.adapt(network(8), "eata", beta=0.0, lr=0.01).load(file)
        raise AssertionError("it loaded the state of another model")
    except come.StateError as error:
        print(f"refused: {error}")

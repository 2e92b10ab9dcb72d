"""A fleet of cameras: one model in memory, and for each camera what it has adapted.

Finding: a camera in a fleet gets the answers that an adapter of its own would give, and a broken camera harms no other.
"""

import torch

import come

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))

fleet = come.Fleet(model, "tent", streams=["north", "south"], lr=0.01)
fleet.open("gate", lr=0.001)  # a camera that comes later, with a learning rate of its own
alone = come.adapt(model, "tent", lr=0.01)

names = ["north"] * 6 + ["south"] * 6 + ["gate"] * 6
for _ in range(5):
    x = torch.randn(18, 4) + 1
    x[6:12] = float("nan")  # south is broken
    step = fleet.step(x, names)
    assert torch.allclose(step.logits[:6], alone(x[:6]), atol=1e-5)
    assert not step.valid[6:12].any()
    assert step.valid[:6].all()
    assert step.valid[12:].all()

print({name: fleet.health(name)["invalid_samples"] for name in fleet.streams})
fleet.reset("south")  # repaired: it begins again, the others go on
assert fleet.count("south") == 0
assert fleet.count("north") == 5

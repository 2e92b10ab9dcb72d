"""What the tests of BatchNorm statistics share: points around the centres of classes, and a network that knows them."""

import torch
from torch import nn

KINDS, WIDTH = 8, 16


def points(kinds, seed=0, shifted=False):
    """Points of these classes; shifted, they come smaller and with an offset."""
    centres = 1.2 * torch.randn(KINDS, WIDTH, generator=torch.Generator().manual_seed(0))
    x = centres[kinds] + torch.randn(len(kinds), WIDTH, generator=torch.Generator().manual_seed(seed))
    return 0.5 * x + 0.7 if shifted else x


def shuffled(batches, seed=0, shifted=False):
    """Batches of 64, and their kinds."""
    kinds = torch.randint(KINDS, (64 * batches,), generator=torch.Generator().manual_seed(seed))
    return points(kinds, seed + 1, shifted).split(64), kinds.split(64)


def ordered(batches, seed=0, shifted=False):
    """The same, sorted by class."""
    kinds = torch.cat(shuffled(batches, seed)[1]).sort().values
    return points(kinds, seed + 1, shifted).split(64), kinds.split(64)


def trained():
    """A small network with BatchNorm that knows the points as they are, not shifted; takes about a second."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, KINDS))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for x, kinds in zip(*shuffled(120, seed=77), strict=True):
        nn.functional.cross_entropy(model(x), kinds).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)

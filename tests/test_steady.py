"""Steady: what each part does, on streams where it matters and where it must not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import come

CLASSES, WIDTH, BATCH = 20, 16, 32


def test_its_rate_is_called_no_papers():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    assert "lr=0.01 x batch/64 (the default for models without BatchNorm)" in repr(come.adapt(model, "steady"))


@pytest.fixture(scope="module")
def task():
    """A classifier with LayerNorm of points around one centre for each class, and 640 points that it often gets wrong."""
    torch.manual_seed(0)
    centres = torch.randn(CLASSES, WIDTH)

    def points(count, noise, seed):
        draw = torch.Generator().manual_seed(seed)
        y = torch.randint(CLASSES, (count,), generator=draw)
        return centres[y] + noise * torch.randn(count, WIDTH, generator=draw), y

    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for i in range(200):
        x, y = points(128, 1.0, i)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), *points(640, 1.7, 999)


def accuracy(model, x, y, method="steady", **more):
    classifier = come.adapt(model, method, **more)
    found = torch.cat([classifier(part).argmax(dim=1) for part in x.split(BATCH)])
    return (found == y).double().mean().item()


def test_classes_that_come_together_are_noticed(task):
    model, x, y = task
    order = y.argsort(stable=True)
    corrected = accuracy(model, x[order], y[order])
    plain = accuracy(model, x[order], y[order], prior_correction=False)
    assert corrected > plain + 0.15


def test_where_classes_come_at_random_answers_are_the_models(task):
    model, x, y = task
    corrected, plain = accuracy(model, x, y), accuracy(model, x, y, prior_correction=False)
    assert abs(corrected - plain) < 0.02


def test_the_first_batch_and_a_single_sample_are_not_corrected(task):
    model, x, _ = task
    assert torch.allclose(come.adapt(model, "steady")(x[:BATCH]), model(x[:BATCH]), atol=1e-3)
    classifier = come.adapt(model, "steady", lr=1e-9)
    for part in x[:20].split(1):
        assert torch.allclose(classifier(part), model(part), atol=1e-4)


def test_answers_stay_spread(task):
    """At a rate that is far too large, without a guard: the answers of the last batches name more classes."""
    model, x, _ = task

    def classes(**more):
        classifier = come.adapt(model, "steady", lr=2.0, guard=False, prior_correction=False, pull=0.0, **more)
        average = torch.cat([classifier(part) for part in x.split(BATCH)])[-320:].softmax(dim=1).mean(dim=0)
        return torch.special.entr(average).sum().exp().item()

    assert classes() > classes(diversity=0.0) + 2


def test_the_pull_bounds_how_far_weights_go(task):
    model, x, _ = task
    moved = []
    for pull in (0.0, 0.02, 0.5):
        classifier = come.adapt(model, "steady", lr=1e-2, pull=pull, guard=False)
        start = classifier.adapted_parameters
        for part in x.split(BATCH):
            classifier(part)
        moved.append(sum((v - start[k]).square().sum().item() for k, v in classifier.adapted_parameters.items()))
    assert moved[0] > moved[1] > moved[2] > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"diversity": -1.0}, "diversity must be >= 0, got -1.0"),
        ({"pull": 1.5}, r"pull must be in \[0, 1\], got 1.5"),
        ({"memory": 1.0}, r"memory must be in \[0, 1\), got 1.0"),
        ({"rounds": 0}, "rounds must be"),
    ],
)
def test_bad_values(given, message):
    with pytest.raises(come.ConfigError, match=message):
        come.methods.Steady(**given)

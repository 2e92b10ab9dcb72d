"""Steady: what each part does, on streams where it matters and where it must not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import come
from come.testing import check_invariance

CLASSES, WIDTH, BATCH = 20, 16, 32


def test_its_rate_is_called_no_papers():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    assert "lr=0.0001 x batch/64 (the default for models without BatchNorm)" in repr(come.adapt(model, "steady"))


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
    corrected = accuracy(model, x[order], y[order], prior_correction=True)
    plain = accuracy(model, x[order], y[order])
    assert corrected > plain + 0.15


def test_where_classes_come_at_random_answers_are_the_models(task):
    model, x, y = task
    corrected, plain = accuracy(model, x, y, prior_correction=True), accuracy(model, x, y)
    assert abs(corrected - plain) < 0.02


def test_the_first_batch_and_a_single_sample_are_not_corrected(task):
    model, x, _ = task
    assert torch.allclose(come.adapt(model, "steady", prior_correction=True)(x[:BATCH]), model(x[:BATCH]), atol=1e-3)
    classifier = come.adapt(model, "steady", lr=1e-9, prior_correction=True)
    for part in x[:20].split(1):
        assert torch.allclose(classifier(part), model(part), atol=1e-4)


def test_answers_stay_spread(task):
    """At 200 times the rate, without a guard and without the pull, the answers of the last batches still name most classes."""
    model, x, _ = task

    def classes(**more):
        classifier = come.adapt(model, "steady", lr=0.02, guard=False, pull=0.0, **more)
        average = torch.cat([classifier(part) for part in x.split(BATCH)])[-320:].softmax(dim=1).mean(dim=0)
        return torch.special.entr(average).sum().exp().item()

    assert classes() > max(classes(diversity=0.0) + 0.3, 0.8 * CLASSES)


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


def far(classifier):
    """How far the adapted weights are from the source's."""
    start, now = classifier.source_parameters, classifier.adapted_parameters
    return sum((now[name] - start[name]).square().sum().item() for name in start) ** 0.5


def test_nothing_is_learned_while_few_classes_come(task):
    """One class for long: the spread term would drive answers away from it."""
    model, x, y = task
    few, many = come.adapt(model, "steady", guard=False), come.adapt(model, "steady", guard=False)
    mine = x[y < 3]
    for i in range(20):
        few(mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(i))[:BATCH]])
        many(x[torch.randperm(len(x), generator=torch.Generator().manual_seed(i))[:BATCH]])
    assert far(few) < 0.02 * far(many)
    assert far(many) > 0


def test_the_step_does_not_depend_on_the_size_of_the_gradient(task):
    """A network whose logits are twice as large and one with a shifted head take steps of the same length."""
    model, x, _ = task
    lengths = []
    for scale in (1.0, 0.5):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[3].weight.mul_(scale)
            other[3].bias.mul_(scale).add_(7.0)
        classifier = come.adapt(other, "steady", guard=False, optimizer=come.optim.sgd(momentum=0.0), pull=0.0)
        for part in x[: 8 * BATCH].split(BATCH):
            before = torch.cat([v.flatten() for v in classifier.adapted_parameters.values()])
            classifier(part)
        lengths.append(
            (torch.cat([v.flatten() for v in classifier.adapted_parameters.values()]) - before).norm().item()
        )
    assert lengths[0] == pytest.approx(lengths[1], rel=0.05)


def test_small_batches_remember_as_many_samples(task):
    """What is remembered and the pull are stated for 64 samples, whatever the size of a batch."""
    model, x, _ = task
    seen = []
    for size in (1, 8, 64):
        classifier = come.adapt(model, "steady", guard=False)
        for part in x[:512].split(size):
            classifier(part)
        seen.append(classifier.state["seen"].item())
    assert seen == pytest.approx([seen[2]] * 3, rel=0.06)


@pytest.mark.parametrize("objective", ["em", "invariant"])
@pytest.mark.parametrize("method", ["tent", "eata:beta=0", "sar", "deyo", "pl", "zerosiam", "steady"])
def test_a_constant_in_the_bias_changes_nothing(method, objective):
    check_invariance(lambda model: come.adapt(model, method, objective=objective))


def test_the_published_opinion_depends_on_the_constant():
    with pytest.raises(AssertionError, match="a constant of 10 on all logits changes the adapted weights"):
        check_invariance(lambda model: come.adapt(model, "tent", objective="come"))


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

"""What can be seen of a model's health without labels."""

from __future__ import annotations

import math

import pytest
import torch

import come
from come.signals import SIGNALS, Bands, Comparison, measure
from come.testing import NORMS, TinyClassifier


def row(**known):
    return tuple({"share": 0.1, "entropy": 2.0, "uncertainty": 0.5, "norm": 9.0, "distance": 0.1, **known}.values())


def learned(rows):
    bands = Bands(len(rows))
    for values in rows:
        bands.learn(values)
    return bands


def test_signals_of_a_batch():
    adapter = come.adapt(TinyClassifier(NORMS["layer"]), "tent", "em", guard=False)
    z = torch.tensor([[3.0, 0, 0], [3.0, 0, 0], [0, 4.0, 0], [0, 0, 9.0]])
    usable = torch.tensor([True, True, True, False])
    found = dict(zip(SIGNALS, measure(adapter, z, usable).tolist(), strict=True))
    p = z.softmax(dim=1)[:3]
    assert found["share"] == pytest.approx(2 / 3)
    assert found["entropy"] == pytest.approx(float(torch.special.entr(p).sum(dim=1).mean()), abs=1e-6)
    assert found["uncertainty"] == pytest.approx(float((1 - p.amax(dim=1)).mean()), abs=1e-6)
    assert found["norm"] == pytest.approx(10 / 3)
    assert found["distance"] == 0
    with torch.no_grad():
        next(iter(adapter.parameters.values())).add_(3.0)
    size = next(iter(adapter.parameters.values())).numel()
    assert measure(adapter, z, usable)[-1].item() == pytest.approx(3 * math.sqrt(size), rel=1e-6)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"entropy": 0.2}, ["entropy"]),
        ({"entropy": 9.0}, []),  # less sure is no collapse
        ({"share": 0.9, "norm": 30.0}, ["share", "norm"]),
        ({"uncertainty": 0.01}, ["uncertainty"]),
        ({"distance": 5.0}, ["distance"]),
        ({}, []),
    ],
)
def test_only_the_side_of_a_collapse_is_suspicious(values, names):
    bands = learned([row(entropy=2 + 0.1 * (-1) ** i) for i in range(10)])
    assert bands.outside(row(**values)) == names


def test_a_drift_while_learning_is_not_learned():
    """A model that collapses from the start must not teach its own collapse."""
    bands = learned([row(entropy=2.0 - 0.1 * i) for i in range(10)])
    assert bands.outside(row(entropy=1.2)) == ["entropy"]


def test_a_noisy_signal_has_a_wide_band():
    bands = learned([row(entropy=2.0 + 0.5 * (-1) ** i) for i in range(10)])
    assert bands.outside(row(entropy=1.2)) == []


def test_distance_may_grow_as_it_did():
    bands = learned([row(distance=0.1 * (i + 1)) for i in range(10)])
    for i in range(10, 200):
        assert bands.outside(row(distance=0.1 * (i + 1))) == []
    assert bands.outside(row(distance=60.0)) == ["distance"]


def one_hot(labels, size=4.0, kinds=4):
    return size * torch.eye(kinds)[labels]


def test_standing_by_hand():
    source, mine = one_hot([0, 1, 2, 3]), one_hot([0, 1, 2, 2])
    q = source.softmax(dim=1)
    comparison = Comparison()
    comparison.add(mine, source, torch.ones(4, dtype=torch.bool))
    standing, credit, spread, samples = comparison.result().tolist()
    assert credit == pytest.approx(float((3 * q[0, 0] + q[3, 2]) / (4 * q[0, 0])), rel=1e-6)
    three = -(2 * 0.25 * math.log(0.25) + 0.5 * math.log(0.5))  # two classes once, one twice, of four
    assert spread == pytest.approx(math.exp(three - math.log(4)), rel=1e-6)
    assert standing == pytest.approx(credit * spread)
    assert samples == 4


def test_who_agrees_has_a_standing_of_one_and_who_collapsed_none():
    usable = torch.ones(64, dtype=torch.bool)
    source = one_hot(torch.arange(64) % 16, kinds=16)
    for mine, low, high in ((source, 0.999, 1.001), (one_hot(torch.zeros(64, dtype=torch.long), kinds=16), 0.0, 0.05)):
        comparison = Comparison()
        comparison.add(mine, source, usable)
        assert low <= comparison.result()[0].item() <= high


def test_to_contradict_an_unsure_source_costs_little():
    """As a model does that has adapted well."""
    usable = torch.ones(64, dtype=torch.bool)
    mine = one_hot(torch.arange(64) % 16, kinds=16)
    for sure, low, high in ((0.1, 0.8, 1.0), (6.0, 0.0, 0.05)):
        comparison = Comparison()
        comparison.add(mine, one_hot((torch.arange(64) + 1) % 16, size=sure, kinds=16), usable)
        assert low < comparison.result()[1].item() < high


@pytest.mark.parametrize("sure", [0.01, 30.0])
def test_how_sure_either_is_does_not_count_as_spread(sure):
    """Of a thousand classes a batch names a few; an unsure source must not seem to see all of them."""
    source = one_hot(torch.arange(64), size=0.1, kinds=1000)
    comparison = Comparison()
    comparison.add(source * sure, source, torch.ones(64, dtype=torch.bool))
    assert comparison.result()[0].item() == pytest.approx(1)


def test_comparisons_add_up_and_leave_out_what_is_not_usable():
    torch.manual_seed(0)
    mine, source = torch.randn(10, 5), torch.randn(10, 5)
    source[3] = math.nan
    usable = torch.arange(10) != 7
    parts, whole = Comparison(), Comparison()
    parts.add(mine[:4], source[:4], usable[:4])
    parts.add(mine[4:], source[4:], usable[4:])
    keep = [i for i in range(10) if i not in (3, 7)]
    whole.add(mine[keep], source[keep], torch.ones(8, dtype=torch.bool))
    torch.testing.assert_close(parts.result(), whole.result())
    assert parts.result()[3] == 8

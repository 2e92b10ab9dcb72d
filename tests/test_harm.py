"""A part of the harm matrix: three networks on the streams that broke older versions, with the default call.

`pytest -m slow tests/test_harm.py` takes minutes; the rest of the matrix is `benchmarks/harm.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import come

ROOT = Path(__file__).parents[1]
FILES = Path(__file__).parent / "harm"
NETWORKS = ("fashion-bn", "fashion-gn", "fashion-ln")
BROKE = ("clean", "sorted, clean", "one class", "two classes", "five classes", "two classes, noise", "batches of 1")


@pytest.fixture(scope="module")
def harm():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import harm

    yield harm
    sys.path.remove(str(ROOT / "benchmarks"))


def gains(harm, name, long, only, **how):
    """Accuracy minus the source's for each column, in points."""
    model, images, labels, outliers = harm.network(name, FILES / "images.npz", FILES, torch.device("cpu"))
    bank = harm.Bank(images[: harm.IMAGES], outliers, harm.zoo.normalized)
    truth = labels[: harm.IMAGES]
    mine = [stream for stream in harm.streams(truth, long) if stream.cell in only]
    before = harm.answers(lambda: come.adapt(model, "source"), None, mine, bank)
    found = harm.answers(lambda: come.adapt(model, **how), None, mine, bank)
    return {cell: entry["gain"] for cell, entry in harm.cells(mine, found, before, truth).items()}


@pytest.mark.slow
@pytest.mark.parametrize("guard", [True, False], ids=["guarded", "bare"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_default_call_does_no_harm(harm, name, guard):
    found = gains(harm, name, 100, BROKE, guard=guard)
    assert min(found.values()) > -1, found
    assert found["clean"] > -0.5, found


@pytest.mark.slow
def test_the_matrix_sees_harm(harm):
    found = gains(harm, "fashion-bn", 20, ("one class", "sorted, clean"), method="tent", guard=False)
    assert max(found.values()) < -20


@pytest.mark.slow
def test_the_default_call_gains_where_statistics_of_the_batch_do(harm):
    assert gains(harm, "fashion-bn", 40, ("standard",))["standard"] > 10


def test_a_short_shifted_stream(harm):
    """What runs always: three batches under each corruption, where statistics of the batch gain 25 points."""
    assert gains(harm, "fashion-bn", 12, ("standard",))["standard"] > 10
    assert gains(harm, "fashion-bn", 12, ("standard",), guard=False)["standard"] < 3


def test_a_short_stream_of_one_class(harm):
    """What runs always: one class on a BatchNorm network, where statistics of the batch lose 60 points."""
    assert gains(harm, "fashion-bn", 4, ("one class",))["one class"] > -1
    assert gains(harm, "fashion-bn", 4, ("one class",), statistics="batch", guard=False)["one class"] < -30

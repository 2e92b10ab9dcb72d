"""A fleet whose first batch is damaged, and streams whose names fill their limit."""

from __future__ import annotations

import pytest
import torch

import come
from come.testing import NORMS, TinyClassifier, batches


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_the_first_batch_of_a_fleet_may_hold_invalid_samples(value):
    fleet = come.Fleet(TinyClassifier(NORMS["group"]), streams=2)
    x = batches(1, size=4)[0]
    x[0] = x[3] = value
    out = fleet.step(x, ["0", "0", "1", "1"])
    assert out.valid.tolist() == [False, True, True, False]
    assert out.logits.isfinite().all()


@pytest.mark.parametrize("name", ["@" * 128, ":" * 127 + "a", "a" * 128])
def test_the_longest_names_can_be_evicted_and_saved(name, tmp_path):
    """128 characters that are escaped in a file name are longer than a file name may be."""
    (tmp_path / "evicted").mkdir()
    model = TinyClassifier(NORMS["group"])
    x = batches(1, size=4)[0]
    fleet = come.Fleet(model, streams=[name, "other"], resident=1, folder=tmp_path / "evicted")
    fleet.step(x, name)
    fleet.step(x, "other")
    fleet.save(tmp_path / "all")
    again = come.Fleet(model)
    again.load(tmp_path / "all")
    assert torch.equal(again.predict(x, name), fleet.predict(x, name))


def test_a_stream_on_disk_can_be_looked_at(tmp_path):
    """Its parameters were those of the source model, its state empty, and count() failed."""
    model = TinyClassifier(NORMS["group"])
    fleet = come.Fleet(model, "eata", streams=["a", "b"], resident=1, folder=tmp_path, lr=0.1, beta=0)
    alone = come.Fleet(model, "eata", streams=["a"], lr=0.1, beta=0)
    x = batches(1, size=4)[0]
    for one in (fleet, alone):
        one.step(x, "a")
    for look in (come.Fleet.adapted_parameters, come.Fleet.state):
        fleet.step(x, "b")  # puts "a" on disk
        found, expected = look(fleet, "a"), look(alone, "a")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    fleet.step(x, "b")
    assert fleet.count("a") == 1

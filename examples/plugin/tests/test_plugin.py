"""Run after `pip install -e .`."""

import pytest
from acme_tta import Sharpen, tempered

import come
from come.bench import settings
from come.bench.data import open_source
from come.testing import check_method, check_objective


def test_the_names_are_found():
    assert come.methods.get("sharpen") is Sharpen
    assert come.objectives.get("tempered") is tempered
    assert settings.get("backwards").summary == "standard, the last corruption first"


def test_the_method_keeps_the_contract():
    left_out = check_method(lambda model: come.adapt(model, Sharpen(lr=1e-3)))
    assert not left_out, left_out  # checks that have nothing to say about this method, with the reason


def test_the_objective_keeps_the_contract():
    check_objective(tempered)


def test_the_data_is_in_negative():
    negative, positive = (open_source(name).load([0, 1]) for name in ("negatives:2", "glyphs:2"))
    assert (negative.images == 255 - positive.images).all()
    assert (negative.labels == positive.labels).all()


def test_wrong_values_are_refused():
    with pytest.raises(come.ConfigError, match="limit must be a positive number, got 0"):
        Sharpen(limit=0)
    with pytest.raises(come.ConfigError, match="SIZE of negatives:SIZE must be an integer >= 1, got 'many'"):
        open_source("negatives:many")

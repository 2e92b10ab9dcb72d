"""Run after `pip install -e .`."""

import sys

import pytest
import torch
from acme_tta import Sharpen, tempered

import come
from come.bench import settings
from come.bench.cli import main
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
    negative, positive = (open_source(name).load([0, 1]) for name in ("negatives:2", "fashion:2"))
    assert (negative.images == 255 - positive.images).all()
    assert (negative.labels == positive.labels).all()


def test_wrong_values_are_refused():
    with pytest.raises(come.ConfigError, match="limit must be a positive number, got 0"):
        Sharpen(limit=0)
    with pytest.raises(come.ConfigError, match="SIZE of negatives:SIZE must be an integer >= 1, got 'many'"):
        open_source("negatives:many")


def tiny():
    """A model for a quick run: --model MODULE:FACTORY."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LayerNorm(3072), torch.nn.Linear(3072, 8))


def test_the_command_line_knows_them(monkeypatch, capsys, tmp_path):
    def call(line):
        monkeypatch.setattr(sys, "argv", ["come", *line.split()])
        main()
        return capsys.readouterr().out

    assert "sharpen   one step down the entropy of the surest samples" in call("list methods")
    assert "Softmax at a temperature of two" in call("list objectives")
    assert "the embedded photographs in negative" in call("list data")
    assert "standard, the last corruption first" in call("list settings")
    choice = "--data negatives:32 --setting backwards --methods sharpen:limit=9 --objectives tempered --corruptions fog"
    shown = call(f"bench {choice} --model {__name__}:tiny --image-size 32 --jobs 1 --out {tmp_path}")
    assert "sharpen:limit=9 + tempered" in shown

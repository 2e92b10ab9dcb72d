"""Messages: what they suggest, what they list, and that they never print a whole model."""

from __future__ import annotations

import collections

import pytest
import torch

import come
from come.errors import LONGEST, require, shown, unknown, unknown_hyperparameter
from come.testing import NORMS, TinyClassifier

MANY = [f"resnet{i}" for i in range(10, 1310)]


class Large:
    """Its repr must not be asked for."""

    def __init__(self, repr_of_it=None):
        self.repr_of_it = repr_of_it

    def __repr__(self):
        if self.repr_of_it is None:
            raise MemoryError
        return self.repr_of_it


def test_up_to_three_names_are_suggested_and_many_are_counted():
    message = str(unknown("model", "resnet5O", MANY, hint="'timm.list_models()' shows all"))
    assert message == (
        "no model 'resnet5O'; did you mean 'resnet50', 'resnet51' or 'resnet52'? There are 1,300; "
        "'timm.list_models()' shows all"
    )


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("tnet", ["tent", "sar", "tea"], "no x 'tnet'; did you mean 'tent'? Known: sar, tea, tent"),
        ("sa", ["sar", "sam"], "no x 'sa'; did you mean 'sam' or 'sar'? Known: sam, sar"),
        ("TENT", ["tent", "sar"], "no x 'TENT'; did you mean 'tent'? Known: sar, tent"),
        ("cifar10", ["CIFAR10", "MNIST"], "no x 'cifar10'; did you mean 'CIFAR10'? Known: CIFAR10, MNIST"),
        ("zzz", ["sar"], "no x 'zzz'. Known: sar"),
        ("zzz", [], "no x 'zzz'. There are none"),
        ("zzz", [f"n{i}" for i in range(20)], "no x 'zzz'. Known: n0, "),
        ("zzz", [f"n{i}" for i in range(21)], "no x 'zzz'. There are 21"),
        (3, ["sar"], "no x 3. Known: sar"),
        (None, ["sar"], "no x None. Known: sar"),
    ],
)
def test_suggestions(name, known, message):
    assert str(unknown("x", name, known)).startswith(message)


@pytest.mark.parametrize("hint", ["; None is all", ". None is all", "None is all"])
def test_a_hint_is_a_clause(hint):
    assert str(unknown("x", "b", ["aaa"], hint)) == "no x 'b'. Known: aaa; None is all"


def test_a_hyperparameter_is_suggested_as_well():
    assert "; did you mean 'lr'? Known: keep, lr" in str(unknown_hyperparameter("tent", "lrr", ["lr", "keep"]))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        ("half", "'half'"),
        (None, "None"),
        (True, "True"),
        ({"lr": 0.1}, "{'lr': 0.1}"),
        (int, "the class int"),
        (10**9, "1000000000"),
        (10**100_000, "an integer of 332193 bits"),
        (torch.zeros(3, 4), "Tensor of shape (3, 4)"),
        (torch.tensor(0.5), "tensor(0.5000)"),
        (Large(), "an object of type Large"),
        (Large("two\nlines"), r"two\nlines"),
        ("\x1b[31m\ud800\n", r"'\x1b[31m\ud800\n'"),
        (Large("\ud800\x1b"), r"\ud800\x1b"),
        (come.Softmax(), "Softmax(freeze_norm=False, p=2.0, tau=1.0)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    "value",
    [
        "a" * 1_000_000,
        b"a" * 1_000_000,
        list(range(1_000_000)),
        [["a" * 1000] * 1000] * 1000,
        {i: i for i in range(100_000)},
        set(range(100_000)),
        collections.OrderedDict((str(i), torch.zeros(100, 100)) for i in range(100)),
        [torch.zeros(1000, 1000)] * 100,
        TinyClassifier(NORMS["batch"]),
        [TinyClassifier(NORMS["batch"])],
        Large("a" * 1_000_000),
        "\x00" * 1_000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_large_value_is_cut(value):
    text = shown(value)
    assert len(text) <= LONGEST
    assert text.isprintable()
    text.encode()
    with pytest.raises(come.ConfigError) as caught:
        require(False, "lr", value, "a positive number")
    assert len(str(caught.value)) < LONGEST + 50


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: come.adapt("tent", m),
            r"method must be a name .*, got a model \(TinyClassifier\); the model comes first",
        ),
        (lambda m: come.adapt(m, m), r"method must be a name .*, got a model \(TinyClassifier\)"),
        (lambda m: come.adapt(m, objective=m), r"objective must be a name .*, got a model \(TinyClassifier\)"),
        (lambda m: come.adapt(m, lr=m), r"lr must be a positive number.*, got a model \(TinyClassifier\)"),
        (lambda m: come.methods.get(m), r"method must be a name .*, got a model \(TinyClassifier\)"),
        (lambda m: come.objectives.get(m), r"objective must be a name .*, got a model \(TinyClassifier\)"),
        (
            lambda m: come.objectives.register("x", m),
            r"objective 'x' must be an instance .*, got a model \(TinyClassifier\)",
        ),
        (lambda m: come.adapt(m, "x" * 10**6), "no method 'xxx"),
        (lambda m: come.adapt(m, "tent:\ud800"), r"'\\ud800' in 'tent:\\ud800' is not KEY=VALUE"),
        (lambda m: come.adapt(m, "tent", **{"a\x1b": 1}), r"tent has no hyperparameter 'a\\x1b'"),
    ],
)
def test_a_swapped_argument_does_not_print_a_model(call, message):
    with pytest.raises(come.ConfigError, match=message) as caught:
        call(TinyClassifier(NORMS["batch"]))
    text = str(caught.value)
    assert len(text) < 300
    assert text.isprintable()

"""Which samples are answered, in every way to get an answer; and which arguments of a call hold samples at all."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
from torch import nn

import come
from come.serve import Service
from come.testing import NORMS, SHAPE, TinyClassifier, TinyTransformer, batches

BAD = 17


def stepped(model, x):
    step = come.adapt(model, "tent").step(x)
    return step.logits, step.valid


def predicted(model, x):
    return come.adapt(model, "tent").predict(x), None


def answered(model, x):
    step = come.adapt(model, "tent").answer(x)
    return step.logits, step.valid


def after_steps(model, x):
    adapter = come.adapt(model, "tent")
    adapter(batches(1, 64, seed=5)[0])
    return adapter.predict(x), None


def of_a_fleet(name):
    def run(model, x):
        found = getattr(come.Fleet(model, "tent", streams=["a", "b"]), name)(x, ["a"] * 40 + ["b"] * 24)
        return (found.logits, found.valid) if isinstance(found, come.Step) else (found, None)

    return run


def served(mode, requests=1):
    def run(model, x):
        with Service(model, "tent", shape=SHAPE, adapt=mode) as service:
            found = [service.predict("a", x) for _ in range(requests)][-1]
        assert found.abstain == [not valid for valid in found.valid]
        return found.logits, torch.tensor(found.valid)

    return run


WAYS = {
    "step": stepped,
    "predict": predicted,
    "answer": answered,
    "predict after a step": after_steps,
    "fleet, step": of_a_fleet("step"),
    "fleet, predict": of_a_fleet("predict"),
    "fleet, answer": of_a_fleet("answer"),
    "serve, inline": served("inline"),
    "serve, never": served("never"),
    "serve, after": served("after"),
    "serve, after, again": served("after", 2),
    "serve, every:2, first": served("every:2"),
    "serve, every:2, second": served("every:2", 2),
    "serve, shift": served("shift"),
    "serve, shifted": served("shift:0.0,1e-9", 2),
}


@pytest.mark.parametrize("norm", ["batch", "group", "layer"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [1e7, -1e7])
def test_an_absurd_sample_is_flagged_and_spoils_no_other_answer(norm, way, value):
    model, (x,) = TinyClassifier(NORMS[norm]), batches(1, 64)
    hostile = x.clone()
    hostile[BAD] = value
    clean, _ = WAYS[way](model, x)
    logits, valid = WAYS[way](model, hostile)
    others = torch.arange(64) != BAD
    assert valid is None or torch.equal(valid, others)
    assert (logits[BAD] == logits[BAD, 0]).all()  # no class is favoured
    assert (logits.argmax(dim=1) == clean.argmax(dim=1))[others].float().mean() > 0.95


@pytest.mark.parametrize("name", [n for n in come.methods.names() if come.methods.get(n).changes])
@pytest.mark.parametrize(("norm", "value"), [("batch", math.nan), ("batch", 1e7), ("layer", math.nan)])
def test_no_method_s_prediction_is_spoiled(build, name, norm, value):
    x, others = batches(1)[0], torch.arange(12) != 4
    hostile = x.clone()
    hostile[4] = value
    adapter = build(build.model(name)(NORMS[norm]), name)
    adapter(batches(1, seed=3)[0])
    answer = adapter.answer(hostile)
    assert torch.equal(answer.valid, others)
    assert torch.equal(adapter.predict(hostile), answer.logits)
    # BatchNorm sees a copy of a good sample in its place; without it the batch is as if the sample had not come.
    expected, close = (adapter.predict(x)[others], 3.0) if norm == "batch" else (adapter.predict(x[others]), 1e-4)
    torch.testing.assert_close(answer.logits[others], expected, atol=close, rtol=0)


def test_a_calibrated_prediction_says_where_to_abstain():
    adapter = come.adapt(TinyClassifier(NORMS["batch"]), "tent")
    assert adapter.answer(batches(1)[0]).abstain is None
    adapter.calibrate(batches(4), coverage=0.8)
    fleet = come.Fleet(TinyClassifier(NORMS["batch"]), "tent", streams=1)
    fleet.calibrate(batches(4), coverage=0.8)
    x = batches(1, seed=3)[0]
    x[2] = math.inf
    for step in (adapter.answer(x), fleet.answer(x, "0")):
        assert step.abstain[2]
        assert not step.valid[2]
        assert 0 < step.abstain.sum() < 12
    assert torch.equal(adapter.abstains(adapter.predict(x)), adapter.answer(x).abstain)


def test_absurd_calibration_samples_are_refused():
    data = batches(4)
    data[1][3] = 1e7
    with pytest.raises(come.InputError, match="1 of 12"):
        come.adapt(TinyClassifier(NORMS["batch"]), "tent").calibrate(data, coverage=0.8)


def test_the_reference_of_a_service_is_of_valid_samples():
    x = batches(1, 40)[0]
    with Service(TinyClassifier(NORMS["layer"]), "tent", shape=SHAPE) as service:
        expected = service.uncertainty(x)
        assert service.uncertainty(torch.cat([x, torch.full_like(x[:1], 1e7)])) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("affinity", ["knn", "rbf", "linear"])
@pytest.mark.parametrize("bad", [1, 7])
def test_the_copy_in_the_place_of_a_bad_sample_is_no_neighbour(affinity, bad):
    x = batches(1)[0]
    x[12 - bad :] = math.nan
    model = TinyClassifier(NORMS["layer"])
    adapter = come.adapt(model, "lame", affinity=affinity, k=4)
    for logits in (adapter.predict(x), adapter(x)):
        # LAME's 100 iterations round sums of 12 and of 5 samples in another order.
        torch.testing.assert_close(logits[: 12 - bad], adapter.predict(x[: 12 - bad]), rtol=1e-5, atol=2e-5)


def test_predict_checks_the_batch_as_a_step_does():
    lame = come.adapt(TinyClassifier(NORMS["layer"]), "lame")
    with pytest.raises(come.InputError, match="at least 6 samples, got 3"):
        lame.predict(batches(1, 3)[0])


# ---- which arguments hold samples ----


class Table(nn.Module):
    """Compares each sample with rows of a table that all samples share; a mask and an age of each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)

    def forward(self, x, table, mask=None, age=None):
        z = self.norm(x if mask is None else x * mask)
        z = z if age is None else z + age[:, None] - age.mean()
        return z @ table.T


def given(rows=8):
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(rows, 6)


def test_a_shared_table_as_long_as_the_batch_is_left_alone():
    x, table = given()
    model = Table()
    expected = model(x, table)
    x[2] = math.nan
    adapter = come.adapt(model, "tent", per_sample=("x",))
    others = torch.arange(8) != 2
    for logits in (adapter.predict(x, table), adapter(x, table=table)):
        torch.testing.assert_close(logits[others], expected[others])


def test_a_call_with_several_tensors_asks_which_hold_samples():
    x, table = given(5)
    adapter = come.adapt(Table(), "tent")
    for call in (adapter.step, adapter.predict, adapter.answer, adapter.check):
        for batch in ((x, table), ({"x": x, "table": table},)):
            with pytest.raises(come.InputError, match=r"x and table are tensors.*per_sample=\('x',\)"):
                call(*batch)
    with pytest.raises(come.InputError, match="per_sample="):
        come.Fleet(Table(), "tent", streams=1).step((x, table), "0")
    with pytest.raises(come.InputError, match="per_sample="):
        adapter.predict(x, [table])
    assert come.adapt(nn.Sequential(nn.LayerNorm(6)), "tent").predict(x).shape == (8, 6)


@pytest.mark.parametrize("named", [("x", "mask", "age"), (0, 2, "age")])
def test_arguments_are_named_or_counted_and_given_in_any_way(named):
    x, table = given()
    mask, age = (torch.rand(8, 6) < 0.7).float(), torch.rand(8)
    adapter = come.adapt(Table(), "tent", per_sample=named)
    expected = adapter.predict(x, table, mask, age)
    torch.testing.assert_close(expected, Table()(x, table, mask, age))
    assert torch.equal(adapter.predict(age=age, table=table, mask=mask, x=x), expected)
    assert torch.equal(adapter.predict(x, table, mask=mask, age=age), expected)
    age[3] = math.nan  # a number of each sample is judged, too
    assert adapter.step(x, table, mask, age).valid.tolist() == [i != 3 for i in range(8)]
    with pytest.raises(come.InputError, match="x: 8, mask: 5"):
        adapter.predict(x, table, mask[:5])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x", "per_sample must be"),
        (("y",), "no argument 'y'"),
        ((1.5,), "per_sample must be"),
        ((-1,), "per_sample must be"),
        (3, "per_sample must be"),
    ],
)
def test_names_of_arguments_are_checked(value, said):
    with pytest.raises(come.ConfigError, match=said):
        come.adapt(Table(), "tent", per_sample=value)


def test_a_single_tensor_is_no_mask():
    """Zeros and a very negative sample look like an additive mask, which is not judged; alone they are samples."""
    x = torch.zeros(12, *SHAPE)
    x[3] = -1e7
    assert come.adapt(TinyClassifier(NORMS["batch"]), "tent").step(x).valid.tolist() == [i != 3 for i in range(12)]


def test_a_call_without_samples_is_refused():
    x, table = given()
    with pytest.raises(come.InputError, match="per_sample"):
        come.adapt(Table(), "tent", per_sample=("mask",)).predict(x, table)


def test_samples_are_divided_by_what_was_said():
    """EATA sends the few reliable samples through the model again; a fleet puts streams together."""
    x, table = given()
    mask = (torch.rand(8, 6) < 0.7).float()
    adapter = come.adapt(Table(), "eata", beta=0, lr=0.1, per_sample=("x", "mask"))
    for _ in range(4):
        assert adapter(x, table, mask).isfinite().all()
    fleet = come.Fleet(Table(), "tent", streams=2, lr=0.1, per_sample=("x", "mask"))
    alone = [come.adapt(Table(), "tent", lr=0.1, per_sample=("x", "mask")) for _ in range(2)]
    names = [0, 1, 0, 0, 1, 0, 1, 0]
    for way in ("__call__", "predict"):
        out = getattr(fleet, way)({"x": x, "table": table, "mask": mask}, names)
        for i in (0, 1):
            rows = torch.tensor(names) == i
            torch.testing.assert_close(out[rows], getattr(alone[i], way)(x[rows], table, mask[rows]))


def test_tokens_of_transformers_need_no_word():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=4
    )
    model = transformers.BertForSequenceClassification(config)
    batch = {"input_ids": torch.randint(0, 30, (6, 6)), "attention_mask": torch.ones(6, 6, dtype=torch.int64)}
    batch["attention_mask"][2, 3:] = 0
    adapter = come.adapt(model, "tent")
    torch.testing.assert_close(adapter.predict(batch), model.eval()(**batch).logits)
    fleet = come.Fleet(model, "tent", streams=2)
    torch.testing.assert_close(fleet.predict(batch, [0, 0, 1, 0, 1, 1]), adapter.predict(batch))
    with pytest.raises(come.InputError, match="position_ids"):
        adapter.predict(batch | {"position_ids": torch.arange(6)})


# ---- an adapter in the place of a model ----

CASTS = ["float", "double", "half", "bfloat16", "cpu", "requires_grad_", "share_memory"]


@pytest.mark.parametrize("name", CASTS)
def test_what_returns_the_module_returns_the_adapter(name):
    adapter = come.adapt(TinyClassifier(NORMS["layer"]), "tent")
    assert getattr(adapter, name)() is adapter
    assert adapter.type(torch.float32) is adapter
    adapter(batches(1)[0])
    assert adapter.count == 1


def test_forward_is_the_adapter_s():
    one, two = (come.adapt(TinyClassifier(NORMS["layer"]), "tent", lr=0.1) for _ in range(2))
    for x in batches(2):
        assert torch.equal(one.forward(x), two(x))
    assert one.count == 2


READ = {
    *("parameters", "named_parameters", "buffers", "named_buffers", "get_parameter", "get_buffer", "training"),
    *("call_super_init", "dump_patches", "T_destination"),
}


class Fluent(TinyClassifier):
    """With a method that runs it, one that returns it, and a property that is the model itself."""

    classes = 5

    def embed(self, x):
        return self.blocks(x)

    def ready(self):
        return self

    @property
    def base_model(self):
        return self


@pytest.mark.parametrize("name", [n for n in dir(nn.Module) if not n.startswith("_")])
def test_nothing_of_a_module_reaches_past_the_adapter(name):
    adapter = come.adapt(Fluent(NORMS["layer"]), "tent")
    if name in READ or hasattr(come.Adapter, name):
        assert hasattr(adapter, name)
    elif name in {*CASTS, "type", "cuda", "xpu", "ipu", "mtia"}:
        assert getattr(adapter, name).func.__self__ is adapter
    else:
        with pytest.raises(AttributeError, match=rf"\.model\.{name}"):
            getattr(adapter, name)


def test_other_methods_of_the_model_are_not_the_adapter_s():
    adapter = come.adapt(Fluent(NORMS["layer"]), "tent")
    assert adapter.classes == 5
    assert adapter.base_model is adapter
    for name in ("embed", "ready"):
        with pytest.raises(AttributeError, match=rf"unadapted.*\.model\.{name}"):
            getattr(adapter, name)
    assert copy.deepcopy(adapter).classes == 5


# ---- errors ----


class Fails(TinyClassifier):
    """Takes flat images, and fails."""

    error: BaseException

    def forward(self, x):
        if self.training is None:
            return super().forward(x)
        raise self.error


OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


@pytest.mark.parametrize(
    "error", [OUT_OF_MEMORY("no memory"), RuntimeError("a bug"), ValueError("mode"), IndexError("i")]
)
@pytest.mark.parametrize("shape", [(8, 192), (8, 3, 8), (8, 3, 8, 8)])
@pytest.mark.parametrize("call", [lambda adapter, x: adapter.predict(x), lambda adapter, x: adapter.step(x)])
def test_an_error_of_the_model_stays_what_it_is(error, shape, call):
    model = Fails(NORMS["layer"])
    model.error = error
    with pytest.raises(type(error)) as caught:
        call(come.adapt(model, "tent"), torch.rand(shape))
    assert caught.value is error
    assert not isinstance(caught.value, come.ComeError)


@pytest.mark.parametrize("kind", ["batch", "group", "layer", "instance"])
def test_a_single_image_is_told_to_be_a_batch(kind):
    adapter = come.adapt(TinyClassifier(NORMS[kind]), "tent")
    with pytest.raises((come.InputError, RuntimeError)) as caught:
        adapter(batches(1)[0][0])
    if not isinstance(caught.value, come.InputError) and sys.version_info < (3, 11):
        pytest.skip("notes on errors are new in Python 3.11")
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "(3, 8, 8)" in said
    assert "x[None]" in said


@pytest.mark.parametrize("objective", ["come", "em", come.objectives.get("come")])
def test_an_objective_beside_one_is_refused(objective):
    model = TinyClassifier(NORMS["layer"])
    for method in (come.methods.Tent(objective="em"), "tent:objective=em"):
        for make in (come.adapt, come.Fleet):
            with pytest.raises(come.ConfigError, match="objective"):
                make(model, method, objective=objective)
    assert "Softmax" in repr(come.adapt(model, come.methods.Tent(objective="em")).method.objective)
    assert repr(come.adapt(model, "tent").method.objective) == repr(come.objectives.get("come"))
    assert repr(come.adapt(model, "tent", objective=objective).method.objective) == repr(come.objectives.get(objective))


@pytest.mark.parametrize(
    "streams", [None, 1.5, [["a"]] * 12, torch.zeros(12, 2), torch.rand(12), {"a": 1}, [None] * 12]
)
@pytest.mark.parametrize("way", ["step", "predict", "answer", "abstains"])
def test_streams_that_name_nothing(streams, way):
    fleet = come.Fleet(TinyClassifier(NORMS["layer"]), "tent", streams=["a"])
    x = torch.zeros(12, 5) if way == "abstains" else batches(1)[0]
    with pytest.raises(come.ComeError, match="stream"):
        getattr(fleet, way)(x, streams)


@pytest.mark.parametrize("streams", [None, 1.5, [["a"]], [None]])
def test_a_fleet_of_streams_that_name_nothing(streams):
    with pytest.raises(come.ConfigError, match="stream"):
        come.Fleet(TinyTransformer(NORMS["layer"]), "tent", streams=streams)

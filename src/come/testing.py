"""Contract checks for methods and objectives, ours and yours.

    come.testing.check_method(lambda model: come.adapt(model, MyMethod(lr=1e-3)))
    come.testing.check_objective(MyObjective())

Each check is a function with a name; a failure is an `AssertionError` that says which one and on which model. Run them in
your own test suite; `come` runs the same ones over everything in its registry.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from come.adapter import Adapter
from come.errors import ClosedError, InputError, ModelError, unknown
from come.method import Step
from come.model.inputs import Input, logits_of
from come.objectives import Objective

MethodFactory = Callable[[nn.Module], Adapter]
"""Puts the method under test around a model, e.g. `lambda model: come.adapt(model, MyMethod())`."""

CLASSES = 5
SHAPE = (3, 8, 8)
SIZE = 6  # of most batches; LAME needs more than five samples
SPREAD = 3.0
"""Standard deviation of the logits of the tiny models: some samples are reliable, some are not, by every usual margin."""


# ---- models and batches ----


class TinyClassifier(nn.Module):
    """Four small convolution blocks with one kind of normalization, dropout included, (B, 3, 8, 8) -> (B, 5).

    Args:
        norm: makes a normalization layer for a number of channels.
        seed: of the weights; torch's global generator is left alone.

    Example:
        >>> TinyClassifier(nn.BatchNorm2d)(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 5])
    """

    def __init__(self, norm: Callable[[int], nn.Module], seed: int = 0) -> None:
        super().__init__()
        widths = (3, 8, 8, 8, 8)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.blocks = nn.Sequential(
                *(
                    nn.Sequential(nn.Conv2d(a, b, 3, padding=1), norm(b), nn.SiLU(), nn.Dropout(0.5))
                    for a, b in pairwise(widths)
                )
            )
            self.head = nn.Linear(4 * widths[-1], CLASSES)
        _settle(self, self.head, lambda x: TinyClassifier.forward(self, x))

    def forward(self, x: Tensor) -> Tensor:
        """Classify."""
        logits: Tensor = self.head(nn.functional.adaptive_avg_pool2d(self.blocks(x), 2).flatten(1))
        return logits


class TinyTransformer(nn.Module):
    """Four small blocks of attention with one kind of normalization and a class token, (B, 3, 8, 8) -> (B, 5).

    Args:
        norm: makes a normalization layer for a number of channels, as for `TinyClassifier`.
        seed: of the weights; torch's global generator is left alone.

    Example:
        >>> TinyTransformer(nn.BatchNorm2d)(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 5])
    """

    def __init__(self, norm: Callable[[int], nn.Module], seed: int = 0) -> None:
        super().__init__()
        width = 8
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Conv2d(3, width, 2, stride=2)
            self.class_token = nn.Parameter(torch.randn(1, 1, width))
            self.position = nn.Parameter(torch.randn(1, 17, width) * 0.2)
            self.blocks = nn.Sequential(*(_Block(width, norm) for _ in range(4)))
            self.norm = _for_tokens(norm(width))
            self.head = nn.Linear(width, CLASSES)
        _settle(self, self.head, lambda x: TinyTransformer.forward(self, x))

    def forward(self, x: Tensor) -> Tensor:
        """Classify by the class token."""
        tokens = self.embedding(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], dim=1) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


@torch.no_grad()
def _settle(model: nn.Module, head: nn.Linear, forward: Callable[[Tensor], Tensor]) -> None:
    """What training would have done: running statistics of the data, and logits that tell samples apart."""
    model.eval()
    counting = {m: m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
    for layer in counting:
        layer.train()
        layer.momentum = 1.0
    logits = forward(torch.cat(batches(2, seed=1)))
    for layer, momentum in counting.items():
        layer.momentum = momentum
    scale = SPREAD / logits.std(dim=0)
    head.bias.sub_(logits.mean(dim=0)).mul_(scale)
    head.weight.mul_(scale[:, None])
    model.train()


class _Block(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = _for_tokens(norm(width))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(tokens)).chunk(3, dim=-1)
        mixed: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return tokens + mixed


def _for_tokens(layer: nn.Module) -> nn.Module:
    """A normalization of channels-first images that takes and gives tokens (B, N, d)."""
    layer.register_forward_pre_hook(_tokens_in)
    layer.register_forward_hook(_tokens_out)
    return layer


def _tokens_in(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].transpose(1, 2)[..., None],)


def _tokens_out(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return out[..., 0].transpose(1, 2)


class _ChannelsLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(2, channels),
    "layer": _ChannelsLayerNorm,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
}
"""The kinds of normalization that every method is checked with."""


def batches(count: int = 3, size: int = 12, seed: int = 0) -> list[Tensor]:
    """A few reproducible batches (size, 3, 8, 8) for the tiny models: four patches with some noise, so that shape matters.

    Example:
        >>> [tuple(x.shape) for x in batches(2, size=4)]
        [(4, 3, 8, 8), (4, 3, 8, 8)]
    """
    generator = torch.Generator().manual_seed(seed)
    c, h, w = SHAPE
    made = []
    for _ in range(count):
        patches = torch.randn(size, c, 2, 2, generator=generator)
        noise = torch.randn(size, c, h, w, generator=generator)
        made.append(1.2 * patches.repeat_interleave(h // 2, 2).repeat_interleave(w // 2, 3) + 0.8 * noise + 0.5)
    return made


# ---- what is checked of a method ----


class DoesNotApply(Exception):  # noqa: N818 - nothing is wrong
    """Raised by a check that has nothing to find out about this method on this model; the message says why."""


def _run(method: Adapter, data: Iterable[Input]) -> list[Step]:
    return [method.step(x) for x in data]


def _same(a: list[Step], b: list[Step], what: str) -> None:
    for t, (one, other) in enumerate(zip(a, b, strict=True)):
        for field in Step._fields:
            x, y = getattr(one, field), getattr(other, field)
            equal = x is y is None or (x is not None and y is not None and torch.equal(x, y))
            assert equal, f"{what}: {field} of step {t} differs"


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def _unchanged(before: dict[str, Tensor], after: dict[str, Tensor], what: str) -> None:
    assert before.keys() == after.keys(), f"{what} changed the names in the state: {before.keys() ^ after.keys()}"
    changed = [k for k in before if not torch.allclose(before[k], after[k], rtol=0, atol=0, equal_nan=True)]
    assert not changed, f"{what} changed {changed}"


def _all_finite(values: Mapping[str, Tensor | None], what: str = "") -> None:
    bad = [name for name, value in values.items() if value is not None and not value.isfinite().all()]
    assert not bad, f"non-finite {', '.join(bad)}{what}"


def _moved(method: Adapter) -> dict[str, float]:
    """How far each adapted parameter is from the source model; those that are not where they were."""
    source = method.source_parameters
    far = {name: (value - source[name]).abs().max().item() for name, value in method.adapted_parameters.items()}
    return {name: distance for name, distance in far.items() if distance}


def _shapes(make: MethodFactory, model: nn.Module) -> None:
    method = make(model)
    steps = _run(method, batches(2, SIZE))
    for step in steps:
        assert step.logits.shape == (SIZE, CLASSES), f"logits have shape {tuple(step.logits.shape)}"
        others = {name: getattr(step, name) for name in ("loss", "used", "valid")}
        others = {name: value for name, value in others.items() if value is not None}
        wrong = [f"{name} has shape {tuple(value.shape)}" for name, value in others.items() if value.shape != (SIZE,)]
        assert not wrong, f"not one value per sample: {', '.join(wrong)}"
        assert others.pop("used", torch.tensor(True)).dtype == torch.bool, "used is no mask"
        assert not any(t is not None and t.requires_grad for t in step), "a returned tensor still has a graph"
        assert (step.valid is not None) == (method.guard is not None), "valid is given with a guard, and only then"
        assert step.used is not None or not method.method.descends, (
            "the method descends, but does not say on what: used"
        )
    given = {tuple(value is not None for value in step) for step in steps}
    assert len(given) == 1, "loss or used is given in some steps and not in others"


def _finite(make: MethodFactory, model: nn.Module) -> None:
    method = make(model)
    for step in _run(method, batches(3, SIZE)):
        _all_finite({"logits": step.logits, "loss": step.loss})
    _all_finite(method.adapted_parameters)


def _does_what_it_declares(make: MethodFactory, model: nn.Module) -> None:
    """`descends` and `changes` are true; so what the other checks find, they find of a method at work."""
    plain = copy.deepcopy(model).eval()
    method = make(model)
    moves = differs = False
    for x in batches(3):
        step = method.step(x)
        moves = moves or bool(_moved(method))
        with torch.no_grad():
            differs = differs or not torch.equal(step.logits, plain(x))
    if not method.method.changes:
        assert not differs, "changes is False, but the answers are not the source model's"
    elif method.method.descends:
        assert moves or differs, "descends is True, but nothing has moved; is every sample left out?"
    elif not differs:
        raise DoesNotApply("the method does not descend, and its answers on this model are the source model's")


def _the_model_is_not_changed(make: MethodFactory, model: nn.Module) -> None:
    model.train()
    model.get_submodule("head").get_parameter("bias").requires_grad_(False)
    before, modes = _copy(model), [m.training for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    method = make(model)
    for x in batches(3, SIZE):
        method.step(x)
        assert not _changed(model, before), f"changed in the model: {sorted(_changed(model, before))}"
        assert modes == [m.training for m in model.modules()], "a module's training mode was changed"
        assert flags == [p.requires_grad for p in model.parameters()], "a parameter's requires_grad was changed"
        assert all(p.grad is None for p in model.parameters()), "a gradient was left in the model"


def _predicting_changes_nothing(make: MethodFactory, model: nn.Module) -> None:
    method = make(model)
    _run(method, batches(2, SIZE))
    before = method.state_dict()
    logits = method.predict(batches(3, SIZE)[2])
    assert logits.shape == (SIZE, CLASSES), f"predict() gives logits of shape {tuple(logits.shape)}"
    assert torch.equal(logits, method.predict(batches(3, SIZE)[2])), "predict() gives another answer the second time"
    _unchanged(before, method.state_dict(), "predict()")


def _an_error_changes_nothing(make: MethodFactory, model: nn.Module) -> None:
    """In every forward of a step, in turn; afterwards the same batch gives the same numbers."""
    data = batches(3, size=6)
    with make(model) as method:
        expected = _run(method, data)
    calls, fail_at = [0], [-1]

    def hook(*_: object) -> None:
        calls[0] += 1
        if calls[0] == fail_at[0]:
            raise OSError("injected")

    handle = model.register_forward_hook(hook)
    method = make(model)
    _same(expected[:1], _run(method, data[:1]), "with a hook on the model")
    before, number = method.state_dict(), 1
    while True:
        calls[0], fail_at[0] = 0, number
        try:
            step = method.step(data[1])
        except OSError:
            _unchanged(before, method.state_dict(), f"an error in forward number {number}")
            number += 1
            continue
        break
    assert number > 1, "a step does not call the model, or swallows its errors"
    fail_at[0] = -1
    _same(expected[1:], [step, method.step(data[2])], "after errors in a step")
    handle.remove()


def _reset_replays_identically(make: MethodFactory, model: nn.Module) -> None:
    method = make(model)
    first = _run(method, batches(3, SIZE))
    method.reset()
    assert method.count == 0, "the counter survived reset()"
    _same(first, _run(method, batches(3, SIZE)), "after reset()")


def _resume_is_exact(make: MethodFactory, model: nn.Module) -> None:
    first, second = batches(4, SIZE)[:2], batches(4, SIZE)[2:]
    method = make(model)
    _run(method, first)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        method.save(path)
        expected = _run(method, second)
        method.close()
        resumed = make(model)
        resumed.load(path)
    assert resumed.count == len(first), "the counter was not resumed"
    _same(expected, _run(resumed, second), "after load()")


def _input_is_untouched(make: MethodFactory, model: nn.Module) -> None:
    data = batches(3, SIZE)
    _run(make(model), data)
    assert all(torch.equal(x, y) for x, y in zip(data, batches(3, SIZE), strict=True)), "the input was changed in place"


def _batch_of_one(make: MethodFactory, model: nn.Module) -> None:
    for step in _run(make(model), batches(3, size=1)):
        assert step.logits.shape == (1, CLASSES), f"logits have shape {tuple(step.logits.shape)} for a batch of one"
        _all_finite({"logits": step.logits, "loss": step.loss}, " for a batch of one")


def _an_unreliable_batch_moves_nothing(make: MethodFactory, model: nn.Module) -> None:
    """Where a method leaves out all samples by its own judgement, no weight and no moment moves."""
    unsure = [False]
    head = model.get_submodule("head")
    handle = head.register_forward_hook(lambda _, __, out: out * 0 if unsure[0] else None)
    method = make(model)
    _run(method, batches(1, SIZE))  # so that there is momentum that could still move something
    unsure[0] = True  # no class is favoured: nothing is reliable
    before = method.state_dict()
    step = method.step(batches(2, SIZE)[1])
    handle.remove()
    if step.used is None or step.used.any():
        raise DoesNotApply("the method does not leave out samples whose prediction favours no class")
    after = method.state_dict()
    moved = [k for k in before if k.startswith(("weights", "moment.")) and not torch.equal(before[k], after[k])]
    assert not moved, f"no sample was used, yet these moved: {moved}"


def _an_invalid_batch_drives_nothing(make: MethodFactory, model: nn.Module) -> None:
    """Where the guard finds no valid sample, weights stay or go back towards the source, and answers stay as they were."""
    method = make(model)
    if method.guard is None:
        raise DoesNotApply("without a guard no sample is invalid")
    _run(method, batches(2, SIZE))
    clean = batches(3, SIZE)[2]
    before, answers = method.state_dict(), method.predict(clean)
    source = method._engine.transition.source
    step = method.step(torch.full((2 * SIZE, *SHAPE), torch.nan))
    after = method.state_dict()
    assert step.valid is not None and not step.valid.any(), "a sample that is not finite counts as valid"  # noqa: PT018
    assert step.used is None or not step.used.any(), "a sample that is not finite is called used"
    low, high = torch.minimum(before["weights"], source), torch.maximum(before["weights"], source)
    inside = (after["weights"] >= low) & (after["weights"] <= high)
    assert inside.all(), "no sample was valid, yet weights moved, and not towards the source"
    stayed = torch.equal(before["weights"], after["weights"])
    assert not stayed or torch.equal(answers, method.predict(clean)), "no sample was valid, yet the next answers differ"
    moved = [k for k in before if k.startswith("moment.") and after[k].any() and not torch.equal(before[k], after[k])]
    assert not moved, f"no sample was valid, yet these moved: {moved}"


def _deterministic(make: MethodFactory, model: nn.Module) -> None:
    with make(model) as method:
        first = _run(method, batches(3, SIZE))
    with make(model) as method:
        _same(first, _run(method, batches(3, SIZE)), "a second run")


def _global_random_state_is_untouched(make: MethodFactory, model: nn.Module) -> None:
    before, pythons = torch.get_rng_state(), random.getstate()
    _run(make(model), batches(3, SIZE))
    assert torch.equal(before, torch.get_rng_state()), "torch's global random state was used or set"
    assert pythons == random.getstate(), "Python's global random state was used or set"


def _surroundings_do_not_matter(make: MethodFactory, model: nn.Module) -> None:
    with make(model) as method:
        expected = _run(method, batches(3, SIZE))
    for surrounding in (torch.no_grad, torch.inference_mode):
        with surrounding(), make(model) as method:
            _same(expected, _run(method, batches(3, SIZE)), f"under {surrounding.__name__}")


def _training_mode_does_not_matter(make: MethodFactory, model: nn.Module) -> None:
    with make(model.eval()) as method:
        expected = _run(method, batches(3, SIZE))
    with make(model.train()) as method:
        model.train()  # the user does it again, around the adapter: dropout must stay off all the same
        _same(expected, _run(method, batches(3, SIZE)), "with the model in training mode")


def _autocast(make: MethodFactory, model: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method = make(model)
        for step in _run(method, batches(3, SIZE)):
            _all_finite({"logits": step.logits, "loss": step.loss}, " under bfloat16 autocast")
    _all_finite(method.adapted_parameters, " under bfloat16 autocast")


def _double_precision(make: MethodFactory, model: nn.Module) -> None:
    method = make(model.double())
    for step in _run(method, [x.double() for x in batches(3, SIZE)]):
        assert step.logits.dtype == torch.float64, "double precision was lost"
    assert {v.dtype for v in method.adapted_parameters.values()} <= {torch.float64}, "the weights lost double precision"


def _cast_and_move(make: MethodFactory, model: nn.Module) -> None:
    method = make(model)
    _run(method, batches(1, SIZE))
    method.to(torch.float64)
    for step in _run(method, [x.double() for x in batches(2, SIZE)]):
        assert step.logits.dtype == torch.float64, "the answers did not follow .to() between two steps"
        _all_finite({"logits": step.logits, "loss": step.loss}, " after .to() between two steps")
    method.reset()
    (step,) = _run(method, [x.double() for x in batches(1, SIZE)])
    _all_finite({"logits": step.logits, "loss": step.loss}, " after .to() and reset()")


class _Named(nn.Module):
    """A model in the manner of transformers: a named input, an output with `logits`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = model, model.get_submodule("head")

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(pixel_values)}


def _mappings_and_tuples(make: MethodFactory, model: nn.Module) -> None:
    with make(model) as method:
        expected = _run(method, batches(2, SIZE))
    with make(_Named(model)) as method:
        _same(expected, _run(method, [{"pixel_values": x} for x in batches(2, SIZE)]), "with a mapping as input")
    with make(model) as method:
        _same(expected, _run(method, [(x,) for x in batches(2, SIZE)]), "with a tuple as input")


def _bad_input_changes_nothing(make: MethodFactory, model: nn.Module) -> None:
    method = make(model)
    _run(method, batches(1, SIZE))
    before = method.state_dict()
    for bad in (torch.zeros(0, *SHAPE), torch.zeros(2, *SHAPE, dtype=torch.uint8), torch.zeros(SHAPE), torch.zeros(4)):
        try:
            method.step(bad)
        except (InputError, RuntimeError):  # what comes from the model stays what it is
            pass
        else:
            raise AssertionError(f"a {bad.dtype} batch of shape {tuple(bad.shape)} was accepted")
    _unchanged(before, method.state_dict(), "a refused batch")


def _a_closed_adapter_answers_no_more(make: MethodFactory, model: nn.Module) -> None:
    before = _copy(model)
    method = make(model)
    _run(method, batches(1, SIZE))
    method.close()
    assert not _changed(model, before), f"not given back: {sorted(_changed(model, before))}"
    for call in (lambda: method.step(batches(1, SIZE)[0]), lambda: method.predict(batches(1, SIZE)[0]), method.reset):
        with contextlib.suppress(ClosedError):
            call()
            raise AssertionError("a closed adapter still answers")


def _copies_and_pickles(make: MethodFactory, model: nn.Module) -> None:
    data = batches(4, size=6)
    method = make(model)
    _run(method, data[:2])
    twins = (copy.deepcopy(method), pickle.loads(pickle.dumps(method)))
    before = method.state_dict()
    answers = [_run(twin, data[2:]) for twin in twins]
    _unchanged(before, method.state_dict(), "a copy")
    expected = _run(method, data[2:])
    for twin, answer in zip(twins, answers, strict=True):
        assert twin.model is not method.model, "the copy shares its model"
        _same(expected, answer, "a copy")


def _an_export_predicts(make: MethodFactory, model: nn.Module) -> None:
    method, data = make(model), batches(3)
    _run(method, data[:2])
    try:
        alone = method.export()
    except ModelError as error:
        raise DoesNotApply(str(error)) from error
    for x in (data[2], data[2][:1]):
        difference = (logits_of(alone(x), len(x)) - method.predict(x)).abs().max()
        assert difference < 1e-4, f"the export and predict() differ by {difference:g} for a batch of {len(x)}"
    before = logits_of(alone(data[0]), len(data[0]))
    _run(method, data[2:])
    assert torch.equal(logits_of(alone(data[0]), len(data[0])), before), "a later step changes the export"


def _half_precision(make: MethodFactory, model: nn.Module) -> None:
    exact = make(copy.deepcopy(model))
    _run(exact, batches(2, SIZE))
    far = _moved(exact)
    noticeable = {name for name, distance in far.items() if distance > 0.01 * max(far.values())}  # more than rounding
    for dtype in (torch.bfloat16, torch.float16):
        method = make(copy.deepcopy(model).to(dtype))
        for step in _run(method, [x.to(dtype) for x in batches(2, SIZE)]):
            assert step.logits.dtype in (dtype, torch.float32), f"{dtype} became {step.logits.dtype}"
            assert step.valid is None or step.valid.all(), f"samples were not answered in {dtype}"
            _all_finite({"logits": step.logits, "loss": step.loss}, f" in {dtype}")
        adapted = method.adapted_parameters
        assert {v.dtype for v in adapted.values()} <= {torch.float32}, f"the weights are not kept in float32 in {dtype}"
        _all_finite(adapted, f" in {dtype}")
        assert not method.health().get("update_refused"), f"an update was refused in {dtype}"
        still = sorted(noticeable - _moved(method).keys())
        assert not still, f"these move in float32, but not in {dtype}: {still}"


def _by_name(
    *checks: Callable[[MethodFactory, nn.Module], None],
) -> dict[str, Callable[[MethodFactory, nn.Module], None]]:
    return {check.__name__.strip("_"): check for check in checks}


_WITH_EVERY_OBJECTIVE = _by_name(
    _shapes,
    _finite,
    _does_what_it_declares,
    _batch_of_one,
    _an_unreliable_batch_moves_nothing,
    _an_invalid_batch_drives_nothing,
    _autocast,
    _double_precision,
    _half_precision,
)
_WITH_ANY_OBJECTIVE = _by_name(
    _the_model_is_not_changed,
    _predicting_changes_nothing,
    _an_error_changes_nothing,
    _reset_replays_identically,
    _resume_is_exact,
    _input_is_untouched,
    _deterministic,
    _global_random_state_is_untouched,
    _surroundings_do_not_matter,
    _training_mode_does_not_matter,
    _cast_and_move,
    _mappings_and_tuples,
    _bad_input_changes_nothing,
    _a_closed_adapter_answers_no_more,
    _copies_and_pickles,
    _an_export_predicts,
)

METHOD_CHECKS = _WITH_EVERY_OBJECTIVE | _WITH_ANY_OBJECTIVE
"""Every check of `check_method` by name."""

OBJECTIVE_MATTERS = frozenset(_WITH_EVERY_OBJECTIVE)
"""The checks whose outcome can depend on the objective; the others need to be run with one objective only."""


def check_method(
    make: MethodFactory,
    *,
    norms: Iterable[str] = tuple(NORMS),
    checks: Iterable[str] = tuple(METHOD_CHECKS),
    model: Callable[[Callable[[int], nn.Module]], nn.Module] = TinyClassifier,
) -> dict[tuple[str, str], str]:
    """Check that a method keeps the contract of `come.Method`, on small models with every kind of normalization.

    Args:
        make: puts the method around a model, e.g. `lambda model: come.adapt(model, MyMethod(lr=1e-3))`. It is called with
            fresh models that map (B, 3, 8, 8) to (B, 5).
        norms: kinds of normalization to check with, of `NORMS`.
        checks: which checks to run, of `METHOD_CHECKS`.
        model: `TinyClassifier`, or `TinyTransformer` for methods that need tokens.

    Returns:
        what did not apply, and why: {(check, kind of normalization): reason}. Empty where every check had something to find.

    Raises:
        AssertionError: names the check and the kind of normalization.

    Example:
        >>> import come
        >>> check_method(lambda model: come.adapt(model, "tent", lr=1e-3), norms=["layer"], checks=["shapes", "finite"])
        {}
    """
    checks, left_out = tuple(checks), {}
    for norm in norms:
        if norm not in NORMS:
            raise unknown("kind of normalization", norm, NORMS)
        for name in checks:
            if name not in METHOD_CHECKS:
                raise unknown("check", name, METHOD_CHECKS)
            try:
                METHOD_CHECKS[name](make, model(NORMS[norm]))
            except DoesNotApply as reason:
                left_out[name, norm] = str(reason)
            except Exception as error:
                raise AssertionError(f"check {name!r} with {norm} normalization: {error}") from error
    return left_out


# ---- what is checked of an objective ----


def check_objective(objective: Objective) -> None:
    """Check that an objective keeps the contract of `come.Objective`.

    Shapes; normalized masses; finite values and gradients for K from 2 to 100,000, for logits up to 1e4, for all-zero
    logits, in float16, bfloat16, float32 and float64; half precision computed in float32; each sample by itself; classes
    treated alike; confidence and uncertainty in [0, 1].

    Raises:
        AssertionError: says what failed, for which logits.

    Example:
        >>> from come import Opinion
        >>> check_objective(Opinion())
    """
    for what, logits in _logits_to_try():
        z = logits.clone().requires_grad_()
        with _naming(what):
            m = objective.log_mass(z)
            k = logits.shape[-1]
            assert m.shape[:-1] == logits.shape[:-1], f"log_mass has shape {tuple(m.shape)}"
            assert m.shape[-1] in (k, k + 1), f"{m.shape[-1]} outcomes for {k} classes; it must be {k} or {k + 1}"
            assert m.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32), f"mass in {m.dtype}"
            total = m.exp().sum(dim=-1)
            tolerance = max(2e-3, 2e-7 * k)  # rounding, and the published 1e-7 on each mass
            assert torch.allclose(total, torch.ones_like(total), atol=tolerance), (
                f"the masses sum to {total.max().item()}"
            )
            entropy = objective.entropy(z)
            assert entropy.isfinite().all(), "non-finite entropy"
            assert (entropy > -1e-5).all(), f"negative entropy {entropy.min().item()}"
            (grad,) = torch.autograd.grad(entropy.sum(), z)
            assert grad.isfinite().all(), "non-finite gradient"
            for name, value in (
                ("confidence", objective.confidence(logits)),
                ("uncertainty", objective.uncertainty(logits)),
            ):
                assert value.shape == logits.shape[:-1], f"{name} has shape {tuple(value.shape)}"
                assert ((value >= -1e-5) & (value <= 1 + 1e-3)).all(), f"{name} outside [0, 1]"

    z = torch.randn(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    with _naming("classes in another order"):
        assert torch.allclose(objective.entropy(z), objective.entropy(z[:, order])), "the entropy depends on the order"
    with _naming("samples one by one"):
        alone = torch.stack([objective.entropy(row) for row in z])
        assert torch.allclose(objective.entropy(z), alone), "a sample's entropy depends on the other samples"
    with _naming("derived quantities"):
        assert torch.allclose(objective.consistency(z, z), objective.entropy(z)), "C(z, z) is not H(z)"
        views = z.expand(3, *z.shape)
        assert torch.allclose(objective.marginal_entropy(views), objective.entropy(z)), "equal views change the entropy"


def check_invariance(
    make: MethodFactory,
    *,
    norms: Iterable[str] = ("batch", "group", "layer"),
    shift: float = 10.0,
    model: Callable[[Callable[[int], nn.Module]], nn.Module] = TinyClassifier,
) -> None:
    """Check that adaptation treats models with the same probabilities alike.

    A softmax classifier is the same with a constant added to all logits, or with its classes in another order. So answers and
    adapted weights must be the same to rounding. Every method with the objectives "em" and "invariant" keeps this; with "come"
    none does, because its "I do not know" has a fixed logit.

    Args:
        make: puts the method around a model, as for `check_method`.
        norms: kinds of normalization to check with, of `NORMS`.
        shift: the constant.
        model: as for `check_method`.

    Raises:
        AssertionError: says which change of the model matters, with which kind of normalization.

    Example:
        >>> import come
        >>> check_invariance(lambda model: come.adapt(model, "tent", objective="invariant"), norms=["layer"])
        >>> try:
        ...     check_invariance(lambda model: come.adapt(model, "tent", objective="come"), norms=["layer"])
        ... except AssertionError as error:
        ...     print(str(error)[:80])
        layer normalization: a constant of 10 on all logits changes the adapted weights
    """
    order = torch.tensor([3, 0, 4, 1, 2])
    for norm in norms:
        plain, shifted, permuted = (model(NORMS[norm]).double() for _ in range(3))
        with torch.no_grad():
            shifted.head.bias += shift  # type: ignore[union-attr, operator]
            for p in (permuted.head.weight, permuted.head.bias):  # type: ignore[union-attr]
                p.copy_(p[order])  # type: ignore[operator, index]
        expected = _trajectory(make, plain)
        for what, changed, turned in (
            (f"a constant of {shift:g} on all logits", shifted, torch.arange(CLASSES)),
            ("another order of the classes", permuted, order),
        ):
            probabilities, weights = _trajectory(make, changed)
            for kind, found, wanted in (
                ("adapted weights", weights, expected[1]),
                ("answers", probabilities, expected[0][..., turned]),
            ):
                off = (found - wanted).abs().max().item()
                assert off < 1e-6, f"{norm} normalization: {what} changes the {kind} by {off:.2g}"


def _trajectory(make: MethodFactory, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Probabilities (T, B, K) and adapted weights (T, P) along four batches."""
    adapter = make(model)
    answers, weights = [], []
    for x in batches(4):
        answers.append(adapter(x.double()).softmax(dim=1))
        weights.append(torch.cat([value.flatten() for value in adapter.adapted_parameters.values()]))
    return torch.stack(answers), torch.stack(weights)


def _logits_to_try() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for k in (2, 10, 1000, 100_000):
        yield f"K = {k}", torch.randn(3, k, generator=generator) * 4
    base = torch.randn(2, 4, 10, generator=generator)
    yield "leading shape (2, 4)", base
    yield "one vector", base[0, 0]
    yield "all-zero logits", torch.zeros(2, 10)
    for size in (1e-20, 1e2, 1e4):
        yield f"logits of size {size:g}", base / base.abs().max() * size
    yield "one dominant class", torch.nn.functional.one_hot(torch.arange(4), 10).float() * 1e4
    yield "all very negative", torch.full((2, 10), -1e4)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield f"{dtype}", (base * 50).to(dtype)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error

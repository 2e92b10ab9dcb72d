"""The contract of `come.Method`, one function per check."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from come.adapter import Adapter
from come.errors import ClosedError, InputError, ModelError, unknown
from come.method import Step
from come.model.inputs import Input, logits_of
from come.testing.models import CLASSES, NORMS, SHAPE, TinyClassifier, batches

MethodFactory = Callable[[nn.Module], Adapter]
"""Puts the method under test around a model, e.g. `lambda model: come.adapt(model, MyMethod())`."""

SIZE = 6  # of most batches; LAME needs more than five samples


class DoesNotApply(Exception):  # noqa: N818 - nothing is wrong
    """Raised by a check that cannot test anything about this method on this model; the message says why."""


def _run(method: Adapter, data: Iterable[Input]) -> list[Step]:
    return [method.step(x) for x in data]


def _adapted(make: MethodFactory, model: nn.Module, count: int) -> Adapter:
    """A new adapter after so many batches."""
    method = make(model)
    _run(method, batches(count, SIZE))
    return method


def _steps(make: MethodFactory, model: nn.Module, count: int = 3, size: int = SIZE) -> list[Step]:
    """The steps of a new adapter, closed afterwards."""
    with make(model) as method:
        return _run(method, batches(count, size))


def _same(a: list[Step], b: list[Step], what: str) -> None:
    for t, (one, other) in enumerate(zip(a, b, strict=True)):
        for field in Step._fields:
            x, y = getattr(one, field), getattr(other, field)
            equal = x is y is None or (x is not None and y is not None and torch.equal(x, y))
            assert equal, f"{what}: {field} of step {t} differs"


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _unchanged(before: dict[str, Tensor], after: dict[str, Tensor], what: str) -> None:
    assert before.keys() == after.keys(), f"{what} changed the names in the state: {before.keys() ^ after.keys()}"
    changed = [k for k in before if not torch.allclose(before[k], after[k], rtol=0, atol=0, equal_nan=True)]
    assert not changed, f"{what} changed {changed}"


def _all_finite(steps: Iterable[Step], method: Adapter | None = None, what: str = "") -> None:
    """Logits and losses are finite, and the adapted weights of `method`."""
    values = [("logits", step.logits) for step in steps]
    values += [("loss", step.loss) for step in steps if step.loss is not None]
    values += list(method.adapted_parameters.items()) if method else []
    bad = sorted({name for name, value in values if not value.isfinite().all()})
    assert not bad, f"non-finite {', '.join(bad)}{what}"


def _moved(method: Adapter) -> dict[str, float]:
    """How far adapted parameters are from the source model; only those that moved."""
    source = method.source_parameters
    far = {name: (value - source[name]).abs().max().item() for name, value in method.adapted_parameters.items()}
    return {name: distance for name, distance in far.items() if distance}


def _shapes(make: MethodFactory, model: nn.Module) -> None:
    method = make(model)
    steps = _run(method, batches(2, SIZE))
    for step in steps:
        assert step.logits.shape == (SIZE, CLASSES), f"logits have shape {tuple(step.logits.shape)}"
        others = {n: value for n in ("loss", "used", "valid") if (value := getattr(step, n)) is not None}
        wrong = [f"{name} has shape {tuple(value.shape)}" for name, value in others.items() if value.shape != (SIZE,)]
        assert not wrong, f"not one value per sample: {', '.join(wrong)}"
        assert others.pop("used", torch.tensor(True)).dtype == torch.bool, "used is no mask"
        assert not any(t is not None and t.requires_grad for t in step), "a returned tensor still has a graph"
        assert (step.valid is not None) == (method.guard is not None), "valid is given with a guard, and only then"
        assert step.used is not None or not method.method.descends, "the method descends, but gives no used"
    given = {tuple(value is not None for value in step) for step in steps}
    assert len(given) == 1, "loss or used is given in some steps and not in others"


def _finite(make: MethodFactory, model: nn.Module) -> None:
    method = make(model)
    _all_finite(_run(method, batches(3, SIZE)), method)


def _does_what_it_declares(make: MethodFactory, model: nn.Module) -> None:
    """`descends` and `changes` are true, so the other checks test a method that really adapts."""
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
        _unchanged(before, model.state_dict(), "a step")
        assert modes == [m.training for m in model.modules()], "a module's training mode was changed"
        assert flags == [p.requires_grad for p in model.parameters()], "a parameter's requires_grad was changed"
        assert all(p.grad is None for p in model.parameters()), "a gradient was left in the model"


def _predicting_changes_nothing(make: MethodFactory, model: nn.Module) -> None:
    method = _adapted(make, model, 2)
    before = method.state_dict()
    logits = method.predict(batches(3, SIZE)[2])
    assert logits.shape == (SIZE, CLASSES), f"predict() gives logits of shape {tuple(logits.shape)}"
    assert torch.equal(logits, method.predict(batches(3, SIZE)[2])), "predict() gives another answer the second time"
    _unchanged(before, method.state_dict(), "predict()")


def _an_error_changes_nothing(make: MethodFactory, model: nn.Module) -> None:
    """Fail in each forward of a step in turn; afterwards the same batch must give the same numbers."""
    data = batches(3, SIZE)
    expected = _steps(make, model)
    calls, fail_at = 0, -1

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError("injected")

    handle = model.register_forward_hook(hook)
    method = make(model)
    _same(expected[:1], _run(method, data[:1]), "with a hook on the model")
    before, number = method.state_dict(), 1
    while True:
        calls, fail_at = 0, number
        try:
            step = method.step(data[1])
        except OSError:
            _unchanged(before, method.state_dict(), f"an error in forward number {number}")
            number += 1
            continue
        break
    assert number > 1, "a step does not call the model, or swallows its errors"
    fail_at = -1
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
        _all_finite([step], what=" for a batch of one")


def _an_unreliable_batch_moves_nothing(make: MethodFactory, model: nn.Module) -> None:
    """Where a method leaves out all samples by its own judgement, no weight and no optimizer moment moves."""
    unsure = False
    handle = model.get_submodule("head").register_forward_hook(lambda _, __, out: out * 0 if unsure else None)
    method = _adapted(make, model, 1)  # so that there is momentum that could still move something
    unsure = True  # no class is favoured: nothing is reliable
    before = method.state_dict()
    step = method.step(batches(2, SIZE)[1])
    handle.remove()
    if step.used is None or step.used.any():
        raise DoesNotApply("the method does not leave out samples whose prediction favours no class")
    after = method.state_dict()
    moved = [k for k in before if k.startswith(("weights", "moment.")) and not torch.equal(before[k], after[k])]
    assert not moved, f"no sample was used, yet these moved: {moved}"


def _an_invalid_batch_drives_nothing(make: MethodFactory, model: nn.Module) -> None:
    """Where the guard finds no valid sample, weights stay or return towards the source, and answers stay the same."""
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
    assert step.used is None or not step.used.any(), "a sample that is not finite counts as used"
    low, high = torch.minimum(before["weights"], source), torch.maximum(before["weights"], source)
    inside = (after["weights"] >= low) & (after["weights"] <= high)
    assert inside.all(), "no sample was valid, yet weights moved, and not towards the source"
    stayed = torch.equal(before["weights"], after["weights"])
    assert not stayed or torch.equal(answers, method.predict(clean)), "no sample was valid, yet the next answers differ"
    moved = [k for k in before if k.startswith("moment.") and after[k].any() and not torch.equal(before[k], after[k])]
    assert not moved, f"no sample was valid, yet these moved: {moved}"


def _deterministic(make: MethodFactory, model: nn.Module) -> None:
    _same(_steps(make, model), _steps(make, model), "a second run")


def _global_random_state_is_untouched(make: MethodFactory, model: nn.Module) -> None:
    before, pythons = torch.get_rng_state(), random.getstate()
    _run(make(model), batches(3, SIZE))
    assert torch.equal(before, torch.get_rng_state()), "torch's global random state was used or set"
    assert pythons == random.getstate(), "Python's global random state was used or set"


def _surroundings_do_not_matter(make: MethodFactory, model: nn.Module) -> None:
    expected = _steps(make, model)
    for surrounding in (torch.no_grad, torch.inference_mode):
        with surrounding():
            _same(expected, _steps(make, model), f"under {surrounding.__name__}")


def _training_mode_does_not_matter(make: MethodFactory, model: nn.Module) -> None:
    expected = _steps(make, model.eval())
    with make(model.train()) as method:
        model.train()  # the user does it again, around the adapter: dropout must stay off all the same
        _same(expected, _run(method, batches(3, SIZE)), "with the model in training mode")


def _autocast(make: MethodFactory, model: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method = make(model)
        steps = _run(method, batches(3, SIZE))
    _all_finite(steps, method, " under bfloat16 autocast")


def _double_precision(make: MethodFactory, model: nn.Module) -> None:
    method = make(model.double())
    for step in _run(method, [x.double() for x in batches(3, SIZE)]):
        assert step.logits.dtype == torch.float64, "double precision was lost"
    assert {v.dtype for v in method.adapted_parameters.values()} <= {torch.float64}, "the weights lost double precision"


def _cast_and_move(make: MethodFactory, model: nn.Module) -> None:
    method = _adapted(make, model, 1)
    method.to(torch.float64)
    steps = _run(method, [x.double() for x in batches(2, SIZE)])
    assert {step.logits.dtype for step in steps} == {torch.float64}, "the answers did not follow .to()"
    _all_finite(steps, what=" after .to() between two steps")
    method.reset()
    _all_finite(_run(method, [x.double() for x in batches(1, SIZE)]), what=" after .to() and reset()")


class _Named(nn.Module):
    """A model in the style of transformers: a named input, an output with `logits`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = model, model.get_submodule("head")

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(pixel_values)}


def _mappings_and_tuples(make: MethodFactory, model: nn.Module) -> None:
    expected = _steps(make, model, 2)
    with make(_Named(model)) as method:
        _same(expected, _run(method, [{"pixel_values": x} for x in batches(2, SIZE)]), "with a mapping as input")
    with make(model) as method:
        _same(expected, _run(method, [(x,) for x in batches(2, SIZE)]), "with a tuple as input")


def _bad_input_changes_nothing(make: MethodFactory, model: nn.Module) -> None:
    method = _adapted(make, model, 1)
    before = method.state_dict()
    for bad in (torch.zeros(0, *SHAPE), torch.zeros(2, *SHAPE, dtype=torch.uint8), torch.zeros(SHAPE), torch.zeros(4)):
        with contextlib.suppress(InputError, RuntimeError):  # the model's own errors pass through
            method.step(bad)
            raise AssertionError(f"a {bad.dtype} batch of shape {tuple(bad.shape)} was accepted")
    _unchanged(before, method.state_dict(), "a refused batch")


def _a_closed_adapter_answers_no_more(make: MethodFactory, model: nn.Module) -> None:
    before = _copy(model)
    method = _adapted(make, model, 1)
    method.close()
    _unchanged(before, model.state_dict(), "an adapter that is closed")
    for call in (lambda: method.step(batches(1, SIZE)[0]), lambda: method.predict(batches(1, SIZE)[0]), method.reset):
        with contextlib.suppress(ClosedError):
            call()
            raise AssertionError("a closed adapter still answers")


def _copies_and_pickles(make: MethodFactory, model: nn.Module) -> None:
    data = batches(4, SIZE)
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
        steps = _run(method, [x.to(dtype) for x in batches(2, SIZE)])
        for step in steps:
            assert step.logits.dtype in (dtype, torch.float32), f"{dtype} became {step.logits.dtype}"
            assert step.valid is None or step.valid.all(), f"samples were not answered in {dtype}"
        adapted = method.adapted_parameters
        assert {v.dtype for v in adapted.values()} <= {torch.float32}, f"the weights are not kept in float32 in {dtype}"
        _all_finite(steps, method, f" in {dtype}")
        assert not method.health().get("update_refused"), f"an update was refused in {dtype}"
        still = sorted(noticeable - _moved(method).keys())
        assert not still, f"these move in float32, but not in {dtype}: {still}"


_Check = Callable[[MethodFactory, nn.Module], None]
_WITH_EVERY_OBJECTIVE: tuple[_Check, ...] = (
    _shapes, _finite, _does_what_it_declares, _batch_of_one, _an_unreliable_batch_moves_nothing,
    _an_invalid_batch_drives_nothing, _autocast, _double_precision, _half_precision,
)  # fmt: skip
_WITH_ANY_OBJECTIVE: tuple[_Check, ...] = (
    _the_model_is_not_changed, _predicting_changes_nothing, _an_error_changes_nothing, _reset_replays_identically,
    _resume_is_exact, _input_is_untouched, _deterministic, _global_random_state_is_untouched, _surroundings_do_not_matter,
    _training_mode_does_not_matter, _cast_and_move, _mappings_and_tuples, _bad_input_changes_nothing,
    _a_closed_adapter_answers_no_more, _copies_and_pickles, _an_export_predicts,
)  # fmt: skip

METHOD_CHECKS = {check.__name__.strip("_"): check for check in (*_WITH_EVERY_OBJECTIVE, *_WITH_ANY_OBJECTIVE)}
"""Every check of `check_method` by name."""

OBJECTIVE_MATTERS = frozenset(check.__name__.strip("_") for check in _WITH_EVERY_OBJECTIVE)
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
        the checks that did not apply, and why: {(check, kind of normalization): reason}.

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

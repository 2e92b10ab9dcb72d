"""Everything in the registry keeps the public contract, with every objective and every kind of normalization."""

from __future__ import annotations

import random

import pytest
import torch

import come
from come import testing
from come.method import Frozen
from come.model.locks import untracked

# A check that has nothing to find out about a method stands here with its reason: {(method, check): (reason, norms)}.
ALL = tuple(testing.NORMS)
NO_BATCH_NORM = tuple(norm for norm in ALL if norm != "batch")
DOES_NOT_APPLY: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("neo", "does_what_it_declares"): ("the guard rejects its answers on this random network", ("group",)),
    ("norm", "does_what_it_declares"): ("a model without BatchNorm has nothing that it changes", NO_BATCH_NORM),
    **{
        (method, "an_export_predicts"): ("its answers are more than weights: `Method.unexported`", ALL)
        for method in ("lame", "foa", "memo", "tda", "tpt")
    },
    **{
        (method, "an_unreliable_batch_moves_nothing"): (reason, ALL)
        for methods, reason in {
            ("source", "norm", "lame", "t3a", "neo", "tda"): "no weight ever moves",
            (
                "tent",
                "steady",
                "adadem",
                "zerosiam",
                "tea",
                "cotta",
                "memo",
                "foa",
                "tpt",
            ): "every valid sample is used",
            ("rotta",): "steps are taken on a memory of samples",
            ("roid",): "samples are weighed against each other",
        }.items()
        for method in methods
    },
}
# What a method does not keep stands here with its reason: {(method, check): (reason, part of the message)}.
EXCEPTIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("lame", "batch_of_one"): (
        "a single sample has no neighbours: LAME refuses a batch that is not larger than k",
        "needs a batch of at least 6 samples, got 1",
    ),
}


def cases():
    """Every check of every method; with every objective where that can matter."""
    for method in come.methods.names():
        for check in testing.METHOD_CHECKS:
            matters = come.methods.get(method).minimizes and check in testing.OBJECTIVE_MATTERS
            _, left_out = DOES_NOT_APPLY.get((method, check), ("", ()))
            for norm in (norm for norm in ALL if norm not in left_out):
                for objective in come.objectives.names() if matters else ["come"]:
                    yield method, objective, norm, check


def run(build, method, objective, norms, check):
    return testing.check_method(
        lambda model: build(model, method, objective), norms=norms, checks=[check], model=build.model(method)
    )


def quick(case):
    """Always: two kinds of normalization, with buffers and without, and the others with one objective where that matters."""
    _, objective, norm, check = case
    always = norm in ("layer", "batch") or (check in testing.OBJECTIVE_MATTERS and objective == "come")
    return case if always else pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(("method", "objective", "norm", "check"), [quick(case) for case in cases()])
def test_method(method, objective, norm, check, build):
    if (method, check) in EXCEPTIONS:
        _, message = EXCEPTIONS[method, check]
        with pytest.raises(AssertionError, match=message):
            run(build, method, objective, [norm], check)
    else:
        assert run(build, method, objective, [norm], check) == {}


@pytest.mark.parametrize("method", [name for name in come.methods.names() if come.methods.get(name).batch_statistics])
def test_with_statistics_of_the_batch(method, build):
    """The guard leaves the random networks above on the source's."""
    left_out = {check for one, check in (*DOES_NOT_APPLY, *EXCEPTIONS) if one == method}
    checks = [check for check in testing.METHOD_CHECKS if check not in left_out]

    def make(model):
        return build(model, method, statistics="batch")

    assert testing.check_method(make, norms=["batch"], checks=checks, model=build.model(method)) == {}


@pytest.mark.parametrize(("method", "check"), list(DOES_NOT_APPLY))
def test_what_does_not_apply(method, check, build):
    _, norms = DOES_NOT_APPLY[method, check]
    assert set(run(build, method, "come", norms, check)) == {(check, norm) for norm in norms}


def test_every_check_applies_to_some_method_of_ours():
    applied = {check for _, _, _, check in cases()}
    assert applied == set(testing.METHOD_CHECKS)


@pytest.mark.parametrize("name", come.objectives.names())
def test_objective(name):
    testing.check_objective(come.objectives.get(name))


@pytest.mark.parametrize(
    "objective",
    [
        come.Softmax(freeze_norm=True),
        come.Opinion(freeze_norm=False),
        come.Opinion(evidence="exp-1"),
        come.Opinion(evidence="relu"),
        come.Opinion(evidence="softplus"),
        come.Opinion(eps=1e-7),
        come.Opinion(p=1.0),
        come.Opinion(p=float("inf")),
        come.Opinion(p=3.0, tau=2.0),
        come.Softmax(freeze_norm=True, p=100.0, tau=0.5),
    ],
    ids=repr,
)
def test_variants_of_the_objectives(objective):
    testing.check_objective(objective)


class Broken(come.Method):
    """Breaks the contract in the way that `fault` says."""

    name = "broken"
    fault = ""

    def adapt(self, ctx, x):
        try:
            logits = ctx.forward(x)
        except OSError:
            if self.fault != "swallows":
                raise
            logits = ctx.forward(x)
        loss = self.objective.entropy(logits)
        valid = ctx.valid
        if self.fault == "leaks":
            with untracked():
                ctx.model.model.head.weight.mul_(1.01)
        if self.fault == "forgets":
            self.remembered = getattr(self, "remembered", 0) + 1  # not in ctx.state: reset() cannot know
            loss = loss * self.remembered
        if self.fault == "random":
            loss = loss + torch.randn(())
        if self.fault == "python's random":
            loss = loss * random.random()
        if self.fault == "input":
            x.args[0].mul_(1.0).add_(1.0)
        if self.fault == "in place":
            ctx.state["seen"].add_(1)
        if self.fault == "swallows":
            ctx.descend(loss.mean())
            return come.Step(logits, loss, valid)
        if self.fault == "still":
            return come.Step(logits, loss, valid & False)
        if self.fault == "lies":
            return come.Step(logits + 1, loss, valid)
        if self.fault == "unsaid":
            ctx.descend(loss.mean())
            return come.Step(logits, loss)
        if self.fault == "now and then":
            ctx.descend(loss.mean())
            return come.Step(logits, loss if ctx.count else None, valid)
        if self.fault == "infinite weights":
            ctx.weights = ctx.weights.detach() * torch.inf
        if self.fault == "coasts":
            used = valid & (loss < 0.5)
            ctx.descend(come.method.masked_mean(loss, used))  # without go=: momentum goes on
            return come.Step(logits, loss, used)
        if self.fault == "remembers in place":
            ctx.state["seen"].add_(1)
            return come.Step(logits, loss, valid)
        if self.fault == "moves in place":
            ctx.weights.data.add_(1)
            return come.Step(logits, loss, valid)
        if self.fault == "single":
            ctx.weights = ctx.weights.detach().float().double().float().requires_grad_()
        if self.fault == "half":
            step = ctx.gradient(loss.mean()) * ctx.lr
            ctx.weights = (ctx.weights - step).to(logits.dtype).detach().to(ctx.weights.dtype)
            return come.Step(logits, loss, valid)
        ctx.descend(loss.mean(), go=valid.any())
        ctx.forward(x)
        return come.Step(logits, loss, loss > 0)

    def predict(self, ctx, x):
        return ctx.forward(x) + ctx.state["seen"].to(ctx.device)

    def frozen(self, ctx):
        return Frozen(ctx.source if self.fault == "exports the source" else ctx.weights)

    def initial_state(self, ctx, x):
        return {"seen": torch.zeros(1)}


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("leaks", "the_model_is_not_changed"),
        ("forgets", "reset_replays_identically"),
        ("forgets", "resume_is_exact"),
        ("random", "global_random_state_is_untouched"),
        ("python's random", "global_random_state_is_untouched"),
        ("input", "input_is_untouched"),
        ("in place", "an_error_changes_nothing"),
        ("swallows", "an_error_changes_nothing"),
        ("still", "does_what_it_declares"),
        ("lies", "does_what_it_declares"),
        ("unsaid", "shapes"),
        ("now and then", "shapes"),
        ("infinite weights", "finite"),
        ("coasts", "an_unreliable_batch_moves_nothing"),
        ("single", "double_precision"),
        ("half", "half_precision"),
        ("exports the source", "an_export_predicts"),
    ],
)
def test_the_checks_find_what_they_are_there_for(fault, check):
    facts = {"fault": fault, "changes": fault != "lies"}
    method = type("Faulty", (Broken,), facts)
    rate = 1e-6 if fault == "half" else 1e-2
    with pytest.raises(AssertionError, match=check):
        testing.check_method(
            lambda model: come.adapt(model, method(lr=rate), guard=False), norms=["layer"], checks=[check]
        )


@pytest.mark.parametrize(
    ("fault", "message"),
    [("remembers in place", "the next answers differ"), ("moves in place", "not towards the source")],
)
def test_the_check_of_invalid_samples_finds_what_it_is_there_for(fault, message):
    method = type("Faulty", (Broken,), {"fault": fault})
    with pytest.raises(AssertionError, match=message):
        testing.check_method(
            lambda model: come.adapt(model, method(lr=1e-2)),
            norms=["layer"],
            checks=["an_invalid_batch_drives_nothing"],
        )


def test_without_a_fault_every_check_passes():
    left_out = testing.check_method(lambda model: come.adapt(model, Broken(lr=1e-2)), norms=["layer"])
    assert set(left_out) == {("an_unreliable_batch_moves_nothing", "layer")}


def test_without_a_guard_no_sample_is_invalid():
    left_out = testing.check_method(
        lambda model: come.adapt(model, "tent", guard=False),
        norms=["layer"],
        checks=["an_invalid_batch_drives_nothing"],
    )
    assert "without a guard" in left_out["an_invalid_batch_drives_nothing", "layer"]


@pytest.mark.parametrize("norm", testing.NORMS)
@pytest.mark.parametrize("model", [testing.TinyClassifier, testing.TinyTransformer])
def test_the_tiny_models_are_sure_of_some_samples_and_not_of_others(model, norm):
    margin = 0.4 * torch.tensor(testing.CLASSES).log()
    entropy = come.Softmax().entropy(model(testing.NORMS[norm]).eval()(torch.cat(testing.batches())))
    assert 0.1 < (entropy < margin).float().mean() < 0.9


def test_objective_check_finds_an_unnormalized_mass():
    class Unnormalized(come.Objective):
        def log_mass(self, logits):
            return logits.float()

    with pytest.raises(AssertionError, match="masses sum to"):
        testing.check_objective(Unnormalized())


def test_unknown_check_and_norm_are_named():
    with pytest.raises(come.ConfigError, match="did you mean 'layer'"):
        testing.check_method(come.adapt, norms=["layr"])
    with pytest.raises(come.ConfigError, match="did you mean 'shapes'"):
        testing.check_method(come.adapt, checks=["shape"])

"""Everything in the registry keeps the public contract, with every objective and every kind of normalization."""

from __future__ import annotations

import pytest
import torch

import come
from come import testing
from come.method import untracked

# An expected failure stands here with its reason: {(method, check): reason}.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("lame", "batch_of_one"): "a single sample has no neighbours: LAME refuses a batch that is not larger than k",
}


@pytest.mark.parametrize("check", testing.METHOD_CHECKS)
@pytest.mark.parametrize("norm", testing.NORMS)
@pytest.mark.parametrize(
    ("method", "objective"),
    [
        (method, objective)
        for method in come.methods.names()
        for objective in come.objectives.names()
        if come.methods.get(method).minimizes or objective == "em"  # else the objective plays no part
    ],
)
def test_method(method, objective, norm, check, request, build):
    if (method, check) in EXCEPTIONS:
        request.applymarker(pytest.mark.xfail(reason=EXCEPTIONS[method, check], strict=True))
    testing.check_method(
        lambda model: build(model, method, objective), norms=[norm], checks=[check], model=build.model(method)
    )


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
        logits = ctx.forward(x)
        loss = self.objective.entropy(logits)
        if self.fault == "leaks":
            with untracked():
                ctx.model.model.head.weight.mul_(1.01)
        if self.fault == "forgets":
            self.remembered = getattr(self, "remembered", 0) + 1  # not in ctx.state: reset() cannot know
            loss = loss * self.remembered
        if self.fault == "random":
            loss = loss + torch.randn(())
        if self.fault == "input":
            x.args[0].mul_(1.0).add_(1.0)
        if self.fault == "in place":
            ctx.state["seen"].add_(1)
        ctx.descend(loss.mean())
        ctx.forward(x)
        return come.Step(logits, loss, loss > 0)

    def initial_state(self, ctx, x):
        return {"seen": torch.zeros(1)}


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("leaks", "the_model_is_not_changed"),
        ("forgets", "reset_replays_identically"),
        ("forgets", "resume_is_exact"),
        ("random", "global_random_state_is_untouched"),
        ("input", "input_is_untouched"),
        ("in place", "an_error_changes_nothing"),
    ],
)
def test_the_checks_find_what_they_are_there_for(fault, check):
    method = type("Faulty", (Broken,), {"fault": fault})
    with pytest.raises(AssertionError, match=check):
        testing.check_method(
            lambda model: come.adapt(model, method(lr=1e-2), guard=False), norms=["layer"], checks=[check]
        )


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

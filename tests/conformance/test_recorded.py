"""Every recorded trajectory of the published implementations, replayed."""

from __future__ import annotations

import math

import pytest
import torch

import come
from come.select import norm_affine

LN_K = math.log(1000)
PUBLISHED = {False: "em", True: come.Opinion(eps=1e-7)}
SAME_NORMS_AS_TENT = {"sar_allnorm": norm_affine()}


class Recorder:
    """The objective, remembering every entropy it gave: what a method saw, in order."""

    def __init__(self, monkeypatch):
        self.seen = []
        original = come.Objective.entropy

        def entropy(objective, logits):
            value = original(objective, logits)
            self.seen.append(value.detach().clone())
            return value

        monkeypatch.setattr(come.Objective, "entropy", entropy)


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def replay(method, case, each=lambda step: None):
    logits = []
    for t in range(case.hyper["T"]):
        step = method.step(case.batch(t))
        each(step)
        logits.append(step.logits)
    case.close("logits", torch.stack(logits))


def check_final(method, case):
    assert list(method.parameters) == case.entry["adapted_parameters"]
    for name, parameter in method.parameters.items():
        case.close(f"final.{name}", parameter.detach())


def after_reset(method, case):
    return torch.stack([method(case.batch(6)), method(case.batch(7))])


@pytest.mark.recorded("none")
def test_base(case):
    case.close("eval_logits", come.adapt(case.model(), "source")(case.batch(0)))
    if "batch_stat_logits" in case:
        case.close("batch_stat_logits", come.adapt(case.model(), "norm")(case.batch(0)))


@pytest.mark.recorded("tent", "tent_come")
def test_tent(case, recorder):
    method = come.adapt(
        case.model(), "tent", PUBLISHED[case.hyper["come"]], lr=case.hyper["lr"], steps=case.hyper["steps"]
    )
    replay(method, case)
    case.close("entropy", torch.stack(recorder.seen).view(case["entropy"].shape))
    check_final(method, case)
    if "after_reset_logits" in case:
        method.reset()
        case.close("after_reset_logits", after_reset(method, case))


@pytest.mark.recorded("eata", "eata_come")
def test_eata(case, recorder, source_batches):
    method = come.adapt(
        case.model(),
        "eata",
        PUBLISHED[case.hyper["come"]],
        lr=case.hyper["lr"],
        steps=case.hyper["steps"],
        margin=case.hyper["e_margin"] / LN_K,
        redundancy=case.hyper["d_margin"],
        beta=case.hyper["fisher_beta"] if case.hyper["fisher"] else 0.0,
        source=source_batches if case.hyper["fisher"] else None,
    )
    if case.hyper["fisher"]:
        for name in method.parameters:
            case.close(f"fisher.{name}", method.state[f"fisher.{name}"])

    # Count what was selected in every inner step, as the recording does.
    selected, peaks = [], []
    inner = method.adapt

    def adapt(x):
        step = inner(x)
        reliable = (recorder.seen[-1] < case.hyper["e_margin"]).sum()
        selected.append(torch.stack([reliable, step.used.sum()]))
        return step

    method.adapt = adapt
    replay(method, case, each=lambda _: peaks.append(method.state["average"].max()))
    case.close("n_selected", torch.stack(selected).view(case.hyper["T"], case.hyper["steps"], 2).sum(dim=1))
    case.close("entropy", torch.stack(recorder.seen).view(case["entropy"].shape))
    case.close("probs_ema_final", method.state["average"])
    case.close("probs_ema_max", torch.stack(peaks))
    check_final(method, case)

    if "after_reset_logits" in case:
        # Published: the average survives a reset. Ours forgets it, so the leak is put back by hand.
        leaking = {k: v for k, v in method.state_dict().items() if k in ("state.average", "state.averaged")}
        method.reset()
        method.load_state_dict({**method.state_dict(), **leaking})
        case.close("after_reset_logits", after_reset(method, case))
        if "fresh_logits" in case:
            method.reset()
            case.close("fresh_logits", after_reset(method, case))


def sar(case, quirks):
    come_objective = case.hyper["variant"] == "sar_come"
    return come.adapt(
        case.model(),
        "sar",
        PUBLISHED[come_objective],
        lr=case.hyper["lr"],
        steps=case.hyper["steps"],
        margin=case.hyper["margin_e0"] / LN_K,
        rho=case.hyper["rho"],
        quirks=quirks,
        select=SAME_NORMS_AS_TENT.get(case.hyper["variant"]),
    )


@pytest.mark.recorded("sar", "sar_come")
def test_sar(case, recorder):
    method = sar(case, quirks=True)
    counts, averages, recoveries = [], [], []
    inner = method.adapt

    def adapt(x):
        step = inner(x)
        counts.append(torch.stack([(recorder.seen[-2] < case.hyper["margin_e0"]).sum(), step.used.sum()]))
        return step

    def each(_):
        averages.append(method.state["average"].clone())
        recoveries.append(method.state["recoveries"].clone())

    method.adapt = adapt
    replay(method, case, each)
    case.close("n_selected", torch.stack(counts).view(case["n_selected"].shape))
    case.close("ema", torch.stack(averages))
    case.close("reset_flag", torch.stack(recoveries).diff(prepend=torch.zeros(1, dtype=torch.int64)))
    case.close("entropy", torch.stack(recorder.seen).view(case["entropy"].shape))
    check_final(method, case)

    if "after_reset_leaky_logits" in case:
        # Published: momentum survives a reset. Ours forgets it, so the leak is put back by hand.
        leaking = {k: v for k, v in method.state_dict().items() if k.startswith("optimizer.")}
        method.reset()
        method.load_state_dict({**method.state_dict(), **leaking})
        case.close("after_reset_leaky_logits", after_reset(method, case))
        method.reset()
        case.close("fresh_logits", after_reset(method, case))


@pytest.mark.recorded("sar", "sar_come")
def test_sar_without_quirks_agrees_until_they_matter(case):
    """The default agrees up to the step after the first recovery, or the first batch without a reliable sample."""
    method = sar(case, quirks=False)
    empty = (case["n_selected"].sum(dim=1)[:, 1] == 0) if case["n_selected"].ndim == 3 else torch.zeros(0)
    matters = [t for t in range(case.hyper["T"]) if empty[t] or case["reset_flag"][t]]
    last = min([matters[0] + 1 if case["reset_flag"][matters[0]] else matters[0]] if matters else [case.hyper["T"]])
    for t in range(min(last + 1, case.hyper["T"])):
        error = (method(case.batch(t)) - case["logits"][t]).abs().max().item()
        assert error <= case.entry["tolerance"]["logits"]["atol"], f"step {t}: {error}"


@pytest.mark.recorded("losses")
def test_loss_table(case):
    z = case["logits"].clone().requires_grad_()
    opinion, softmax = PUBLISHED[True], come.Softmax()
    entropy = opinion.entropy(z)
    case.close("opinion_entropy", entropy.detach())
    case.close("opinion_entropy_grad", torch.autograd.grad(entropy.sum(), z)[0])
    entropy = softmax.entropy(z)
    case.close("softmax_entropy", entropy.detach())
    case.close("softmax_entropy_grad", torch.autograd.grad(entropy.sum(), z)[0][::4])
    exact = come.Opinion()
    case.close("u", exact.uncertainty(case["logits"]))
    case.close("score_dirichlet", -exact.confidence(case["logits"]))
    case.close("score_msp", -softmax.confidence(case["logits"]))


@pytest.mark.recorded("losses")
def test_where_the_published_loss_overflows_ours_is_finite(case):
    z = case["overflow_logits"].clone().requires_grad_()
    assert case["overflow_opinion_entropy"].isnan().any()
    entropy = come.Opinion().entropy(z)
    assert entropy.isfinite().all()
    assert torch.autograd.grad(entropy.sum(), z)[0].isfinite().all()

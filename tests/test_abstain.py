"""When not to answer: the promises, counted over many draws, and what the adapters make of them."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import binom

import come
from come import abstain, metrics
from come.abstain import Promise, Wanted, binomial_cdf, coverage_threshold, risk_threshold
from come.metrics.scores import score_of
from come.testing import NORMS, TinyClassifier, batches

X = batches(8, size=12)
Y = [torch.arange(12) % 5 for _ in X]
LABELLED = list(zip(X, Y, strict=True))


def made(norm="layer", method="tent", **more):
    return come.adapt(TinyClassifier(NORMS[norm]), method, lr=0.01, **more)


def right(classifier, data=X):
    """Batches whose labels are what the model says, so that no answer is wrong."""
    return [(x, classifier.predict(x).argmax(dim=1)) for x in data]


# ---- the promises, over many draws ----


def draw(n, generator, worst=0.6):
    """A score in [0, 1] and errors that are rarer where it is high: wrong with probability worst * (1 - score)."""
    score = torch.rand(n, generator=generator, dtype=torch.float64)
    return score, torch.rand(n, generator=generator) < worst * (1 - score)


def true_risk(threshold, worst=0.6):
    """Of the samples at or above the threshold: worst * (1 - mean score)."""
    return worst * (1 - max(threshold, 0.0)) / 2


def share_misled(find, risk, draws=400, n=600):
    """The share of draws whose threshold has a true risk above the promise."""
    generator = torch.Generator().manual_seed(0)
    misled = answered = 0
    for seed in range(draws):
        try:
            threshold = find(*draw(n, generator), seed)
        except come.InputError:
            continue
        answered += 1
        misled += true_risk(threshold) > risk
    assert answered > draws / 2
    return misled / draws


@pytest.mark.parametrize(("risk", "delta"), [(0.15, 0.1), (0.15, 0.2), (0.2, 0.05)])
def test_a_promised_risk_is_exceeded_in_no_more_than_delta_of_the_draws(risk, delta):
    found = share_misled(lambda score, wrong, seed: risk_threshold(score, wrong, risk, delta, seed), risk)
    assert found <= delta + 2 * math.sqrt(delta * (1 - delta) / 400)


def test_the_empirical_risk_in_place_of_the_bound_breaks_the_promise(monkeypatch):
    """The simulation sees a procedure that promises too much."""
    monkeypatch.setattr(abstain, "binomial_cdf", lambda k, n, p: 0.0 if k <= p * n else 1.0)
    assert share_misled(lambda score, wrong, seed: risk_threshold(score, wrong, 0.15, 0.1, seed), 0.15) > 0.3


@pytest.mark.parametrize(("coverage", "n"), [(0.9, 19), (0.8, 50), (0.5, 7)])
def test_a_promised_coverage_is_met_on_average(coverage, n):
    score = torch.rand(4000, n + 1, generator=torch.Generator().manual_seed(1))
    met = [row[-1] >= coverage_threshold(row[:-1], coverage) for row in score]
    mean = torch.stack(met).double().mean().item()
    assert coverage - 0.015 <= mean <= coverage + 1 / (n + 1) + 0.015  # conformal: at most 1/(n + 1) more


def test_where_no_threshold_has_the_risk_no_more_than_delta_of_the_draws_get_a_promise():
    """And all of these are wrong, as the page says: the score tells nothing, every threshold has a risk of 0.2."""
    generator, given, draws = torch.Generator().manual_seed(0), 0, 400
    for _ in range(draws):
        (pilot, score), wrong = (
            torch.rand(200, generator=generator).split([50, 150]),
            torch.rand(200, generator=generator) < 0.2,
        )
        given += abstain._tested(pilot, wrong[:50], score, wrong[50:], risk=0.15, delta=0.1) is not None
    assert 0 < given / draws <= 0.1 + 2 * math.sqrt(0.1 * 0.9 / draws)


def test_more_samples_answer_more():
    generator = torch.Generator().manual_seed(0)
    thresholds = [risk_threshold(*draw(n, generator), 0.1, 0.1) for n in (1000, 100_000)]
    assert thresholds[0] > thresholds[1] > 1 - 2 * 0.1 / 0.6  # where the true risk is 0.1
    assert thresholds[1] < 1 - 2 * 0.1 / 0.6 + 0.05


def test_all_are_answered_where_none_is_wrong():
    assert risk_threshold(torch.rand(200), torch.zeros(200, dtype=torch.bool), 0.05, 0.1) == -math.inf


def test_equal_scores_are_answered_together():
    score = torch.tensor([0.0, 1.0]).repeat(200)
    assert risk_threshold(score, score == 0, 0.05, 0.1) == 1.0
    assert coverage_threshold(torch.ones(50), 0.9) == 1.0


@pytest.mark.parametrize(
    ("k", "n", "p"), [(0, 1, 0.5), (0, 45, 0.05), (3, 100, 0.02), (700, 20_000, 0.04), (5, 5, 0.3)]
)
def test_the_binomial_distribution(k, n, p):
    assert binomial_cdf(k, n, p) == pytest.approx(binom.cdf(k, n, p), rel=1e-9)


# ---- following a stream ----


CPU = torch.device("cpu")


def follow(promise, stream):
    """The share answered along a stream (N, B) of scores, and how far from the promise it may be by the docstring."""
    now, answered = abstain.Abstention.begin(promise, CPU).threshold, 0
    for score in stream:
        below = score < now.to(score.dtype)
        answered += int((~below).sum())
        now = abstain.followed(promise, now, below, torch.ones_like(below))
    seen = torch.cat([stream.flatten(), torch.tensor([promise.threshold])])
    step = promise.rate * stream.shape[1]
    return answered / stream.numel(), ((seen.amax() - seen.amin()).item() + step) / (promise.rate * stream.numel())


def test_a_threshold_that_follows_keeps_the_coverage_on_any_stream():
    """Within (range + rate * batch) / (rate * samples), as the docstring says; a fixed one does not."""
    generator = torch.Generator().manual_seed(0)
    wanted = Wanted(coverage=0.8, score="energy", follow=True)
    promise = wanted.promise(torch.randn(500, generator=generator), None)
    t = torch.arange(400)[:, None]
    stream = torch.randn(400, 16, generator=generator) - 3 * (t / 60).sin() - t / 200
    share, bound = follow(promise, stream)
    assert abs(share - 0.8) <= bound < 0.1
    assert (stream >= promise.threshold).double().mean() < 0.6


@pytest.mark.parametrize("away", [20.0, -20.0])
def test_the_bound_of_a_threshold_that_follows_counts_the_way_to_the_first_scores(away):
    generator = torch.Generator().manual_seed(0)
    promise = Wanted(coverage=0.5, score="energy", follow=True).promise(torch.randn(500, generator=generator), None)
    stream = torch.randn(150, 8, generator=generator) + away
    share, bound = follow(promise, stream)
    seen = (stream.amax() - stream.amin()).item()
    assert (seen + 8 * promise.rate) / (promise.rate * stream.numel()) < abs(share - 0.5) <= bound < 0.5


@pytest.mark.parametrize(
    "score", [torch.full((200,), 0.7), torch.zeros(200), torch.tensor([0.7]), torch.tensor([1.0, 1 + 2e-7])]
)
def test_a_threshold_follows_where_all_calibration_scores_are_equal(score):
    promise = Wanted(coverage=0.5, follow=True).promise(score, None)
    stream = torch.rand(500, 16, generator=torch.Generator().manual_seed(0))
    share, bound = follow(promise, stream)
    assert abs(share - 0.5) <= bound < 0.05


def test_steps_of_a_threshold_are_not_lost_in_rounding():
    """A score that varies little around a large value, one sample at a time."""
    score = 1000 + 2e-3 * torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    promise = Wanted(coverage=0.9, score="energy", follow=True).promise(score[0], None)
    share, bound = follow(promise, score[1][:, None])
    assert abs(share - 0.9) <= bound < 0.06


def test_samples_without_an_answer_do_not_move_the_threshold():
    """No threshold answers them, so one that followed them would fall without end."""
    model = TinyClassifier(NORMS["layer"])
    broken = torch.stack([X[0][0] * math.nan] * 12)
    alone = come.adapt(model, "source", guard=False)
    fleet = come.Fleet(model, "tent", guard=False, streams=["a"])
    for one, step in ((alone, alone.step), (fleet, lambda x: fleet.step(x, "a"))):
        promise = one.calibrate(X, coverage=0.7, follow=True)
        assert step(broken).abstain.all()
        now = (alone._state if one is alone else fleet._look("a")).abstention
        assert now.threshold.item() == promise.threshold


def test_an_adapter_follows_its_stream_and_goes_on_where_it_was(tmp_path):
    classifier = made()
    promise = classifier.calibrate(X, coverage=0.7, follow=True)
    assert promise.rate > 0
    first = [classifier.step(x).abstain for x in X[:4]]
    classifier.save(tmp_path / "state")
    assert classifier.state_dict()["threshold"].item() != promise.threshold
    rest = [classifier.step(x).abstain for x in X[4:]]
    other = made()
    other.load(tmp_path / "state")  # it need not be calibrated itself
    assert other.promise == promise
    assert all(torch.equal(other.step(x).abstain, mine) for x, mine in zip(X[4:], rest, strict=True))
    other.reset()
    assert other.state_dict()["threshold"].item() == pytest.approx(promise.threshold)
    assert all(torch.equal(other.step(x).abstain, mine) for x, mine in zip(X[:4], first, strict=True))
    for twin in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert twin.promise == promise
        assert torch.equal(twin.step(X[4]).abstain, rest[0])


def test_a_step_that_fails_moves_no_threshold():
    classifier = made(guard=False)
    classifier.calibrate(X, coverage=0.7, follow=True)
    classifier.step(X[0])
    before = classifier.state_dict()
    with pytest.raises(RuntimeError, match="conv2d"):
        classifier.step(torch.zeros(2, 3))
    assert torch.equal(classifier.state_dict()["threshold"], before["threshold"])


def test_resets_of_the_method_do_not_move_the_threshold():
    classifier = made(episodic=True)
    promise = classifier.calibrate(X, coverage=0.5, follow=True)
    for x in X:
        classifier.step(x + 1)
    assert classifier.state_dict()["threshold"].item() != pytest.approx(promise.threshold)


# ---- adapters ----


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("objective", ["em", "come"])
def test_calibration_is_of_the_source_model_and_changes_nothing_else(norm, objective):
    fresh, stepped = made(norm, objective=objective), made(norm, objective=objective)
    assert fresh.step(X[0]).abstain is None
    fresh = made(norm, objective=objective)
    for x in X[:3]:
        stepped.step(x)
    before = stepped.state_dict()
    assert stepped.calibrate(X, coverage=0.8) == fresh.calibrate(X, coverage=0.8)
    after = stepped.state_dict()
    for name in before.keys() - {"configuration"}:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0, equal_nan=True)
    score = torch.cat([score_of("confidence", fresh.method.objective, fresh.predict(x)) for x in X])
    assert fresh.promise.threshold == coverage_threshold(score, 0.8)
    assert fresh.promise.answered >= 0.8


def test_batchnorm_is_calibrated_on_the_statistics_that_predict_uses():
    thresholds = {
        rule: made("batch", statistics=rule).calibrate(X, coverage=0.8).threshold for rule in ("batch", "source")
    }
    assert thresholds["batch"] != thresholds["source"]


@pytest.mark.parametrize("score", metrics.SCORES)
def test_every_score_is_that_of_the_metrics(score):
    """`Step.abstain`, `abstains` and the threshold agree, and scores rank as those of a run's rows do."""
    classifier = made()
    promise = classifier.calibrate(X, coverage=0.6, score=score)
    step = classifier.step(X[0])
    found = score_of(score, classifier.method.objective, step.logits)
    assert torch.equal(step.abstain, found < promise.threshold)
    assert torch.equal(classifier.abstains(step.logits), step.abstain)
    objective, z = classifier.method.objective, step.logits
    opinion, p = come.Opinion(), z.softmax(dim=1)
    rows = {"confidence": objective.confidence(z), "softmax": p.amax(dim=1), "belief": opinion.confidence(z)}
    rows |= {"uncertainty": opinion.uncertainty(z), "entropy": torch.special.entr(p).sum(dim=1)}
    rows["energy"] = z.logsumexp(dim=1)
    torch.testing.assert_close(found, metrics.SCORES[score](rows))


def test_u_ranks_as_the_energy_does():
    z = torch.randn(500, 10) * 3
    u, energy = (score_of(name, come.Opinion(), z.double()) for name in ("u", "energy"))
    assert torch.equal(u.argsort(), energy.argsort())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype):
    classifier = come.adapt(TinyClassifier(NORMS["group"]).to(dtype), "tent", lr=0.01)
    data = [x.to(dtype) for x in X]
    promise = classifier.calibrate(data, coverage=0.7)
    bad = data[0].clone()
    bad[0] = math.inf
    step = classifier.step(bad)
    assert step.logits.dtype == dtype
    assert step.abstain[0]
    assert not step.abstain.all()
    assert torch.equal(classifier.abstains(step.logits), step.abstain)
    assert promise.samples == 96


def test_what_cannot_be_answered_is_abstained_from_even_where_all_are_answered():
    classifier = made()
    promise = classifier.calibrate(right(classifier), risk=0.05)
    assert promise.threshold == -math.inf
    x = X[0].clone()
    x[3] = math.nan
    assert classifier.step(x).abstain.tolist() == [i == 3 for i in range(12)]
    assert classifier.abstains(torch.full((1, 5), math.nan)).all()


def test_a_batch_of_one():
    classifier = made("batch")
    classifier.calibrate([x[:1] for x in X], coverage=0.5)
    assert classifier.step(X[0][:1]).abstain.shape == (1,)


def test_models_with_several_arguments_are_calibrated_as_they_are_called():
    class Scaled(TinyClassifier):
        def forward(self, x, scale):
            return super().forward(x) * scale[:, None]

    classifier = come.adapt(Scaled(NORMS["layer"]), "tent", lr=0.01, per_sample=("x", "scale"))
    data = [((x, torch.full((12,), 2.0)), y) for x, y in LABELLED]
    promise = classifier.calibrate(data, coverage=0.7)
    assert promise == classifier.calibrate([x for x, _ in data], coverage=0.7)
    assert promise == classifier.calibrate([{"x": x, "scale": s} for (x, s), _ in data], coverage=0.7)


def test_an_answered_outlier_is_an_error():
    """With outliers among the calibration samples, fewer can be answered at the same risk."""
    classifier = made()
    data = right(classifier)
    unknown = [(x, torch.full_like(y, -1)) for x, y in data[:2]]
    assert classifier.calibrate(data, risk=0.3).answered == 1
    with pytest.raises(come.InputError, match="risk must be at least"):
        classifier.calibrate([*data, *unknown], risk=0.1)


def test_own_calibration_holds_for_a_state_of_another(tmp_path):
    one, other = made(), made()
    one.calibrate(X, coverage=0.9, follow=True)
    one.step(X[0])
    one.save(tmp_path / "state")
    promise = other.calibrate(X, coverage=0.6)
    other.load(tmp_path / "state")
    assert other.promise == promise
    assert "threshold" not in other.state_dict()


def test_states_with_a_broken_promise_are_refused():
    classifier = made()
    classifier.calibrate(X, coverage=0.7, follow=True)
    saved = classifier.state_dict()
    for name, value in {"threshold": torch.tensor(math.nan), "weights": saved["weights"][:-1]}.items():
        with pytest.raises(come.StateError, match=name):
            made().load_state_dict(saved | {name: value})
    text = bytes(saved["configuration"].tolist())
    for old, new in (
        (b'"confidence"', b'"confidenze"'),
        (b'"samples": 96', b'"samples": ""'),
        (b'"answered"', b'"answerec"'),
    ):
        assert old in text
        broken = torch.tensor(list(text.replace(old, new)), dtype=torch.uint8)
        with pytest.raises(come.StateError, match="cannot be read"):
            made().load_state_dict(saved | {"configuration": broken})


# ---- fleets ----


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_streams_of_a_fleet_abstain_as_adapters_do(norm, follow, tmp_path):
    model = TinyClassifier(NORMS[norm])
    fleet = come.Fleet(model, "tent", lr=0.01, streams=["a", "b", "c"])
    alone = {name: come.adapt(model, "tent", lr=0.01) for name in "abc"}
    promise = fleet.calibrate(X, coverage=0.7, follow=follow)
    assert all(one.calibrate(X, coverage=0.7, follow=follow) == promise for one in alone.values())
    assert fleet.promise == promise
    names = [*"aaaabbbbcccc"]
    for x in X[:5]:
        step = fleet.step(x, names)
        expected = torch.cat([alone[name].step(x[4 * i : 4 * i + 4]).abstain for i, name in enumerate("abc")])
        assert torch.equal(step.abstain, expected)
    if follow:
        kept = {name: fleet._look(name).abstention.threshold for name in "abc"}
        assert len({round(value.item(), 6) for value in kept.values()}) > 1
        assert all(kept[name].item() == pytest.approx(alone[name]._state.abstention.threshold.item()) for name in "abc")
    logits = fleet.predict(X[6], names)
    expected = torch.cat([alone[name].abstains(logits[4 * i : 4 * i + 4]) for i, name in enumerate("abc")])
    assert torch.equal(fleet.abstains(logits, names), expected)
    fleet.save(tmp_path, None)
    other = come.Fleet(model, "tent", lr=0.01)
    other.calibrate(X, coverage=0.7, follow=follow)
    other.load(tmp_path)
    assert torch.equal(other.step(X[7], names).abstain, fleet.step(X[7], names).abstain)


def test_streams_that_are_opened_later_or_come_back_from_disk_have_the_promise(tmp_path):
    fleet = come.Fleet(TinyClassifier(NORMS["layer"]), "tent", lr=0.01, streams=["a", "b"], resident=1, folder=tmp_path)
    for name in "ab":
        assert fleet.step(X[0], name).abstain is None
    promise = fleet.calibrate(X, coverage=0.7, follow=True)
    fleet.open("c")
    for name in "abca":
        assert fleet.step(X[0], name).abstain.shape == (12,)
        assert fleet._look(name).abstention.promise == promise
    fleet.reset()
    assert fleet.step(X[0], "b").abstain is not None


# ---- what is refused ----


@pytest.mark.parametrize(
    ("data", "how", "message"),
    [
        (X, {}, "calibrate() must be given either risk (needs labels) or coverage, got neither"),
        (X, {"risk": 0.1, "coverage": 0.9}, "either risk (needs labels) or coverage, got risk=0.1 and coverage=0.9"),
        (X, {"risk": 0}, "risk must be in (0, 1), got 0"),
        (X, {"coverage": 1.0}, "coverage must be in (0, 1), got 1.0"),
        (X, {"coverage": "0.9"}, "coverage must be in (0, 1), got '0.9'"),
        (LABELLED, {"risk": 0.1, "delta": 2}, "delta must be in (0, 1), got 2"),
        (X, {"coverage": 0.9, "score": "softmx"}, "no score 'softmx'; did you mean 'softmax'?"),
        (X, {"coverage": 0.9, "follow": 1}, "follow must be True or False, got 1"),
        (
            LABELLED,
            {"risk": 0.1, "follow": True},
            "nothing shows how often answers are wrong, so no threshold can follow it",
        ),
        ([], {"coverage": 0.9}, "data must hold at least one batch, got none"),
        (X, {"risk": 0.1}, "data must be batches (x, y) with y (B,) the integer labels"),
        (
            [(X[0], torch.full((12,), 7))],
            {"risk": 0.1},
            "labels must be from 0 to 4, the classes of the model, or -1 for",
        ),
        ([(X[0], torch.full((12,), -2))], {"risk": 0.1}, "or -1 for an outlier, got -2"),
        ([(X[0], torch.zeros(11, dtype=torch.int64))], {"risk": 0.1}, "each of the 12 samples of the batch, got 11"),
        (X[:1], {"coverage": 0.99}, "coverage=0.99 needs at least 99 calibration samples, got 12"),
        (LABELLED[:2], {"risk": 0.05}, "risk=0.05 with delta=0.1 needs at least 59 labelled calibration samples"),
        (
            [x * math.nan for x in X],
            {"coverage": 0.9},
            "must be finite and not absurdly large, got 12 of 12 that are not",
        ),
    ],
)
def test_calibration_that_is_refused(data, how, message):
    classifier = made()
    with pytest.raises(come.ComeError) as error:
        classifier.calibrate(data, **how)
    assert message in str(error.value)
    assert classifier.promise is None
    assert classifier.step(X[0]).abstain is None


def test_the_number_of_samples_that_is_named_is_the_smallest():
    """ln(delta) / ln(1 - risk) right answers, after a quarter has chosen the sequence."""
    none = torch.zeros(59, dtype=torch.bool)
    assert risk_threshold(torch.rand(59), none, 0.05, 0.1) == -math.inf
    with pytest.raises(come.InputError, match="at least 59"):
        risk_threshold(torch.rand(58), none[:58], 0.05, 0.1)
    coverage_threshold(torch.rand(99), 0.99)


def test_a_risk_out_of_reach_names_the_smallest_that_can_be_promised():
    generator = torch.Generator().manual_seed(0)
    score, wrong = torch.rand(300, generator=generator), torch.rand(300, generator=generator) < 0.3
    with pytest.raises(come.InputError, match="risk must be at least") as error:
        risk_threshold(score, wrong, 0.05, 0.1)
    least = float(str(error.value).split("risk must be at least ")[1].split()[0])
    assert 0.2 < least < 0.5
    risk_threshold(score, wrong, least, 0.1)


def test_abstaining_needs_a_calibration():
    with pytest.raises(come.ConfigError, match=r"calibrate\(\) first"):
        made().abstains(torch.zeros(2, 5))
    with pytest.raises(come.ConfigError, match=r"calibrate\(\) first"):
        come.Fleet(TinyClassifier(NORMS["layer"]), streams=["a"]).abstains(torch.zeros(2, 5), "a")


def test_promises_in_words():
    text = str(Promise("softmax", 0.25, samples=10, answered=0.9, coverage=0.8, rate=0.1))
    assert (
        text
        == "at least 80% of the samples are answered: answers where softmax >= 0.25, 90.0% of 10 samples, following the stream"
    )


def test_the_benchmark_of_the_page_runs(monkeypatch, capsys):
    script = Path(__file__).parents[1] / "benchmarks" / "abstain.py"
    options = ["--data", "fashion:240", "--corruptions", "contrast", "--severities", "5", "--risks", "0.1,0.001"]
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        logging.disable(logging.NOTSET)  # the script logs nothing
    out = capsys.readouterr().out
    assert "risk=0.001 with delta=0.1 needs at least" in out
    assert "Risk, promised 10.0" in out
    assert "| severity 5, outliers | " in out
    assert "| tent + come, belief | " in out


def test_what_the_page_says():
    page = (Path(__file__).parents[1] / "docs" / "abstain.md").read_text()
    for samples, percent in re.findall(r"(\d+)(?: samples)? for (\d)%", page):
        risk, samples = int(percent) / 100, int(samples)
        none = torch.zeros(samples, dtype=torch.bool)
        assert risk_threshold(torch.rand(samples), none, risk, 0.1) == -math.inf
        with pytest.raises(come.InputError, match=f"at least {samples}"):
            risk_threshold(torch.rand(samples - 1), none[1:], risk, 0.1)

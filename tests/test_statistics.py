"""Verdicts: against exact tests, against repetition by hand, and against the truth in a simulation."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import false_discovery_control

import come
from come.bench import statistics
from come.bench.folder import RunFolder
from come.bench.statistics import (
    Verdict,
    corrected,
    judge,
    resampled_fpr,
    samples,
    verdicts,
)
from come.metrics import fpr

sys.path.append(str(Path(__file__).parent / "harness"))
from made_up import add, rows_of

# ---- the paper's FPR with weights ----


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_the_weighted_fpr_is_that_of_repeated_samples(data):
    n = data.draw(st.integers(1, 40))
    confidence = np.array(data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))) / 12
    correct = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    weights = np.array(data.draw(st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1, max_size=3)))
    weights = np.concatenate([np.ones((1, n), int), weights])
    found = resampled_fpr(confidence, correct, weights)
    for row, value in zip(weights, found, strict=True):
        again = np.repeat(np.arange(n), row)
        assert value == fpr(torch.from_numpy(confidence[again]), torch.from_numpy(correct[again]))


def test_an_estimate_begins_with_the_metric_itself(tmp_path):
    record = add(RunFolder(tmp_path), "tent", "em", ("fog", "snow"), samples_outside=30)
    found = samples(RunFolder(tmp_path), record)
    for domain, metrics in record.result.metrics.items():
        assert found[domain].estimates["accuracy"][0] == pytest.approx(metrics["accuracy"], abs=1e-12)
        assert found[domain].estimates["fpr"][0] == metrics["fpr"]
        assert len(found[domain].estimates["fpr"]) == 1 + statistics.RESAMPLES


def test_memory_is_bounded_by_chunks(monkeypatch):
    rows = rows_of(0.6, size=500)
    whole = statistics._sample(rows, "confidence", "")
    monkeypatch.setattr(statistics, "AT_ONCE", 1500)
    parts = statistics._sample(rows, "confidence", "")
    assert whole.estimates.keys() == {"accuracy", "fpr", "fpr_softmax"}
    for metric in whole.estimates:
        assert np.array_equal(whole.estimates[metric], parts.estimates[metric])


# ---- intervals ----


def population(n, draw, shift):
    """Two runs on two domains: images keep their difficulty, so domains and runs are correlated."""
    hard, runs = draw.normal(size=n), ([], [])
    for domain in range(2):
        for k, run in enumerate(runs):
            margin = 0.5 + 0.4 * domain + shift * k - hard + draw.normal(size=n)
            confidence = 1 / (1 + np.exp(-np.abs(margin) * (1 + 0.3 * k) - 0.5 * draw.normal(size=n)))
            run.append((margin > 0, confidence.round(3)))
    return runs


def as_sample(right, confidence):
    n = len(right)
    rows = {
        "label": torch.zeros(n, dtype=torch.int32), "prediction": torch.from_numpy(~right).int(),
        "confidence": torch.from_numpy(confidence), "softmax": torch.from_numpy(confidence),
        "index": torch.arange(n, dtype=torch.int32), "kind": torch.zeros(n, dtype=torch.int16),
    }  # fmt: skip
    return statistics._sample(rows, "confidence", "")


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_intervals_cover_the_truth(shift):
    draw = np.random.default_rng(1)
    large = population(200_000, draw, shift)
    means = [
        [
            np.mean([right.mean() for right, _ in run]),
            np.mean([fpr(torch.from_numpy(c), torch.from_numpy(r)) for r, c in run]),
        ]
        for run in large
    ]
    truth = 100 * (np.array(means[1]) - np.array(means[0])) * (1, -1)  # less FPR is better
    hits, called = np.zeros(2), np.zeros(2)
    for _ in range(300):
        first, second = ([as_sample(*part) for part in run] for run in population(300, draw, shift))
        for i, metric in enumerate(("accuracy", "fpr")):
            verdict = judge(metric, {0: list(zip(first, second, strict=True))})
            hits[i] += verdict.low <= truth[i] <= verdict.high
            called[i] += verdict.found
    assert all(0.91 <= share <= 0.98 for share in hits / 300)
    if not shift:
        assert called[0] / 300 < 0.09  # no difference in accuracy: seldom called one
    else:
        assert called[0] / 300 > 0.8


@pytest.mark.parametrize("only", [2, 3, 10, 30])
def test_few_samples_are_judged_as_by_the_exact_test(only):
    """Samples that only the second run has right; McNemar's p is 2 * 0.5 ** only."""
    right = np.arange(100) < 50
    better = right | ((np.arange(100) >= 50) & (np.arange(100) < 50 + only))
    first, second = (as_sample(r, np.linspace(0, 1, 100)) for r in (right, better))
    p = judge("accuracy", {0: [(first, second)]}).p
    exact = 2 * 0.5**only
    assert (p < 0.05) == (exact < 0.05)
    assert p == pytest.approx(exact, rel=0.6, abs=0.01)


def test_the_same_images_in_more_domains_are_not_more_images():
    draw = np.random.default_rng(0)
    (first, _), (second, _) = population(400, draw, 0.1)
    one = judge("accuracy", {0: [(as_sample(*first), as_sample(*second))]})
    four = judge("accuracy", {0: [(as_sample(*first), as_sample(*second))] * 4})
    assert four.error == pytest.approx(one.error, rel=0.02)
    assert judge("accuracy", {s: [(as_sample(*first), as_sample(*second))] for s in range(3)}).error == pytest.approx(
        one.error, rel=0.02
    )


# ---- claims ----


def verdict(*by_seed, error=1.0, metric="accuracy", p=0.001):
    return Verdict(metric, 50.0, 50.0 + np.mean(by_seed), error, p, by_seed)


def test_a_claim_needs_images_and_seeds():
    assert verdict(3.0).claim == "better"
    assert verdict(3.0, p=0.2).claim == "no difference found"
    assert verdict(5.0, 4.0).claim == "better"
    assert verdict(5.0, -1.0).claim == "no difference found"  # not one sign
    assert verdict(5.0, 0.0).claim == "no difference found"
    assert verdict(9.0, 0.1).claim == "better"  # 4.6 against an error of 4.45
    assert verdict(9.0, 0.1, 4.0).claim == "no difference found"  # a t interval with three
    assert verdict(3.0, 3.5, 4.0).claim == "better"
    assert verdict(5.0, -1.0).words == "no difference found: the seeds do not agree"


def test_higher_is_better_or_worse_by_the_metric():
    assert (verdict(3.0).change, verdict(-3.0).change) == ("better", "worse")
    assert (verdict(3.0, metric="fpr").change, verdict(-3.0, metric="fpr").change) == ("worse", "better")
    assert verdict(3.0, p=0.5).change == "same"


def test_one_seed_is_one_stream():
    assert verdict(3.0).words == "better on this stream"
    assert verdict(3.0, 3.1).words == "better with all 2 seeds"


def test_the_difference_is_that_of_the_printed_numbers():
    assert Verdict("fpr", 40.26, 39.94).points == "+0.4"
    assert Verdict("accuracy", 39.94, 40.26).points == "+0.4"
    assert Verdict("fpr", 40.04, 39.96).points == "+0.0"


def test_many_questions_are_corrected_together():
    p = [0.001, 0.02, 0.04, 0.6]
    found = corrected({i: verdict(3.0, p=value) for i, value in enumerate(p)} | {"x": Verdict("fpr", reason="no")})
    assert [found[i].p for i in range(4)] == pytest.approx(false_discovery_control(p).tolist())
    assert found["x"].reason == "no"
    assert [found[i].found for i in range(4)] == [True, True, False, False]
    assert corrected({}) == {}


# ---- of a run ----


def test_verdicts_of_a_run(tmp_path):
    folder = RunFolder(tmp_path)
    for domain in ("fog", "snow"):
        add(folder, "source", "em", (domain,))
        for objective, right in (("em", 0.4), ("come", 0.9), ("come:tau=2", 0.4)):
            add(folder, "tent", objective, (domain,), right=right)
    judged = verdicts(folder, folder.records())
    found = judged.changes
    assert {key[:2] for key in found} == {("tent", "come"), ("tent", "come:tau=2")}
    assert {key[2] for key in found} == {"fog", "snow", "average"}
    average = found["tent", "come", "average", "accuracy"]
    assert (average.claim, average.change, average.by_seed) == ("better", "better", (average.gain,))
    assert average.low < average.gain < average.high
    assert found["tent", "come:tau=2", "fog", "accuracy"].claim == "no difference found"
    assert judged == verdicts(folder, folder.records())


def test_gains_are_over_the_source(tmp_path):
    folder = RunFolder(tmp_path)
    for domain in ("fog", "snow"):
        add(folder, "source", "em", (domain,), right=0.5)
        for method, objective, right in (
            ("tent", "em", 0.4), ("tent", "come", 0.9), ("tent:bare", "em", 0.1), ("tent:bare", "come", 0.1),
            ("eata", "em", 0.4), ("eata", "come", 0.5), ("steady", "invariant", 0.6),
        ):  # fmt: skip
            add(folder, method, objective, (domain,), right=right)
    judged = verdicts(folder, folder.records())
    gain = judged.gains["steady", "invariant", "average", "accuracy"]
    assert (gain.gain, gain.change) == (gain.after - gain.before, "better")
    assert judged.gains["tent", "em", "fog", "accuracy"].change == "worse"
    assert judged.over == ["tent", "eata"]  # a variant counts for itself, and so does what has one objective
    for objective, verdict in judged.compared.items():
        alone = [judged.gains[method, objective, "average", "accuracy"].gain for method in judged.over]
        assert verdict.gain == pytest.approx(sum(alone) / 2)
    assert list(judged.compared) == ["em", "come"]
    assert not verdicts(folder, [r for r in folder.records() if r.cell.method != "source"]).gains


def test_an_interval_stays_within_what_is_possible(tmp_path):
    folder = RunFolder(tmp_path)
    for objective in ("em", "come"):
        add(folder, "tent", objective, right=1.0)  # nothing is wrong, so nothing is known of the FPR
    verdict = verdicts(folder, folder.records()).changes["tent", "come", "fog", "fpr"]
    assert (verdict.low, verdict.high, verdict.found) == (-100.0, 100.0, False)


def test_streams_of_different_length_or_samples_are_not_compared(tmp_path):
    folder = RunFolder(tmp_path)
    add(folder, "tent", "em", ("fog",))
    add(folder, "tent", "em", ("snow",))
    add(folder, "tent", "come", ("fog",), rows=rows_of(0.6, size=150))
    other = rows_of(0.6)
    other["index"] = other["index"] + 1
    add(folder, "tent", "come", ("snow",), rows=other)
    found = verdicts(folder, folder.records()).changes
    reasons = {domain: found["tent", "come", domain, "fpr"].reason for domain in ("fog", "snow", "average")}
    assert reasons["fog"] == "streams of 200 and 150 samples are not compared"
    assert reasons["snow"] == "the two streams hold different samples"
    assert reasons["average"] in reasons["fog"] + reasons["snow"]
    assert found["tent", "come", "fog", "accuracy"].words == f"not comparable: {reasons['fog']}"


def test_the_order_of_the_rows_does_not_matter(tmp_path):
    folder, rows = RunFolder(tmp_path), rows_of(0.6, outliers=20)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    one = add(folder, "tent", "em", rows=rows, outliers="far")
    two = add(folder, "tent", "come", rows={name: column[order] for name, column in rows.items()}, outliers="far")
    a, b = samples(folder, one)["fog"], samples(folder, two)["fog"]
    assert a.digest == b.digest
    assert np.array_equal(a.estimates["accuracy"], b.estimates["accuracy"])


def test_a_stream_of_outliers_has_no_accuracy(tmp_path):
    folder = RunFolder(tmp_path)
    for objective in ("em", "come"):
        add(folder, "tent", objective, samples_outside=200)
    found = verdicts(folder, folder.records()).changes
    assert {key[3] for key in found} == {"fpr", "fpr_softmax"}


def test_a_score_that_nobody_knows_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    for objective in ("em", "come"):
        add(folder, "tent", objective, score="luck")
    with pytest.raises(come.ConfigError, match="no score 'luck'"):
        verdicts(folder, folder.records())


# ---- McNemar ----

close = {"rel": 1e-12, "abs": 1e-12}
YES, NOTHING = torch.tensor([True, True, True]), torch.zeros(0, dtype=torch.bool)


def test_what_is_not_comparable_claims_nothing():
    assert replace(verdict(1.0), reason="x").claim == "not comparable"

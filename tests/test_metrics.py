"""Metrics against recorded values of the published code, against scikit-learn, and against counting by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sklearn.metrics import (
    auc,
    average_precision_score,
    det_curve,
    log_loss,
    precision_recall_curve,
    roc_auc_score,
    roc_curve,
)

import come
from come import metrics
from come.metrics import (
    PROBABILITIES,
    SCORES,
    abstention_accuracy,
    accuracy,
    aupr,
    aurc,
    auroc,
    brier,
    dominant_share,
    ece,
    fpr,
    fpr95,
    labelled_mean,
    nll,
    risk_by_coverage,
    selective,
    summary,
    trajectory,
    uniform_cross_entropy,
)

RECORDED = json.loads((Path(__file__).parent / "metrics.json").read_text())
LOSS_TABLE = Path(__file__).parent / "conformance" / "data" / "cases" / "loss_table.safetensors"
close = {"rel": 1e-12, "abs": 1e-12}

YES, NO = torch.tensor([True, True, True]), torch.tensor([False, False, False])
NOTHING = torch.zeros(0, dtype=torch.bool)


def recorded(name):
    right, wrong = RECORDED[name]["in_scores"], RECORDED[name]["out_scores"]
    confidence = -torch.tensor(right + wrong, dtype=torch.float64)
    return confidence, torch.tensor([True] * len(right) + [False] * len(wrong))


@pytest.mark.parametrize("name", RECORDED)
def test_as_recorded(name):
    confidence, correct = recorded(name)
    assert fpr(confidence, correct) == pytest.approx(RECORDED[name]["fpr"], abs=1e-12)
    assert auroc(confidence, correct) == pytest.approx(RECORDED[name]["auroc"], abs=1e-12)
    # The published area has the wrong samples as positives and straight lines between the points.
    area = aupr(-confidence, ~correct, interpolation="trapezoid")
    assert area == pytest.approx(RECORDED[name]["aupr"], abs=1e-12)


def test_scores_of_the_loss_table():
    table = load_file(LOSS_TABLE)
    z = table["logits"].double()
    # "score_": the larger, the less confident. The published "entropy" is the mean logit less the logsumexp.
    torch.testing.assert_close(-z.logsumexp(dim=1), table["score_energy"].double(), rtol=0, atol=2e-4)
    torch.testing.assert_close(-uniform_cross_entropy(z), table["score_entropy"].double(), rtol=0, atol=2e-4)
    torch.testing.assert_close(uniform_cross_entropy(z), z.logsumexp(dim=1) - z.mean(dim=1))
    rows = {"energy": z.logsumexp(dim=1), "entropy": table["softmax_entropy"].double()}
    assert torch.equal(SCORES["energy"](rows), rows["energy"])
    assert (SCORES["entropy"](rows) + table["score_entropy"]).abs().max() > 1  # the two are different things


values = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]) | st.floats(0, 1), min_size=1, max_size=60)


@given(values, values)
@settings(deadline=None, max_examples=300)
def test_against_scikit_learn(high, low):
    positive = np.r_[np.ones(len(high)), np.zeros(len(low))].astype(bool)
    score = np.r_[high, low]
    confidence, flag = torch.from_numpy(score), torch.from_numpy(positive)

    alarms, missed, _ = det_curve(~positive, -score)
    nearest = np.argmin(np.abs(alarms - (1 - 0.95)))
    assert fpr(confidence, flag) == pytest.approx(1.0 if alarms[nearest] > 0.1 else missed[nearest], **close)

    false, true, _ = roc_curve(positive, score, drop_intermediate=False)
    assert fpr95(confidence, flag) == pytest.approx(false[np.argmax(true >= 0.95)], **close)
    false, true, _ = roc_curve(~positive, -score, drop_intermediate=False)  # the other way round
    assert fpr95(-confidence, ~flag) == pytest.approx(false[np.argmax(true >= 0.95)], **close)
    assert auroc(confidence, flag) == pytest.approx(roc_auc_score(positive, score), **close)

    precision, recall, _ = precision_recall_curve(positive, score)
    assert aupr(confidence, flag) == pytest.approx(average_precision_score(positive, score), **close)
    assert aupr(confidence, flag, interpolation="trapezoid") == pytest.approx(auc(recall, precision), **close)


def tied(seed, n=200, levels=9):
    """Confidences of which many are equal, and flags that depend on them."""
    random = np.random.default_rng(seed)
    confidence = random.integers(0, levels + 1, n) / levels
    return confidence, random.random(n) < 0.2 + 0.6 * confidence


@pytest.mark.parametrize("seed", range(5))
def test_by_counting(seed):
    c, flag = tied(seed, levels=[2, 5, 9, 40, 1000][seed])
    confidence, positive = torch.from_numpy(c), torch.from_numpy(flag)
    above, equal = c[flag][:, None] > c[~flag], c[flag][:, None] == c[~flag]
    assert auroc(confidence, positive) == pytest.approx((above + 0.5 * equal).mean(), **close)
    thresholds = [t for t in c if (c[flag] >= t).mean() >= 0.95]
    assert fpr95(confidence, positive) == pytest.approx((c[~flag] >= max(thresholds)).mean(), **close)


@pytest.mark.parametrize("bins", [1, 4, 15])
@pytest.mark.parametrize("seed", range(5))
def test_ece_by_counting(seed, bins):
    c, correct = tied(seed, levels=12)  # with 4 bins, also on the borders between them
    expected = 0.0
    for b in range(bins):
        inside = (c > b / bins) & (c <= (b + 1) / bins) if b else c <= 1 / bins
        if inside.any():
            expected += inside.mean() * abs(correct[inside].mean() - c[inside].mean())
    assert ece(torch.from_numpy(c), torch.from_numpy(correct), bins=bins) == pytest.approx(expected, **close)


@pytest.mark.parametrize("seed", range(3))
def test_ece_of_equal_numbers(seed):
    random = np.random.default_rng(seed)
    c, correct = random.random(120), random.random(120) < 0.5
    parts = np.split(np.argsort(c), 8)
    expected = np.mean([abs(correct[part].mean() - c[part].mean()) for part in parts])
    found = ece(torch.from_numpy(c), torch.from_numpy(correct), bins=8, adaptive=True)
    assert found == pytest.approx(expected, **close)
    c = np.full(120, 0.75)  # equal confidences are not taken apart, so the order of the samples does not matter
    found = ece(torch.from_numpy(c), torch.from_numpy(correct), bins=8, adaptive=True)
    assert found == pytest.approx(abs(correct.mean() - 0.75), **close)


def test_ece_needs_a_probability():
    with pytest.raises(come.InputError, match=r"must be in \[0, 1\], .* got 0.5 to 7"):
        ece(torch.tensor([0.5, 7.0]), torch.tensor([True, False]))
    assert ece(torch.tensor([1.0000001]), torch.tensor([True])) == 0.0
    with pytest.raises(come.ConfigError, match="bins must be an integer >= 1, got 0"):
        ece(torch.ones(1), torch.tensor([True]), bins=0)


def test_aurc_is_the_mean_over_all_orders_of_equal_confidences():
    c = np.array([0.9, 0.9, 0.9, 0.5, 0.5, 0.2, 0.2])
    wrong = np.array([1, 0, 0, 1, 0, 1, 1])
    orders = [
        [*first, *second, *third]
        for first in itertools.permutations([0, 1, 2])
        for second in itertools.permutations([3, 4])
        for third in itertools.permutations([5, 6])
    ]
    risks = np.mean([np.cumsum(wrong[order]) / np.arange(1, 8) for order in orders], axis=0)
    shuffle = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    confidence, correct = torch.from_numpy(c)[shuffle], torch.from_numpy(wrong == 0)[shuffle]
    assert aurc(confidence, correct) == pytest.approx(risks.mean(), **close)
    assert risk_by_coverage(confidence, correct).tolist() == pytest.approx(risks.tolist(), **close)
    for k in range(1, 8):
        assert abstention_accuracy(confidence, correct, k / 7) == pytest.approx(1 - risks[k - 1], **close)
    best = aurc(correct, correct)
    assert best == pytest.approx(np.mean([0, 0, 0, 1 / 4, 2 / 5, 3 / 6, 4 / 7]), **close)


@pytest.mark.parametrize("seed", range(3))
def test_aurc_by_counting(seed):
    random = np.random.default_rng(seed)
    c, correct = random.permutation(300) / 300, random.random(300) < 0.7  # no two are equal
    by_coverage = [correct[np.argsort(-c)[:k]].mean() for k in range(1, 301)]
    confidence, flag = torch.from_numpy(c), torch.from_numpy(correct)
    assert aurc(confidence, flag) == pytest.approx(1 - np.mean(by_coverage), **close)
    for coverage, k in [(0.8, 240), (1.0, 300), (0.001, 1), (0.5, 150), (0.502, 151)]:
        assert abstention_accuracy(confidence, flag, coverage) == pytest.approx(by_coverage[k - 1], **close)
    for coverage in (0.0, 1.1, -1.0):
        with pytest.raises(come.ConfigError, match=f"coverage must be .* got {coverage}"):
            abstention_accuracy(confidence, flag, coverage)


@pytest.mark.parametrize("score", SCORES)
def test_selective_accuracy_of_a_run_with_and_without_its_outliers(score):
    g = torch.Generator().manual_seed(0)
    rows = {name: torch.rand(100, generator=g) for name in (*SCORES, "uncertainty")}
    rows |= {name: torch.randint(0, 3, (100,), generator=g) for name in ("label", "prediction")}
    rows["label"][:20] = -1
    confidence, correct = SCORES[score](rows), rows["prediction"] == rows["label"]
    found = selective(rows, score=score)
    assert found == {
        "aurc": aurc(confidence, correct),
        **{f"accuracy_at_{100 * c:g}": abstention_accuracy(confidence, correct, c) for c in (0.5, 0.8, 0.9)},
    }
    inside = selective({name: value[20:] for name, value in rows.items()}, score=score)
    assert selective(rows, score=score, outliers=False) == inside
    assert inside["aurc"] < found["aurc"]
    with pytest.raises(come.ConfigError, match="no score 'mps'"):
        selective(rows, score="mps")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nll_and_brier_against_an_oracle(dtype):
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(200, 7, generator=g)).to(dtype)
    label = torch.randint(0, 7, (200,), generator=g, dtype=torch.int32)
    p = logits.double().softmax(dim=1).numpy()
    atol = 1e-12 if dtype == torch.float64 else 1e-5
    loss, score = nll(logits, label), brier(logits, label)
    assert loss.dtype == score.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert labelled_mean(loss, label) == pytest.approx(log_loss(label.numpy(), p, labels=range(7)), abs=atol)
    np.testing.assert_allclose(score, ((p - np.eye(7)[label]) ** 2).sum(axis=1), atol=atol)
    log_p = logits.double().log_softmax(dim=1)  # normalized already: nothing changes
    torch.testing.assert_close(nll(log_p, label).to(loss), loss, rtol=0, atol=1e-5)
    outliers = torch.where(torch.arange(200) % 2 == 0, -1, label)
    assert (nll(logits, outliers)[::2] == 0).all()
    assert (brier(logits, outliers)[::2] == 0).all()
    assert labelled_mean(nll(logits, outliers), outliers) == pytest.approx(loss[1::2].double().mean().item(), **close)


def test_nll_and_brier_are_never_nan():
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 0.0], [-inf, 0.0], [-inf, -inf], [inf, 0.0], [0.0, -inf], [0.0, 0.0], [nan, nan]])
    label = torch.tensor([0, 0, 0, 0, 0, 2, -1])
    assert nll(logits, label).tolist() == [100, 100, 100, 100, 0, 100, 0]
    assert brier(logits, label).tolist() == [2, 2, 2, 2, 0, 1.5, 0]
    assert nll(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert brier(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    for metric in (nll, brier):
        with pytest.raises(come.InputError, match=r"got \(2, 3\) and \(3,\)"):
            metric(torch.zeros(2, 3), torch.zeros(3))


def test_dominant_share():
    g = torch.Generator().manual_seed(0)
    prediction = torch.randint(0, 5, (97,), generator=g)
    assert dominant_share(prediction) == prediction.bincount().max().item() / 97
    assert dominant_share(torch.tensor([4])) == 1.0


METRICS = {
    "fpr": fpr,
    "fpr95": fpr95,
    "auroc": auroc,
    "aupr": aupr,
    "trapezoid": lambda c, flag: aupr(c, flag, interpolation="trapezoid"),
    "aurc": aurc,
    "abstention": lambda c, flag: abstention_accuracy(c, flag, 0.8),
    "ece": ece,
    "adaptive": lambda c, flag: ece(c, flag, adaptive=True),
}
DEGENERATE = {  # with nothing, without negatives, without positives, for equal confidences with half of them positive
    "fpr": (0.0, 0.0, 1.0, 1.0),
    "fpr95": (0.0, 0.0, 1.0, 1.0),
    "auroc": (0.5, 0.5, 0.5, 0.5),
    "aupr": (0.0, 1.0, 0.0, 0.5),
    "trapezoid": (0.0, 1.0, 0.0, 0.75),
    "aurc": (0.0, 0.0, 1.0, 0.5),
    "abstention": (1.0, 1.0, 0.0, 0.5),
    "ece": (0.0, 0.5, 0.5, 0.25),
    "adaptive": (0.0, 0.5, 0.5, 0.25),
}


@pytest.mark.parametrize("name", METRICS)
def test_degenerate_sets(name):
    metric, (nothing, positives, negatives, equal) = METRICS[name], DEGENERATE[name]
    assert metric(torch.zeros(0), NOTHING) == nothing
    some = torch.tensor([0.5, 0.3, 0.7])
    assert metric(some, YES) == pytest.approx(positives, abs=1e-7)
    assert metric(some, NO) == pytest.approx(negatives, abs=1e-7)
    assert metric(torch.full((4,), 0.75), torch.tensor([True, False, True, False])) == equal
    with pytest.raises(come.InputError, match=r"must be \(N,\), .*got confidence \(3,\) and \w+ \(1,\)"):
        metric(torch.ones(3), torch.tensor([True]))
    with pytest.raises(come.InputError, match=r"confidence \(3, 1\)"):
        metric(torch.ones(3, 1), torch.ones(3, 1, dtype=torch.bool))


@pytest.mark.parametrize("name", METRICS)
def test_the_order_of_the_samples_does_not_matter(name):
    metric = METRICS[name]
    c, flag = tied(0)
    confidence, flag = torch.from_numpy(c), torch.from_numpy(flag)
    expected = metric(confidence, flag)
    for seed in range(3):
        shuffle = torch.randperm(len(c), generator=torch.Generator().manual_seed(seed))
        assert metric(confidence[shuffle], flag[shuffle]) == pytest.approx(expected, **close)
    assert metric(confidence.float(), flag) == pytest.approx(expected, abs=1e-6)
    assert metric(confidence.clone().requires_grad_(), flag) == expected


@pytest.mark.parametrize("name", METRICS)
def test_nan_and_infinite_confidences(name):
    metric = METRICS[name]
    flag = torch.tensor([True, True, False, True, False])
    bad = torch.tensor([0.9, math.nan, 0.1, 0.8, math.nan])
    if name == "fpr":
        least = bad.where(~bad.isnan(), -math.inf)
        assert fpr(bad, flag) == fpr(least, flag)
        assert fpr(torch.full((3,), math.nan), torch.tensor([True, False, False])) == 1.0
    else:
        with pytest.raises(come.InputError, match="confidence is NaN for 2 of 5 samples; leave those samples out"):
            metric(bad, flag)
    infinite = torch.tensor([math.inf, 0.5, -math.inf, math.inf, -math.inf])
    if name in ("ece", "adaptive"):
        with pytest.raises(come.InputError, match="got -inf to inf"):
            metric(infinite, flag)
    else:
        assert metric(infinite, flag) == metric(infinite.clamp(0, 1), flag)


def test_accuracy_and_means_over_labelled_samples():
    assert accuracy(torch.tensor([1, 0]), torch.tensor([1, -1])) == 1.0
    assert accuracy(torch.tensor([1, -1]), torch.tensor([0, -1])) == 0.0
    assert math.isnan(accuracy(torch.zeros(2), torch.tensor([-1, -1])))
    assert math.isnan(accuracy(torch.zeros(0), torch.zeros(0)))
    assert math.isnan(labelled_mean(torch.ones(2), torch.tensor([-1, -1])))
    assert labelled_mean(torch.tensor([1.0, 5.0]), torch.tensor([-1, 3])) == 5.0
    assert dominant_share(torch.zeros(0, dtype=torch.int64)) == 0.0
    for metric in (accuracy, labelled_mean):
        with pytest.raises(come.InputError, match=r"\w+ \(2,\) and \w+ \(3,\)"):
            metric(torch.ones(2), torch.ones(3))
    with pytest.raises(come.InputError, match=r"prediction \(2, 2\)"):
        dominant_share(torch.ones(2, 2))
    assert auroc(torch.tensor([3, 2, 1]), torch.tensor([1, 1, 0])) == 1.0  # whole numbers will do
    with pytest.raises(come.ConfigError, match=r"interpolation must be .* got 'linear'"):
        aupr(torch.ones(3), YES, interpolation="linear")
    with pytest.raises(come.ConfigError, match=r"accept must be .* got 0"):
        fpr95(torch.ones(3), YES, accept=0)


def some_rows(n=300, outliers=100, seed=0, classes=10):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=g)
    label = torch.where(
        torch.rand(n, generator=g) < 0.5, logits.argmax(dim=1), torch.randint(0, classes, (n,), generator=g)
    )
    label[torch.randperm(n, generator=g)[:outliers]] = -1
    p = logits.softmax(dim=1)
    return {
        "index": torch.arange(n, dtype=torch.int32),
        "label": label.to(torch.int32),
        "prediction": logits.argmax(dim=1).to(torch.int32),
        "confidence": logits.exp().amax(dim=1) / (logits.exp().sum(dim=1) + classes),
        "softmax": p.amax(dim=1),
        "belief": logits.exp().amax(dim=1) / (logits.exp().sum(dim=1) + classes),
        "uncertainty": classes / (logits.exp().sum(dim=1) + classes),
        "entropy": -(p * p.log()).sum(dim=1),
        "energy": logits.logsumexp(dim=1),
        "norm": logits.norm(dim=1),
        "used": torch.rand(n, generator=g) < 0.3,
        "domain": torch.zeros(n, dtype=torch.int16),
        "nll": nll(logits, label),
        "brier": brier(logits, label),
    }


COUNTS = {"samples", "outliers"}
ALWAYS = {"fpr", "aurc", "accuracy_at_80", "dominant_share", "used"}
LABELLED = {"accuracy", "brier", "nll", "ece"}
OUTLIERS = {"auroc_outlier", "aupr_in", "aupr_out", "fpr95"}


@pytest.mark.parametrize("score", SCORES)
def test_summary(score):
    rows = some_rows()
    found = summary(rows, score=score)
    expected = COUNTS | ALWAYS | LABELLED | OUTLIERS | {"auroc_correct"}
    assert set(found) == (expected if score in PROBABILITIES else expected - {"ece"})
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    label, prediction, confidence = rows["label"], rows["prediction"], SCORES[score](rows)
    inlier, correct = label >= 0, prediction == label
    assert (found["samples"], found["outliers"]) == (300, 100)
    assert found["accuracy"] == accuracy(prediction, label) == correct[inlier].double().mean()
    assert found["fpr"] == fpr(confidence, correct)
    assert found["auroc_correct"] == pytest.approx(roc_auc_score(correct, confidence), **close)
    assert found["auroc_outlier"] == pytest.approx(roc_auc_score(inlier, confidence), **close)
    assert found["aupr_in"] == pytest.approx(average_precision_score(inlier, confidence), **close)
    assert found["aupr_out"] == pytest.approx(average_precision_score(~inlier, -confidence), **close)
    assert found["nll"] == pytest.approx(rows["nll"][inlier].mean().item(), rel=1e-6)
    assert found["used"] == rows["used"].double().mean()
    assert found["aurc"] == aurc(confidence, correct)
    assert found["accuracy_at_80"] == abstention_accuracy(confidence, correct, 0.8)
    assert found["fpr95"] == fpr95(confidence, inlier)


def test_summary_leaves_out_what_the_data_do_not_define():
    empty = {"samples": 0.0, "outliers": 0.0}
    assert summary({}) == summary({name: column[:0] for name, column in some_rows().items()}) == empty

    assert set(summary(some_rows(outliers=0))) == COUNTS | ALWAYS | LABELLED | {"auroc_correct"}
    nothing_labelled = summary(some_rows(outliers=300))
    assert set(nothing_labelled) == COUNTS | ALWAYS
    assert (nothing_labelled["fpr"], nothing_labelled["aurc"], nothing_labelled["accuracy_at_80"]) == (1.0, 1.0, 0.0)

    rows = some_rows(outliers=0)
    all_right = summary({**rows, "label": rows["prediction"]})
    assert set(all_right) == COUNTS | ALWAYS | LABELLED
    assert (all_right["accuracy"], all_right["fpr"], all_right["aurc"]) == (1.0, 0.0, 0.0)
    all_wrong = summary({**rows, "label": rows["prediction"] + 1})
    assert set(all_wrong) == COUNTS | ALWAYS | LABELLED
    one = summary({name: column[:1] for name, column in some_rows().items()})
    assert all(math.isfinite(value) for value in one.values())

    few = ("label", "prediction", "confidence")
    assert not {"used", "brier", "nll"} & set(summary({name: rows[name] for name in few}))
    constant = summary({**some_rows(), "confidence": torch.full((300,), 0.5)})
    assert (constant["auroc_outlier"], constant["auroc_correct"], constant["fpr95"], constant["fpr"]) == (
        0.5,
        0.5,
        1,
        1,
    )


def test_summary_refuses():
    rows = some_rows()
    with pytest.raises(come.ConfigError, match="no score 'engery'; did you mean 'energy'"):
        summary(rows, score="engery")
    with pytest.raises(come.InputError, match=r"label \(300,\) and prediction \(7,\) and confidence"):
        summary({**rows, "prediction": torch.zeros(7)})
    with pytest.raises(come.InputError, match="NaN for 300 of 300"):
        summary({**rows, "confidence": torch.full((300,), math.nan)})


@pytest.mark.parametrize(("n", "batch_size"), [(1, 64), (64, 64), (65, 64), (700, 64), (1000, 1), (1001, 3), (99, 1)])
def test_trajectory(n, batch_size):
    rows = some_rows(n, outliers=n // 3)
    found = trajectory(rows, batch_size=batch_size)
    samples = found["samples"].tolist()
    assert samples[-1] == n
    assert len(samples) <= metrics.POINTS
    assert all(end % batch_size == 0 for end in samples[:-1])
    assert all(column.shape == (len(samples),) and not column.isnan().any() for column in found.values())
    assert all(column.dtype == torch.float64 for name, column in found.items() if name != "samples")
    label, prediction = rows["label"], rows["prediction"]
    for i, (begin, end) in enumerate(itertools.pairwise([0, *samples])):
        if (label[:end] >= 0).any():
            assert found["accuracy"][i] == accuracy(prediction[:end], label[:end])
        assert found["fpr"][i] == fpr(rows["confidence"][:end], (prediction == label)[:end])
        assert found["dominant_share"][i] == dominant_share(prediction[begin:end])
        for name in ("confidence", "entropy", "uncertainty", "norm"):
            assert found[name][i].item() == pytest.approx(rows[name][begin:end].double().mean().item(), **close)


def test_trajectory_with_a_window():
    rows = some_rows(50, outliers=0)
    rows["label"][:20] = -1
    found = trajectory(rows, batch_size=10, window=15)
    assert found["samples"].tolist() == [10, 20, 30, 40, 50]
    assert found["accuracy"][:2].tolist() == [0.0, 0.0]  # nothing labelled so far
    for i, end in enumerate([10, 20, 30, 40, 50]):
        recent = rows["norm"][max(0, end - 15) : end].double()
        assert found["norm"][i].item() == pytest.approx(recent.mean().item(), **close)
        assert found["dominant_share"][i] == dominant_share(rows["prediction"][max(0, end - 15) : end])


def test_trajectory_of_nothing_and_of_bad_rows():
    rows = some_rows(40)
    names = ["samples", "accuracy", "fpr", "confidence", "entropy", "uncertainty", "norm", "dominant_share"]
    for empty in ({}, {name: column[:0] for name, column in rows.items()}):
        found = trajectory(empty)
        assert list(found) == names
        assert all(column.shape == (0,) for column in found.values())
    with pytest.raises(come.InputError, match="norm is NaN for 1 of 40 samples"):
        trajectory({**rows, "norm": torch.tensor([math.nan] + [1.0] * 39)})
    with pytest.raises(come.InputError, match=r"entropy \(1,\)"):
        trajectory({**rows, "entropy": torch.ones(1)})
    with pytest.raises(come.ConfigError, match="batch_size must be an integer >= 1, got 0"):
        trajectory(rows, batch_size=0)
    with pytest.raises(come.ConfigError, match="window must be an integer >= 1, or None, got 0"):
        trajectory(rows, window=0)

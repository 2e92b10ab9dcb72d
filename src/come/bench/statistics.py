"""Is a difference between two runs of the same samples more than chance? One answer for tables, reports and comparisons.

**Which samples.** Accuracy and FPR are estimated again on resampled images: every image is drawn 0, 1, 2, ... times (Poisson
bootstrap), the same number of times in both runs, in all domains and with all seeds, for it is one image. The spread of the
difference over these resamples is its standard error; it gives a normal interval and p-value.

**Which order.** Other seeds are other orders of the stream. With several of them, a difference must have the same sign for each
and exceed its standard error over seeds; from three seeds on, a t interval over them must exclude 0. With one seed, a
difference holds for this stream, and the words say so.

Streams of different samples are not compared.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, sqrt
from statistics import NormalDist, fmean, stdev
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from come.bench.cell import Cell
from come.bench.folder import RunFolder
from come.bench.record import PICTURES, Record, Rows
from come.errors import unknown
from come.metrics import SCORES, miou, pixel_accuracy

METRICS = {"miou": "mIoU", "accuracy": "accuracy", "fpr": "FPR", "fpr_softmax": "FPR by softmax"}
"""What verdicts are about, and what it is called.

By the published convention the FPR of EM is by softmax and that of COME by belief, so a part of their difference is the
score's. `fpr_softmax` has one score for both: the one that EM and the source are published with, so that only COME's number
changes.
Records under a score that was asked for, see `RunFolder.rescored`, have the one FPR.
"""


def metrics_of(cell: Cell) -> tuple[str, ...]:
    """Those of `METRICS` that the verdicts of a cell are about."""
    return tuple(name for name in METRICS if name == "accuracy" or (name == "miou") is cell.dense)


def called(metric: str, score: str = "confidence") -> str:
    """What a metric of records under a score is called.

    >>> called("fpr"), called("fpr", "belief"), called("fpr_softmax")
    ('FPR', 'FPR by belief', 'FPR by softmax')
    """
    return METRICS[metric] + f" by {score}" * (metric == "fpr" and score != "confidence")


LEVEL = 0.05
REACH = NormalDist().inv_cdf(1 - LEVEL / 2)  # standard errors from the middle of an interval to its end

RESAMPLES = 300
BLOCK = 1024  # images whose weights are drawn together

LARGEST = 2**18  # images with weights of their own; of larger sets some share theirs, which leaves the error as it is

AT_ONCE = 2**22  # weights that are looked at together: what bounds the memory

AVERAGE = "average"  # stands in the place of a domain where a number is the mean over all of them

ONE_SEED = "One seed: other orders of the stream may give another result; run more seeds."

Claim = Literal["better", "worse", "no difference found", "not comparable"]
Floats = npt.NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Verdict:
    """What the second of two runs changes; numbers in percent, gains in points."""

    metric: str
    before: float = 0.0
    after: float = 0.0
    error: float = 0.0  # standard error of the difference over images
    p: float = 1.0  # two-sided, of the difference over images
    by_seed: tuple[float, ...] = ()  # after minus before, with each seed
    reason: str = ""  # why the runs are not comparable, if they are not

    @property
    def gain(self) -> float:
        """By how many points the second is better: positive where accuracy or mIoU rose, or FPR fell."""
        return (self.after - self.before) * (-1 if self.metric.startswith("fpr") else 1)

    @property
    def points(self) -> str:
        """The gain, of the numbers as they are printed, so that a reader can check it."""
        return _signed(replace(self, before=round(self.before, 1), after=round(self.after, 1)).gain)

    @property
    def low(self) -> float:
        """Lower end of the 95% interval of the gain, over images."""
        return max(-100.0, self.gain - REACH * self.error)

    @property
    def high(self) -> float:
        """Its upper end."""
        return min(100.0, self.gain + REACH * self.error)

    @property
    def interval(self) -> str:
        """Both ends: "+1.2 to +3.4"."""
        return f"{_signed(self.low)} to {_signed(self.high)}"

    @property
    def claim(self) -> Claim:
        """Better or worse, where images and seeds both say so."""
        if self.reason:
            return "not comparable"
        if self.p > LEVEL or not _seeds_agree(self.by_seed):
            return "no difference found"
        return "better" if self.gain > 0 else "worse"

    @property
    def found(self) -> bool:
        """Whether there is a difference."""
        return self.claim in ("better", "worse")

    @property
    def change(self) -> Literal["better", "worse", "same"]:
        """The claim in one word."""
        return self.claim if self.claim in ("better", "worse") else "same"

    @property
    def words(self) -> str:
        """The claim in words, with what it rests on."""
        if self.reason:
            return f"not comparable: {self.reason}"
        if not self.found:
            return self.claim + ": the seeds do not agree" * (self.p <= LEVEL)
        return f"{self.claim} {'on this stream' if len(self.by_seed) == 1 else f'with all {len(self.by_seed)} seeds'}"

    @property
    def numbers(self) -> str:
        """The interval, and the metric in both runs."""
        return f"95% interval {self.interval}; from {self.before:.1f} to {self.after:.1f}"


def _signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"


def _seeds_agree(differences: Sequence[float]) -> bool:
    """Whether all seeds have one sign, and their mean exceeds its standard error, or from three on its t interval."""
    n = len(differences)
    if n < 2:
        return True
    from scipy import stats  # takes a second to import

    limit = float(stats.t.isf(LEVEL / 2, n - 1)) if n > 2 else 1.0
    one_sign = all(d > 0 for d in differences) or all(d < 0 for d in differences)
    return one_sign and abs(fmean(differences)) > limit * stdev(differences) / sqrt(n)


@dataclass(frozen=True)
class Sample:
    """One domain of one finished cell: which samples it is of, and its metrics on the resampled images."""

    size: int
    digest: str  # of the samples: index, kind and label
    counts: Mapping[str, int]  # how many samples each metric is a share of
    estimates: Mapping[str, Floats]  # each metric as it is, and then for each of RESAMPLES


def samples(folder: RunFolder, record: Record) -> dict[str, Sample]:
    """What each domain of a finished cell gives, if it has samples."""
    score, domains = record.result.score, record.result.domains
    if score not in SCORES:
        raise unknown("score", score, SCORES)
    parts = by_domain(folder.rows(record.key), len(domains))
    if record.cell.dense:
        return {d: _dense_sample(part) for d, part in zip(domains, parts, strict=True) if part}
    return {d: _sample(part, score, record.cell.outliers or "") for d, part in zip(domains, parts, strict=True) if part}


def by_domain(rows: Rows, domains: int) -> list[Rows]:
    """The rows of each domain, in the order of the stream; nothing where there are none."""
    order = rows["domain"].argsort(stable=True)
    sizes = rows["domain"].long().bincount(minlength=domains).tolist()
    columns = {n: torch.split(column[order], sizes) for n, column in rows.items() if n not in PICTURES}
    return [{name: parts[i] for name, parts in columns.items()} if size else {} for i, size in enumerate(sizes)]


def _sample(rows: Rows, score: str, outliers: str) -> Sample:
    label, index, kind = (rows[name].numpy() for name in ("label", "index", "kind"))
    inlier = label >= 0
    right = inlier & (rows["prediction"].numpy() == label)
    by = {"fpr": score} | ({"fpr_softmax": "softmax"} if score == "confidence" else {})
    confidences = {metric: SCORES[name](rows).double().numpy() for metric, name in by.items()}
    weights, columns = _weights(index, kind < 0, outliers)
    counts = {"accuracy": int(inlier.sum())} | dict.fromkeys(by, int((~right).sum()))
    parts: dict[str, list[Floats]] = {metric: [] for metric in counts if metric in by or counts[metric]}
    step = max(1, AT_ONCE // len(label))
    for begin in range(0, len(weights), step):
        some = weights[begin : begin + step]
        for metric, confidence in confidences.items():
            parts[metric].append(resampled_fpr(confidence, right, some, columns))
        if "accuracy" in parts:  # where a resample drew nothing, that of all
            hits, all_ = (some.take(columns[of], axis=1).sum(axis=1, dtype=np.int64) for of in (right, inlier))
            parts["accuracy"].append(np.where(all_ > 0, hits / np.maximum(all_, 1), right.sum() / inlier.sum()))
    order = np.lexsort((label, index, kind))
    digest = hashlib.sha256(np.stack([kind, index, label]).astype(np.int64)[:, order].tobytes()).hexdigest()
    return Sample(len(label), digest, counts, {name: np.concatenate(part) for name, part in parts.items()})


def _dense_sample(rows: Rows) -> Sample:
    """Of images with counts of pixels: an image is drawn with all of its pixels, since these are not independent."""
    index, kind = rows["index"].numpy(), rows["kind"].numpy()
    weights, columns = _weights(index, kind < 0, "")
    counts = rows["confusion"]
    drawn = torch.from_numpy(weights.take(columns, axis=1)).double() @ counts.flatten(1).double()
    drawn = drawn.view(-1, *counts.shape[1:])
    drawn = torch.where(drawn.sum(dim=(1, 2), keepdim=True) > 0, drawn, drawn[:1])  # a resample that drew nothing
    estimates = {"miou": miou(drawn).numpy(), "accuracy": pixel_accuracy(drawn).numpy()} if drawn[0].any() else {}
    order = np.lexsort((index, kind))
    labels = counts.sum(dim=2).numpy()
    digest = hashlib.sha256(np.column_stack([kind, index, labels]).astype(np.int64)[order].tobytes()).hexdigest()
    return Sample(len(index), digest, dict.fromkeys(estimates, len(index)), estimates)


def resampled_fpr(
    confidence: Floats,
    correct: npt.NDArray[np.bool_],
    weights: npt.NDArray[np.integer],
    columns: npt.NDArray[np.integer] | None = None,
    *,
    accept: float = 0.95,
) -> Floats:
    """`come.metrics.fpr` of samples that count several times, or not at all, for many such weights at once.

    Args:
        confidence: (N,), larger is more confident.
        correct: (N,).
        weights: (R, M), how often each counts.
        columns: (N,), which of the M weights a sample has; by default M is N.
        accept: share of the right samples to accept.

    Returns:
        (R,)

    Example:
        >>> confidence, correct = np.array([0.9, 0.8, 0.3, 0.85]), np.array([True, True, False, False])
        >>> resampled_fpr(confidence, correct, np.array([[1, 1, 1, 1], [1, 1, 3, 1], [1, 0, 1, 1]]))
        array([0.5 , 0.25, 0.  ])
    """
    columns = np.arange(len(confidence)) if columns is None else columns
    order = np.argsort(confidence, kind="stable")
    right, wrong = order[correct[order]], order[~correct[order]]
    if not len(wrong) or not len(right):
        return np.asarray(weights.take(columns[wrong], axis=1).sum(axis=1) > 0, np.float64)
    value = confidence[right]
    passed, below = (np.cumsum(weights.take(columns[some], axis=1), axis=1, dtype=np.int32) for some in (right, wrong))
    last = np.flatnonzero(np.append(value[1:] != value[:-1], True))  # equal confidences pass together
    if len(last) < len(value):
        passed, value = passed.take(last, axis=1), value[last]
    value = np.append(value, inf)
    below = np.concatenate([np.zeros_like(below[:, :1]), below], axis=1)
    n_right, n_wrong = np.maximum(passed[:, -1], 1), np.maximum(below[:, -1], 1)
    row = np.arange(len(weights))

    def missed(at: npt.NDArray[np.intp]) -> Floats:
        """Share of the wrong ones that are at least as confident as the right ones at that place."""
        return np.asarray((n_wrong - below[row, np.searchsorted(confidence[wrong], value[at])]) / n_wrong)

    # The largest share of right ones below the threshold that is at most 5%, and the next one.
    reject = 1 - accept
    most = (reject * n_right).astype(np.int64)
    most += ((most + 1) / n_right <= reject).astype(np.int64) - (most / n_right > reject)  # the product is rounded
    upper = (passed <= most[:, None]).sum(axis=1).clip(max=passed.shape[1] - 1)
    low, high = np.where(upper > 0, passed[row, upper - 1], 0), passed[row, upper]
    behind = (passed <= high[:, None]).sum(axis=1)
    # The nearer one; a share above 10%, which counts as a collapsed score, is never nearer than none at all.
    second = np.abs(high / n_right - reject) <= np.abs(low / n_right - reject)
    found = np.where(passed[:, -1] > 0, np.where(second, missed(behind), missed(upper)), 1.0)
    return np.where(below[:, -1] > 0, found, 0.0)


def _weights(
    index: npt.NDArray[np.integer], outlier: npt.NDArray[np.bool_], outliers: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """How often each image counts, first once and then in each resample; and the columns of these samples in it.

    An image has the same weights wherever it occurs; one of an outlier source is another image.
    """
    place = index.astype(np.int64) % LARGEST
    blocks = [0 if not len(part) else int(part.max()) // BLOCK + 1 for part in (place[~outlier], place[outlier])]
    parts = [_block(salt, b) for salt, n in zip(("", f"outliers {outliers}"), blocks, strict=True) for b in range(n)]
    return np.concatenate(parts, axis=1), np.where(outlier, place + blocks[0] * BLOCK, place)


@lru_cache(maxsize=2 * LARGEST // BLOCK)
def _block(salt: str, number: int) -> npt.NDArray[np.uint8]:
    draw = np.random.default_rng([zlib.crc32(salt.encode()), number])
    drawn = draw.poisson(1.0, (RESAMPLES, BLOCK)).astype(np.uint8)
    return np.concatenate([np.ones((1, BLOCK), np.uint8), drawn])


def judge(metric: str, pairs: Mapping[int, Sequence[tuple[Sample, Sample]]]) -> Verdict | None:
    """The verdict on the mean over domains and seeds: `pairs` has, for each seed, the domains of the first and second run.

    None if there is nothing to compare: no seed, or a domain that does not define the metric.
    """
    from scipy import stats

    both = [pair for domains in pairs.values() for pair in domains]
    for a, b in both:
        if a.size != b.size:
            return Verdict(metric, reason=f"streams of {a.size} and {b.size} samples are not compared")
        if a.digest != b.digest:
            return Verdict(metric, reason="the two streams hold different samples")
    if not both or any(metric not in sample.estimates for pair in both for sample in pair):
        return None
    before, after = (
        [100 * np.mean([pair[i].estimates[metric] for pair in domains], axis=0) for domains in pairs.values()]
        for i in (0, 1)
    )
    by_seed = [b - a for a, b in zip(before, after, strict=True)]
    spread = float(np.std(np.mean(by_seed, axis=0)[1:], ddof=1))
    # as if each run had one sample more that it alone gets right: what a handful of samples show, resampling takes for certain
    few = sum((100 / max(1, sample.counts[metric])) ** 2 for pair in both for sample in pair) / len(both) ** 2
    error = sqrt(spread**2 + few)
    first, second = (float(np.mean([seed[0] for seed in run])) for run in (before, after))
    p = float(2 * stats.norm.sf(abs(second - first) / error))
    return Verdict(metric, first, second, error, p, tuple(float(seed[0]) for seed in by_seed))


def corrected(verdicts: Mapping[Key, Verdict]) -> dict[Key, Verdict]:
    """The verdicts with p-values for many questions at once, by Benjamini and Hochberg.

    Of the differences that are then called one, at most 5% are expected to be false.
    """
    from scipy import stats

    asked = [key for key, verdict in verdicts.items() if not verdict.reason]
    p = stats.false_discovery_control([verdicts[key].p for key in asked]) if asked else []
    return {**verdicts, **{key: replace(verdicts[key], p=float(value)) for key, value in zip(asked, p, strict=True)}}


Samples = Mapping[int, Mapping[str, Sample]]  # by seed and domain


def gathered(folder: RunFolder, records: Iterable[Record]) -> dict[int, dict[str, Sample]]:
    """The samples of all domains and seeds of one method with one objective."""
    found: dict[int, dict[str, Sample]] = {}
    for record in records:
        found.setdefault(record.cell.seed, {}).update(samples(folder, record))
    return found


def compared(first: Samples, second: Samples, domains: Sequence[str]) -> dict[tuple[str, str], Verdict]:
    """The verdicts by domain and metric, and on the average over `domains`, with the seeds that have all of them."""
    found = {}
    pairs = {seed: (first[seed], second[seed]) for seed in first if seed in second}
    for metric in METRICS:
        undefined = {d for pair in pairs.values() for run in pair for d in run if metric not in run[d].estimates}
        wanted = [domain for domain in domains if domain not in undefined]
        for name, group in (*((d, [d]) for d in domains), (AVERAGE, wanted)):
            both = {seed: (a, b) for seed, (a, b) in pairs.items() if all(d in a and d in b for d in group)}
            verdict = judge(metric, {seed: [(a[d], b[d]) for d in group] for seed, (a, b) in both.items()})
            if verdict is not None:
                found[name, metric] = verdict
    return found


Verdicts = dict[tuple[str, str, str, str], Verdict]  # by method, objective, domain (or "average") and metric


@dataclass(frozen=True)
class Judged:
    """What a run shows beyond chance."""

    changes: Verdicts = field(default_factory=dict)  # what a further objective changes against the method's first one
    gains: Verdicts = field(default_factory=dict)
    """What adaptation changes against the source; empty where that did not run."""
    compared: Mapping[str, Verdict] = field(default_factory=dict)
    """By objective: the gain in accuracy, averaged over the methods that ran with several."""
    over: Sequence[str] = ()  # these methods


def verdicts(folder: RunFolder, records: Iterable[Record]) -> Judged:
    """What each method changes against the source, and each further objective against its first, by domain and on average.

    The records are of one configuration, their rows in `folder`. The p-values of the domains are corrected for their number,
    see `corrected`; those of the averages are not.
    """
    groups: dict[str, dict[str, list[Record]]] = {}
    domains: dict[str, None] = {}
    for record in records:
        groups.setdefault(record.cell.method, {}).setdefault(record.cell.objective, []).append(record)
        domains |= dict.fromkeys(record.result.domains)
    found = {m: {o: gathered(folder, group) for o, group in by.items()} for m, by in groups.items()}
    source = next(iter(found.get("source", {}).values()), None)
    changes, gains = Verdicts(), Verdicts()
    for method, by in found.items():
        first = next(iter(by.values()))
        for objective, run in by.items():
            for judged, base in ((changes, first), (gains, source if method != "source" else None)):
                if base is not None and base is not run:
                    claims = compared(base, run, list(domains))
                    judged |= {(method, objective, *key): verdict for key, verdict in claims.items()}
    for metric in METRICS:
        for each in (changes, gains):
            each |= corrected({k: v for k, v in each.items() if k[3] == metric and k[2] != AVERAGE})
    over = [m for m, by in found.items() if len(by) > 1 and not (":" in m and m.partition(":")[0] in found)]
    together = {}
    for objective in dict.fromkeys(o for m in over for o in found[m]):
        runs = [found[method][objective] for method in over if objective in found[method]]
        if source is not None and (average := _average(source, runs, list(domains))) is not None:
            together[objective] = average
    return Judged(changes, gains, together, over)


def _average(source: Samples, runs: Sequence[Samples], domains: Sequence[str]) -> Verdict | None:
    """The gain of several runs over the source, averaged; None unless all have all domains."""
    seeds = [seed for seed in source if all(seed in run for run in runs)]
    if not all(d in run[seed] for run in (source, *runs) for seed in seeds for d in domains):
        return None
    pairs = {s: [(source[s][d], run[s][d]) for run in runs for d in domains] for s in seeds}
    return judge("miou", pairs) or judge("accuracy", pairs)

"""What a run says, in plain words: what the second objective changes, where something collapsed, what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from come.bench.report.reading import Piece
from come.bench.report.tables import (
    AVERAGE,
    METRICS,
    SUBSTANTIAL,
    by_seed,
    domains_of,
    entries,
    mean_over,
    objectives_of,
    pair_of,
)
from come.bench.store import Record

WORDS = {"em": "entropy minimization (em)", "come": "COME"}


@dataclass(frozen=True)
class Change:
    """What one objective changes against another, for one method and one metric, averaged over domains; in points."""

    method: str
    before: str
    after: str
    metric: str
    values: tuple[float, float]
    """The metric with `before` and with `after`: means over the seeds that both have."""
    spread: float | None
    """Standard deviation of the difference over seeds; None with one."""
    seeds: int

    @property
    def difference(self) -> float:
        """After minus before, of the numbers as they are printed."""
        return round(self.values[1], 1) - round(self.values[0], 1)

    @property
    def verdict(self) -> str:
        """better, worse or same: within half a point."""
        if abs(self.difference) < SUBSTANTIAL - 1e-9:
            return "same"
        return "better" if (self.difference > 0) != METRICS[self.metric].lower_is_better else "worse"

    @property
    def doubtful(self) -> bool:
        """Whether a change is no larger than its spread over seeds."""
        return self.verdict != "same" and self.spread is not None and abs(self.difference) <= self.spread

    @property
    def claim(self) -> str:
        """The verdict, or "unclear" where it is doubtful."""
        return "unclear" if self.doubtful else self.verdict

    @property
    def words(self) -> str:
        """The change as a clause: rises by 1.8 ± 0.3 points, from 36.7 to 38.5 (3 seeds)."""
        spread = "" if self.spread is None else f" ± {self.spread:.1f}"
        size = f"by {abs(self.difference):.1f}{spread} points"
        move = f"{'rises' if self.difference > 0 else 'falls'} {size}"
        if self.verdict == "same":
            move = f"hardly changes ({self.difference + 0.0:+.1f}{spread} points)"
        doubt = "; within their spread" if self.doubtful else ""
        seeds = "" if self.spread is None else f" ({self.seeds} seeds{doubt})"
        return f"{move}, from {self.values[0]:.1f} to {self.values[1]:.1f}{seeds}"


def changes(records: Sequence[Record], metric: str) -> list[Change]:
    """For each method, what each further objective changes against the first one; seeds are compared one by one."""
    domains, found = domains_of(records, metric), []
    for method, (first, *others) in objectives_of(records).items():
        before = by_seed(records, method, first)
        for objective in others:
            after = by_seed(records, method, objective)
            both = [
                (mean_over(before[s], domains, metric), mean_over(after[s], domains, metric))
                for s in before
                if s in after
            ]
            pairs = [(100 * a, 100 * b) for a, b in both if a is not None and b is not None]
            if pairs:
                spread = stdev(b - a for a, b in pairs) if len(pairs) > 1 else None
                values = fmean(a for a, _ in pairs), fmean(b for _, b in pairs)
                found.append(Change(method, first, objective, metric, values, spread, len(pairs)))
    return found


def headline(records: Sequence[Record]) -> str:
    """The finding in one or two sentences, whichever way it goes."""
    sentences = []
    pairs = dict.fromkeys((c.before, c.after) for c in changes(records, "accuracy"))
    for before, after in pairs:
        parts = []
        for metric, name in (("accuracy", "accuracy"), ("fpr", "the false positive rate")):
            chosen = [c for c in changes(records, metric) if (c.before, c.after) == (before, after)]
            parts.append(f"{name} is {_tally([c.claim for c in chosen])}")
        sentences.append(
            f"With {WORDS.get(after, after)} in place of {WORDS.get(before, before)}, {', and '.join(parts)}."
        )
    if not sentences:
        return "No method ran with two objectives on all domains, so there is nothing to compare yet."
    return " ".join(sentences)


def _tally(claims: Sequence[str]) -> str:
    """How many of each: better for 2 of 3 methods and worse for 1."""
    words = {
        "better": "better",
        "worse": "worse",
        "same": f"the same within {SUBSTANTIAL} points",
        "unclear": "within the spread of the seeds",
    }
    counts = {word: claims.count(claim) for claim, word in words.items() if claim in claims}
    total = len(claims)
    if len(counts) == 1:
        every = {1: "the one method that ran with both", 2: "both methods"}.get(total, f"all {total} methods")
        return f"{next(iter(counts))} for {every}"
    parts = [f"{word} for {n}" for word, n in counts.items()]
    parts[0] += f" of {total} methods"
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def extremes(records: Sequence[Record]) -> str:
    """The best accuracy and the lowest FPR, next to the source's."""
    numbers = {
        pair: entries(records, *pair, [(AVERAGE, "accuracy"), (AVERAGE, "fpr")]) for pair in map(pair_of, records)
    }
    several = objectives_of(records)
    names = {(m, o): m if len(several[m]) == 1 else f"{m} + {o}" for m, o in numbers}
    accuracies = {pair: a.mean for pair, (a, _) in numbers.items() if a is not None}
    rates = {pair: f.mean for pair, (_, f) in numbers.items() if f is not None}
    if not accuracies or not rates:
        return ""
    best, lowest = max(accuracies, key=lambda p: accuracies[p]), min(rates, key=lambda p: rates[p])
    text = (
        f"The highest average accuracy is that of {names[best]}, {accuracies[best]:.1f}%; the lowest average FPR that of "
        f"{names[lowest]}, {rates[lowest]:.1f}%."
    )
    source = next((pair for pair in accuracies if pair[0] == "source" and pair in rates), None)
    if source is not None:
        text += f" Without adaptation, accuracy is {accuracies[source]:.1f}% and FPR {rates[source]:.1f}%."
    return text


def collapses(pieces: Sequence[Piece]) -> list[str]:
    """Where the accuracy in the last quarter of a stream is less than half the source's there, means over seeds."""
    found = []
    for pair, domain in dict.fromkeys((piece.pair, piece.domain) for piece in pieces):
        end, source = _at_the_end(pieces, pair, domain), _at_the_end(pieces, ("source", ""), domain)
        if pair[0] != "source" and end is not None and source is not None and end < source / 2:
            found.append(f"{' + '.join(pair)} on {domain} ({100 * end:.0f}% where the source has {100 * source:.0f}%)")
    return found


def recoveries(records: Sequence[Record]) -> list[str]:
    """What the guard undid: which cells, and behind which batches."""
    found = []
    several = len({r.cell["seed"] for r in records}) > 1
    for record in records:
        batches = [str(batch) for kind, batch in record.result.get("events", ()) if kind == "recovered"]
        if batches:
            domains = record.result["domains"]
            where = domains[0] if len(domains) == 1 else f"{domains[0]} to {domains[-1]}"
            seed = f", seed {record.cell['seed']}" if several else ""
            found.append(f"{' + '.join(pair_of(record))} on {where}{seed} (after batch {', '.join(batches)})")
    return found


def _at_the_end(pieces: Iterable[Piece], pair: tuple[str, str], domain: str) -> float | None:
    """Accuracy in the last quarter of a stream, the mean over seeds; of the source with whichever objective it ran."""
    ends: list[float] = []
    for piece in pieces:
        same = piece.pair == pair or piece.method == pair[0] == "source"
        if same and piece.domain == domain:
            values = piece.stretches["accuracy"]
            ends += [float(value) for value in values[-max(1, len(values) // 4) :] if np.isfinite(value)]
    return fmean(ends) if ends else None


def missing(records: Sequence[Record]) -> Iterator[str]:
    """What the grid of these records lacks: each method and objective on each domain with each seed."""
    done = {(*pair_of(r), r.cell["seed"], domain) for r in records for domain in r.result["metrics"]}
    seeds = sorted({r.cell["seed"] for r in records})
    for method, objective in dict.fromkeys(map(pair_of, records)):
        for domain in domains_of(records):
            absent = [seed for seed in seeds if (method, objective, seed, domain) not in done]
            if absent:
                yield f"{method} + {objective} on {domain}, seed {', '.join(map(str, absent))}"

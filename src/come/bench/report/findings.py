"""The findings of a run in sentences: whether adaptation helped, what the second objective changes, what collapsed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

import numpy as np

from come.bench import settings
from come.bench.record import Failure, Record
from come.bench.report.configurations import shared
from come.bench.report.reading import Piece
from come.bench.report.tables import domains_of, entries, names_of, objectives_of, rescored_source, without_sweeps
from come.bench.statistics import AVERAGE, METRICS, ONE_SEED, Judged, Verdict, called
from come.methods import DEFAULT

SHORTER = {"em": "EM", "come": "COME"}
WORDS = {"em": "entropy minimization (em)", "come": "COME"}


def ranked(records: Sequence[Record], judged: Judged) -> dict[tuple[str, str], Verdict]:
    """By method and objective: the gain in average accuracy over the source, the largest first; no other learning rates."""
    pairs = names_of(without_sweeps(records))
    metric = records[0].cell.metric
    found = {pair: v for pair in pairs if (v := judged.gains.get((*pair, AVERAGE, metric))) and not v.reason}
    return dict(sorted(found.items(), key=lambda item: -item[1].gain))


def helped(records: Sequence[Record], judged: Judged) -> str:
    """Whether it helped: the best, the default method, and the two objectives; empty without a source."""
    found, names = ranked(records, judged), names_of(records)
    if not found:
        return ""
    best, default = next(iter(found)), next((pair for pair in found if pair[0].partition(":")[0] == DEFAULT), None)
    if default:
        names[default] += " (the default method)"
    top, domains = found[best], domains_of(records)
    reset = any(True in r.result.fresh[1:] for r in records) or settings.get(records[0].cell.setting).pieces
    if len(domains) < 2:
        where = f"On {domains[0]}," if domains else "Here"
    else:
        where = f"On the mean of {len(domains)} domains," if reset else f"Along {len(domains)} domains without a reset,"
    said = [f"{where} the unadapted model has an {METRICS[top.metric]} of {top.before:.1f}%."]
    if top.change == "better":
        said.append(f"{names[best]} gains the most: {_points(top)}.")
    else:
        said.append(f"No gain is beyond chance; the largest is that of {names[best]}: {_points(top)}.")
    if default and default != best:
        said.append(f"{names[default]} {_points(found[default])}.")
    parts = [f"{SHORTER.get(o, o)} {_points(verdict)}" for o, verdict in judged.compared.items() if not verdict.reason]
    if parts:
        *others, last = judged.over
        over = f"On the mean of {', '.join(others)} and {last}" if others else f"With {last}"
        said.append(f"{over}: {', '.join(parts)}.")
    return " ".join(said)


def _points(verdict: Verdict) -> str:
    """
    >>> _points(Verdict("accuracy", 60.0, 61.5, 0.2, 0.001)), _points(Verdict("accuracy", 60.0, 60.1, 0.2, 0.6))
    ('+1.5 points (95% interval +1.1 to +1.9)', '+0.1 points (within chance: -0.3 to +0.5)')
    """
    return f"{verdict.points} points ({'95% interval' if verdict.found else 'within chance:'} {verdict.interval})"


def changes(records: Sequence[Record], judged: Judged) -> dict[tuple[str, str, str], list[Verdict]]:
    """By method, first and further objective: the verdicts on the averages."""
    found = {}
    for method, (first, *others) in objectives_of(records).items():
        for objective in others:
            about = [judged.changes.get((method, objective, AVERAGE, metric)) for metric in METRICS]
            if any(about):
                found[method, first, objective] = [verdict for verdict in about if verdict is not None]
    return found


def by_effect(records: Sequence[Record], judged: Judged) -> list[tuple[str, str, str]]:
    """Methods with their first and further objective, by how much accuracy changes; what is within chance comes last."""
    found = {
        key: about[0] for key, about in changes(records, judged).items() if about[0].metric == records[0].cell.metric
    }
    return sorted(found, key=lambda key: (found[key].found, abs(found[key].gain)), reverse=True)


def effect(records: Sequence[Record], judged: Judged) -> str:
    """The first of `by_effect` in a sentence; empty if no method ran with two objectives."""
    for method, before, after in by_effect(records, judged)[:1]:
        verdict = judged.changes[method, after, AVERAGE, records[0].cell.metric]
        instead, what = (
            f"{SHORTER.get(after, after)} in place of {SHORTER.get(before, before)}",
            METRICS[verdict.metric],
        )
        if verdict.found:
            return (
                f"The largest change by {instead}: the {what} of {method} goes from {verdict.before:.1f}% to "
                f"{verdict.after:.1f}% ({verdict.points} points)."
            )
        if not verdict.reason:
            return f"{instead} changes no {what} beyond chance; the largest change is {verdict.points} points, with {method}."
    return ""


def outliers(records: Sequence[Record], judged: Judged) -> str:
    """How the first of `by_effect` tells outliers from the known classes, in a sentence; empty if there are none."""
    found = {}
    for pair in names_of(records):
        auroc, fpr95 = entries(records, *pair, [(AVERAGE, "auroc_outlier"), (AVERAGE, "fpr95")])
        if auroc and fpr95:
            found[pair] = f"{auroc.mean:.1f}% (FPR95 {fpr95.mean:.1f}%)"
    source = next((f"; the source has {text}" for (method, _), text in found.items() if method == "source"), "")
    for method, *both in by_effect(records, judged)[:1]:
        if all((method, o) in found for o in both):
            said = " and ".join(f"{found[method, o]} with {o}" for o in both)
            return f"Outliers: {method} has an AUROC of {said}{source}."
    return ""


def headline(records: Sequence[Record], judged: Judged) -> str:
    """What each further objective changes against the first, in a few sentences, whichever way it goes."""
    found = changes(records, judged)
    sentences = []
    for before, after in dict.fromkeys((before, after) for _, before, after in found):
        chosen = [v for (_, *pair), about in found.items() if tuple(pair) == (before, after) for v in about]
        claims = {metric: [v.claim for v in chosen if v.metric == metric] for metric in METRICS}
        parts = "; ".join(f"{called(m, records[0].result.score)} {_tally(said)}" for m, said in claims.items() if said)
        sentences.append(f"With {WORDS.get(after, after)} in place of {WORDS.get(before, before)}, {parts}.")
    if not sentences:
        return "No method ran with two objectives on all domains, so there is nothing to compare."
    if all(len(v.by_seed) < 2 for about in found.values() for v in about):
        sentences.append(ONE_SEED)
    return " ".join(sentences)


def _tally(claims: Sequence[str]) -> str:
    """How many of each.

    >>> _tally(["better", "worse", "better"]), _tally(["better"])
    ('is better for 2 of 3 methods and is worse for 1', 'is better for the one method that ran with both')
    """
    words = {
        "better": "is better",
        "worse": "is worse",
        "no difference found": "shows no clear difference",
        "not comparable": "cannot be compared",
    }
    counts = {word: claims.count(claim) for claim, word in words.items() if claim in claims}
    total = len(claims)
    if len(counts) == 1:
        every = {1: "the one method that ran with both", 2: "both methods"}.get(total, f"all {total} methods")
        return f"{next(iter(counts))} for {every}"
    first, *parts = [f"{word} for {n}" for word, n in counts.items()]
    return ", ".join([f"{first} of {total} methods", *parts[:-1]]) + " and " + parts[-1]


def extremes(records: Sequence[Record]) -> str:
    """The best accuracy and the lowest FPR, next to the source's; by COME's score too, where it stands in the table."""
    names = names_of(records)
    keys = [(AVERAGE, metric) for metric in ("accuracy", "fpr", "fpr_belief")]
    numbers = {pair: entries(records, *pair, keys) for pair in names}
    accuracies = {pair: a.mean for pair, (a, *_) in numbers.items() if a is not None}
    rates = {pair: f.mean for pair, (_, f, _) in numbers.items() if f is not None}
    if not accuracies or not rates:
        return ""
    best, lowest = max(accuracies, key=lambda p: accuracies[p]), min(rates, key=lambda p: rates[p])
    text = (
        f"The highest average accuracy is that of {names[best]}, {accuracies[best]:.1f}%; the lowest average FPR is that of "
        f"{names[lowest]}, {rates[lowest]:.1f}%."
    )
    for source in [pair for pair in accuracies if pair[0] == "source" and pair in rates][:1]:
        belief = numbers[source][2] if rescored_source(records) else None
        other = f" ({belief.mean:.1f}% by belief, the score of COME)" if belief else ""
        text += f" Without adaptation, accuracy is {accuracies[source]:.1f}% and FPR {rates[source]:.1f}%{other}."
    return text


def collapses(pieces: Sequence[Piece]) -> list[str]:
    """Where the accuracy in the last quarter of a domain is less than half the source's there, means over seeds."""
    ends: dict[tuple[str, str], list[float]] = {}
    for piece in pieces:
        values = piece.along["accuracy"]
        who = "" if piece.pair[0] == "source" else " + ".join(piece.pair)  # the source with any objective
        last = values[-max(1, len(values) // 4) :]
        ends.setdefault((who, piece.domain), []).extend(last[np.isfinite(last)].tolist())
    found = []
    for (who, domain), accuracies in ends.items():
        source = ends.get(("", domain))
        if who and source and accuracies and fmean(accuracies) < fmean(source) / 2:
            numbers = f"{100 * fmean(accuracies):.0f}% where the source has {100 * fmean(source):.0f}%"
            found.append(f"{who} on {domain} ({numbers})")
    return found


def recoveries(records: Sequence[Record]) -> list[str]:
    """What the guard undid: in which cells, and after which batches."""
    found = []
    several = len({r.cell.seed for r in records}) > 1
    for record in records:
        batches = ", ".join(str(batch) for kind, batch in record.result.events if kind == "recovered")
        if batches:
            domains = record.result.domains
            where = domains[0] if len(domains) == 1 else f"{domains[0]} to {domains[-1]}"
            seed = f", seed {record.cell.seed}" if several else ""
            found.append(f"{' + '.join(record.cell.pair)} on {where}{seed} (after batch {batches})")
    return found


def failed(failures: Iterable[Failure], records: Sequence[Record]) -> list[str]:
    """Those of the same plan, each in a line."""
    return [str(failure) for failure in failures if shared(failure) == shared(records[0])]


def missing(records: Sequence[Record]) -> Iterator[str]:
    """What the grid of these records lacks: each method and objective on each domain with each seed."""
    done = {(r.cell.pair, r.cell.seed, domain) for r in records for domain in r.result.domains}
    seeds = sorted({r.cell.seed for r in records})
    for pair in names_of(records):
        for domain in domains_of(records):
            absent = [str(seed) for seed in seeds if (pair, seed, domain) not in done]
            if absent:
                yield f"{' + '.join(pair)} on {domain}, seed {', '.join(absent)}"

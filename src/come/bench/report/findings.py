"""What a run says, in plain words: what the second objective changes, where something collapsed, what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

import numpy as np

from come.bench.record import Failure, Record
from come.bench.report.configurations import shared
from come.bench.report.reading import Piece
from come.bench.report.tables import Verdicts, domains_of, entries, names_of, objectives_of, rescored_source
from come.bench.statistics import AVERAGE, METRICS, ONE_SEED, Verdict, called

SHORTER = {"em": "EM", "come": "COME"}
WORDS = {"em": "entropy minimization (em)", "come": "COME"}


def changes(records: Sequence[Record], verdicts: Verdicts) -> dict[tuple[str, str, str], list[Verdict]]:
    """By method, first and further objective: the verdicts on the averages."""
    found = {}
    for method, (first, *others) in objectives_of(records).items():
        for objective in others:
            judged = [verdicts.get((method, objective, AVERAGE, metric)) for metric in METRICS]
            if any(judged):
                found[method, first, objective] = [verdict for verdict in judged if verdict is not None]
    return found


def by_effect(records: Sequence[Record], verdicts: Verdicts) -> list[tuple[str, str, str]]:
    """Methods with their first and further objective, by how much accuracy changes; what is within chance comes last."""
    found = {key: judged[0] for key, judged in changes(records, verdicts).items() if judged[0].metric == "accuracy"}
    return sorted(found, key=lambda key: (found[key].found, abs(found[key].difference)), reverse=True)


def effect(records: Sequence[Record], verdicts: Verdicts) -> str:
    """The first of `by_effect` in a sentence; empty if no method ran with two objectives."""
    for method, before, after in by_effect(records, verdicts)[:1]:
        verdict = verdicts[method, after, AVERAGE, "accuracy"]
        if verdict.found:
            source = next((o for m, o in names_of(records) if m == "source"), "")
            (level,) = entries(records, "source", source, [(AVERAGE, "accuracy")])
            other = "" if level is None else f"; the source has {level.mean:.1f}%"
            return (
                f"The largest change: {SHORTER.get(after, after)} in place of {SHORTER.get(before, before)} takes the accuracy "
                f"of {method} from {verdict.before:.1f}% to {verdict.after:.1f}% ({verdict.points} points{other})."
            )
        if not verdict.reason:
            return f"No change of accuracy beyond chance; the largest is that of {method}, {verdict.points} points."
    return ""


def outliers(records: Sequence[Record], verdicts: Verdicts) -> str:
    """How the first of `by_effect` tells outliers from the known classes, in a sentence; empty if there are none."""
    keys = [(AVERAGE, "auroc_outlier"), (AVERAGE, "fpr95")]

    def numbers(method: str, objective: str) -> str | None:
        auroc, fpr95 = entries(records, method, objective, keys)
        return None if auroc is None or fpr95 is None else f"{auroc.mean:.1f}% (FPR95 {fpr95.mean:.1f}%)"

    for method, *both in by_effect(records, verdicts)[:1]:
        found = {o: text for o in both if (text := numbers(method, o))}
        source = next((text for m, o in names_of(records) if m == "source" and (text := numbers(m, o))), None)
        if len(found) == 2:
            said = " and ".join(f"{text} with {objective}" for objective, text in found.items())
            return f"Outliers: {method} has an AUROC of {said}" + (f"; the source has {source}." if source else ".")
    return ""


def headline(records: Sequence[Record], verdicts: Verdicts) -> str:
    """The finding in a few sentences, whichever way it goes."""
    found = changes(records, verdicts)
    sentences = []
    for before, after in dict.fromkeys((before, after) for _, before, after in found):
        chosen = [v for (_, *pair), judged in found.items() if tuple(pair) == (before, after) for v in judged]
        claims = {metric: [v.claim for v in chosen if v.metric == metric] for metric in METRICS}
        parts = "; ".join(f"{called(m, records[0].result.score)} {_tally(said)}" for m, said in claims.items() if said)
        sentences.append(f"With {WORDS.get(after, after)} in place of {WORDS.get(before, before)}, {parts}.")
    if not sentences:
        return "No method ran with two objectives on all domains, so there is nothing to compare."
    if all(len(v.by_seed) < 2 for judged in found.values() for v in judged):
        sentences.append(ONE_SEED)
    return " ".join(sentences)


def _tally(claims: Sequence[str]) -> str:
    """How many of each.

    >>> _tally(["higher", "lower", "higher"]), _tally(["higher"])
    ('is higher for 2 of 3 methods and is lower for 1', 'is higher for the one method that ran with both')
    """
    words = {
        "higher": "is higher",
        "lower": "is lower",
        "no difference found": "shows no clear difference",
        "not comparable": "cannot be compared",
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
    source = next((pair for pair in accuracies if pair[0] == "source" and pair in rates), None)
    if source is not None:
        by_belief = numbers[source][2]
        other = (
            f" ({by_belief.mean:.1f}% by belief, the score of COME)" if by_belief and rescored_source(records) else ""
        )
        text += f" Without adaptation, accuracy is {accuracies[source]:.1f}% and FPR {rates[source]:.1f}%{other}."
    return text


def collapses(pieces: Sequence[Piece]) -> list[str]:
    """Where the accuracy in the last quarter of a domain is less than half the source's there, means over seeds."""
    ends: dict[tuple[str, ...], list[float]] = {}
    for piece in pieces:
        values = piece.along["accuracy"]
        pair = ("source",) if piece.pair[0] == "source" else piece.pair  # with whichever objective it ran
        last = values[-max(1, len(values) // 4) :]
        ends.setdefault((*pair, piece.domain), []).extend(last[np.isfinite(last)].tolist())
    found = []
    for (*who, domain), accuracies in ends.items():
        source = ends.get(("source", domain))
        if len(who) == 2 and source and accuracies and fmean(accuracies) < fmean(source) / 2:
            numbers = f"{100 * fmean(accuracies):.0f}% where the source has {100 * fmean(source):.0f}%"
            found.append(f"{' + '.join(who)} on {domain} ({numbers})")
    return found


def recoveries(records: Sequence[Record]) -> list[str]:
    """What the guard undid: in which cells, and after which batches."""
    found = []
    several = len({r.cell.seed for r in records}) > 1
    for record in records:
        batches = [str(batch) for kind, batch in record.result.events if kind == "recovered"]
        if batches:
            domains = record.result.domains
            where = domains[0] if len(domains) == 1 else f"{domains[0]} to {domains[-1]}"
            seed = f", seed {record.cell.seed}" if several else ""
            found.append(f"{' + '.join(record.cell.pair)} on {where}{seed} (after batch {', '.join(batches)})")
    return found


def failed(failures: Iterable[Failure], records: Sequence[Record]) -> list[str]:
    """Those of the same plan, each in a line."""
    return [str(failure) for failure in failures if shared(failure) == shared(records[0])]


def missing(records: Sequence[Record]) -> Iterator[str]:
    """What the grid of these records lacks: each method and objective on each domain with each seed."""
    done = {(r.cell.pair, r.cell.seed, domain) for r in records for domain in r.result.domains}
    seeds = sorted({r.cell.seed for r in records})
    domains = domains_of(records)
    for pair in dict.fromkeys(r.cell.pair for r in records):
        for domain in domains:
            absent = [seed for seed in seeds if (pair, seed, domain) not in done]
            if absent:
                yield f"{' + '.join(pair)} on {domain}, seed {', '.join(map(str, absent))}"

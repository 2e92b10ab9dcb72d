"""Checks that a submission is complete, and comes from a protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from come.bench import protocols, settings
from come.bench.board.schema import AGAIN, DIGITS, METRICS, Submission, load
from come.bench.data.source import Loaded, Source
from come.bench.protocols import Protocol
from come.errors import ConfigError, InputError, shown

CLOSE = 1.5 * 10**-DIGITS  # largest difference between the mean of rounded numbers and the rounded mean


def read(path: Path) -> Submission:
    """The submission at `path`, checked.

    Raises:
        InputError: it is not one, or has problems; the first one is named.
    """
    found = load(path)
    for problem in problems(found):
        raise InputError(f"{path}: {problem}")
    return found


def problems(found: Submission) -> Iterator[str]:
    """What is wrong with a submission, in a sentence each: nothing if it is complete, and from a protocol."""
    try:
        protocol = protocols.get(found.protocol)
    except ConfigError as error:
        yield f"protocol: {error}"
    else:
        yield from _of_another_protocol(found, protocol)
    yield from _incomplete(found)
    yield from _wrong_means(found)


def _of_another_protocol(found: Submission, protocol: Protocol) -> Iterator[str]:
    rerun = f"run 'come bench --protocol {protocol.name}' of this version"
    names, samples = _streams(protocol)
    model = protocol.plan.model
    fixed: list[tuple[str, object, object, str]] = [
        ("protocol_sha256", protocol.sha256, found.protocol_sha256, rerun),
        ("weights_sha256", protocol.weights_sha256, found.weights_sha256, f"run it with the weights of {model}"),
        ("images", protocol.images, found.images, "run it on all images"),
        ("images_sha256", protocol.images_sha256, found.images_sha256, f"run it on {protocol.data}"),
        ("precision", protocol.plan.precision, found.precision, rerun),
        ("samples", samples, found.samples, "run it on all images"),
    ]
    for name, expected, given, repair in fixed:
        if expected not in (None, given):
            yield f"{name} must be {shown(expected)} in protocol {protocol.name}, got {shown(given)}; {repair}"
    if names is not None and found.domains != names:
        absent = [name for name in names if name not in found.domains]
        lacking = f" without {shown(absent[0])}" if absent else " others, or in another order"
        yield f"domains must be the {len(names)} of protocol {protocol.name}, got {len(found.domains)}{lacking}; {rerun}"
    if protocol.no_adapt is not None and abs(found.no_adapt - protocol.no_adapt) > protocol.tolerance:
        yield (
            f"no_adapt must be {protocol.expected} in protocol {protocol.name}, got {found.no_adapt:g}; "
            "the likely causes are other weights, images or normalization"
        )


def _incomplete(found: Submission) -> Iterator[str]:
    if found.source is None:
        given = shown(", ".join(row.title for row in found.rows))
        yield f"rows must have the source model, by which gains are measured, got {given}; {AGAIN}"
        return
    if len(found.rows) == 1:
        yield "rows must have a method besides the source model, got none; run it with --methods source,NAME"
    seeds = [scores.seed for scores in found.source.seeds]
    titles = [f"{r.title}, {'guard' if r.guard else 'bare'}, statistics {r.statistics}" for r in found.rows]
    for title, count in Counter(titles).items():
        if count > 1:
            yield f"rows must differ, got {count} of {title}; keep one of them"
    for i, row in enumerate(found.rows):
        theirs = [scores.seed for scores in row.seeds]
        if len(set(theirs)) < len(theirs) or set(theirs) != set(seeds):
            yield (
                f"rows.{i}.seeds ({row.title}) must be those of the source model, {shown(seeds)}, each once, got "
                f"{shown(theirs)}; run the missing ones"
            )
        for k, scores in enumerate(row.seeds):
            for metric in METRICS:
                values = getattr(scores, metric)
                if len(values) != len(found.domains) or (metric == "accuracy" and None in values):
                    there = len([value for value in values if value is not None])
                    yield (
                        f"rows.{i}.seeds.{k}.{metric} must be {len(found.domains)} numbers, one for each of domains, got "
                        f"{there if metric == 'accuracy' else len(values)}; {AGAIN}"
                    )


def _wrong_means(found: Submission) -> Iterator[str]:
    for i, row in enumerate(found.rows):
        for metric in METRICS:
            expected, given = mean([getattr(scores, metric) for scores in row.seeds]), getattr(row, metric)
            if (expected is None) != (given is None) or (expected is not None and abs(expected - given) > CLOSE):
                yield (
                    f"rows.{i}.{metric} ({row.title}) must be {_number(expected)}, the mean of its domains and seeds, got "
                    f"{_number(given)}; {AGAIN}"
                )
    source = found.source
    if source is not None and abs(source.accuracy - found.no_adapt) > CLOSE:
        yield f"no_adapt must be {_number(source.accuracy)}, the accuracy of the source model, got {found.no_adapt:g}; {AGAIN}"


def _streams(protocol: Protocol) -> tuple[tuple[str, ...] | None, int | None]:
    """The domains of a protocol and the samples in all of them; None where they depend on the data."""
    plan = protocol.plan.but(methods=("source",), seeds=(0,))
    blank = _Blank(protocol.images)
    episodes = [e for cell in plan.cells(len(blank)) for e in settings.get(plan.setting).episodes(cell, blank, blank)]
    names = tuple(episode.stream.domain for episode in episodes)
    return names if plan.corruptions else None, None if plan.outliers else sum(len(e.stream) for e in episodes)


class _Blank(Source):
    """So many images of one class, which nobody looks at."""

    name, num_classes = "blank", 1

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        raise InputError("the domains of this protocol depend on its images")


def mean(values: Sequence[Sequence[float | None]]) -> float | None:
    """Over domains, then over seeds; None where one is missing."""
    numbers = [[value for value in one if value is not None] for one in values]
    complete = all(numbers) and all(len(a) == len(b) for a, b in zip(numbers, values, strict=True))
    return fmean(map(fmean, numbers)) if complete else None


def _number(value: float | None) -> str:
    return "null" if value is None else f"{round(value, DIGITS):g}"

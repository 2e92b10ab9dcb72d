"""Writes the report of a run as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from come.bench.cell import Cell
from come.bench.protocols import Outcome
from come.bench.record import Failure, Record
from come.bench.report.configurations import one_configuration
from come.bench.report.costs import by_pair, cost, threads, unlike
from come.bench.report.findings import changes, failed, headline, helped, missing
from come.bench.report.formats import plain_markdown, to_markdown
from come.bench.report.rates import rates_table, without_sweeps
from come.bench.report.tables import results_table, scores_note
from come.bench.statistics import Judged, called
from come.errors import StateError
from come.state.files import replacing


def write_text(path: str | Path, text: str) -> None:
    """Write a report: the whole file, or none.

    Raises:
        StateError: it cannot be written.
    """
    try:
        with replacing(Path(path)) as beside:
            beside.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise StateError(
            f"cannot write the report {path}: {error.strerror}; make room, or choose another place for it"
        ) from error


def write_report(
    records: Sequence[Record],
    path: str | Path,
    command: Sequence[str] = (),
    verdicts: Judged | None = None,
    failures: Sequence[Failure] = (),
    outcome: Outcome | None = None,
) -> None:
    """Write a Markdown page with the finding, the table, the cost of each method, and what is needed to make it again.

    Args:
        records: of one plan.
        command: what made the run, to be shown.
        verdicts: of `come.bench.statistics.verdicts(folder, records)`; without them, nothing is called a difference.
        failures: of `RunFolder.failures()`; those of this plan are listed.
        outcome: of `RunFolder.outcome(records)`, if a protocol was followed.
    """
    records, judged = one_configuration(records), verdicts or Judged()
    main, rates, groups = without_sweeps(records), rates_table(records, judged), by_pair(records)
    cell, machine = records[0].cell, records[0].machine
    seeds, score = sorted({r.cell.seed for r in records}), records[0].result.score
    bad = sum(r.result.bad_images for r in records)
    lines = [f"# {plain_markdown(f'{cell.model} on {cell.data}, {about(records)}')}", ""]
    if verdicts is not None:
        lines += [plain_markdown(text) + "\n" for text in (helped(records, judged), headline(main, judged)) if text]
        for (method, before, after), found in changes(records, judged).items():
            words = "; ".join(
                f"{called(v.metric, score)} {v.words}" + f" ({v.points} points, {v.numbers})" * (not v.reason)
                for v in found
            )
            lines.append(f"* {plain_markdown(f'{method}, {before} to {after}: {words}')}.")
    lines += [
        "",
        "Accuracy in percent for each domain, its average, and the average FPR: the share of wrong samples that pass the",
        "threshold which accepts 95% of the right ones; lower is better.",
        f"{scores_note(records)} Gain is the accuracy above the source's, Improve what the second objective gains over the",
        "first: positive is better in every column. △ marks better and ▽ worse, where a difference was found."
        + (" Mean and standard deviation over seeds." if len(seeds) > 1 else ""),
        "",
        to_markdown(results_table(main, verdicts=judged)),
        *([to_markdown(rates)] if rates else []),
        *(f"Not finished: {plain_markdown(text)}.\n" for text in missing(records)),
        *(f"Failed: {plain_markdown(text)}.\n" for text in failed(failures, records)),
        "## Cost",
        "",
        "| |seconds|waiting for data|peak memory|samples used|",
        "|---|---:|---:|---:|---:|",
    ]
    for pair, group in groups.items():
        one = cost(group)
        share = "·" if one.used is None else f"{100 * one.used:.0f}%"
        numbers = f"{one.seconds:.1f}|{one.waiting:.1f}|{one.memory_mb:.0f} MB|{share}"
        lines.append(f"|{plain_markdown(' + '.join(pair))}|{numbers}|")
    if reason := unlike(groups.values()):
        lines += ["", plain_markdown(f"These costs are not comparable: {reason}.")]
    skipped = f"; {bad} images could not be read and were skipped" if bad else ""
    lines += [
        "",
        f"{len(records)} cells, {images(cell)} each, batch {cell.batch_size}, seeds {seeds}{skipped}.",
        "",
        "## Made with",
        "",
    ]
    if outcome is not None:
        reached = str(outcome)
        said = f"{reached[0].upper()}{reached[1:]}.", outcome.protocol.paragraph()
        lines += [plain_markdown(text) + "\n" for text in said]
    if command:
        lines += [f"    {shlex.join(command)}".replace("\n", "\n    "), ""]
    lines += [
        plain_markdown(f"{', '.join(map(' '.join, machine.versions.items()))}, {machine.device}, {threads(machine)}."),
        "",
        "The files in `cells/` hold the record of each cell and a row for every sample; `streams/` holds their order.",
    ]
    write_text(path, "\n".join(lines) + "\n")


def images(cell: Cell) -> str:
    """How many images a cell used; of how many, and which, where these are not all.

    >>> images(Cell(method="tent", objective="em", size=1000, total=50_000))
    '1000 of 50000 images (spread over the classes by the seed, the same for every method)'
    """
    if cell.total is None:
        return f"{cell.size} images"
    return f"{cell.size} of {cell.total} images (spread over the classes by the seed, the same for every method)"


def about(records: Sequence[Record]) -> str:
    """What was run, in a line, behind the model and the data."""
    cell = records[0].cell
    return f"{cell.setting} setting{f', severity {cell.level}' if cell.corruptions else ''}"

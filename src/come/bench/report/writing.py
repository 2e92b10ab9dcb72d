"""Writes the report of a run as Markdown: fills the template `report.md.jinja`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from come.bench.cell import Cell
from come.bench.protocols import Outcome
from come.bench.record import Failure, Record
from come.bench.report import findings
from come.bench.report.configurations import one_configuration
from come.bench.report.costs import by_pair, cost, threads, unlike
from come.bench.report.formats import plain_markdown, to_markdown
from come.bench.report.tables import rates_table, results_table, scores_note, without_sweeps
from come.bench.statistics import Judged, called
from come.errors import StateError
from come.state.files import replacing


def filled(template: str, **values: Any) -> str:
    """A template of this folder with these values; in HTML, all their text is escaped."""
    environment = Environment(
        loader=PackageLoader("come.bench.report", "."),
        autoescape="html" in template,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline="html" not in template,
    )
    environment.filters["md"] = plain_markdown
    return environment.get_template(template).render(**values)


def write_text(path: str | Path, text: str) -> None:
    """Write a report, the whole file or none; a `StateError` says why it cannot be written."""
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

    `command` is what made the run, `failures` and `outcome` are those of its folder. Without verdicts nothing is called a
    difference.
    """
    records, judged = one_configuration(records), verdicts or Judged()
    main, groups = without_sweeps(records), by_pair(records)
    cell, machine, score = records[0].cell, records[0].machine, records[0].result.score
    changes = []
    for (method, before, after), found in findings.changes(records, judged).items():
        words = (
            f"{called(v.metric, score)} {v.words}" + f" ({v.points} points, {v.numbers})" * (not v.reason)
            for v in found
        )
        changes.append(f"{method}, {before} to {after}: {'; '.join(words)}")
    said = [findings.helped(records, judged), findings.headline(main, judged)] if verdicts is not None else []
    tables = [results_table(main, verdicts=judged), rates_table(records, judged)]
    text = filled(
        "report.md.jinja",
        title=f"{cell.model} on {cell.data}, {about(records)}",
        findings=filter(None, said),
        changes=changes,
        scores=scores_note(records),
        dense=records[0].cell.dense,
        seeds=sorted({r.cell.seed for r in records}),
        tables=[to_markdown(table) for table in tables if table],
        missing=findings.missing(records),
        failed=findings.failed(failures, records),
        costs=[(" + ".join(pair), cost(group)) for pair, group in groups.items()],
        unlike=unlike(groups.values()),
        cells=len(records),
        images=images(cell),
        batch_size=cell.batch_size,
        bad_images=sum(r.result.bad_images for r in records),
        outcome=str(outcome or ""),
        paragraph=outcome.protocol.paragraph() if outcome else "",
        command=shlex.join(command),
        machine=f"{', '.join(map(' '.join, machine.versions.items()))}, {machine.device}, {threads(machine)}.",
    )
    write_text(path, text)


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

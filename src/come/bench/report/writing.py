"""The report file of a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from come.bench.report.tables import results_table, to_markdown
from come.bench.store import Record
from come.errors import StateError
from come.files import replacing


def write_report(records: Sequence[Record], path: Path, command: Sequence[str] = ()) -> None:
    """Write a Markdown page with the table, the cost of each method, and all that is needed to make it again."""
    cell, around = records[0].cell, records[0].surroundings
    seeds = sorted({r.cell["seed"] for r in records})
    bad = sum(r.result["bad_images"] for r in records)
    lines = [
        f"# {cell['model']} on {cell['data']}, {cell['setting']} setting, severity {cell['severity']}",
        "",
        "Accuracy in percent for each corruption, its average, and the average FPR (the paper's: wrong samples that pass the",
        "threshold which accepts 95% of the right ones; lower is better). Improve rows are the second objective minus the",
        "first, in bold from 0.5 points on." + (" Mean and standard deviation over seeds." if len(seeds) > 1 else ""),
        "",
        to_markdown(results_table(records)),
        "## Cost",
        "",
        "| |seconds|waiting for data|peak memory|samples used|",
        "|---|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.cell["method"], record.cell["objective"]), []).append(record)
    for (method, objective), group in groups.items():
        seconds = sum(r.result["seconds"] for r in group)
        waited = sum(r.result["seconds_waiting_for_data"] for r in group)
        memory = max(r.result["peak_memory_mb"] for r in group)
        used = [m["used"] for r in group for m in r.result["metrics"].values()]
        share = f"{100 * sum(used) / len(used):.0f}%" if used else ""
        lines.append(f"|{method} + {objective}|{seconds:.1f}|{waited:.1f}|{memory:.0f} MB|{share}|")
    lines += [
        "",
        f"{len(records)} cells, {cell['size']} images each, batch {cell['batch_size']}, seeds {seeds}"
        + (f"; {bad} images could not be read and were skipped" if bad else "")
        + ".",
        "",
        "## Made with",
        "",
        *([f"    {shlex.join(command)}", ""] if command else []),
        f"{json.dumps(around['versions'])}, {around['device']}, {around['threads']} threads.",
        "",
        "Rows of every sample and the record of every cell are in `cells/`, the manifests of the streams in `streams/`.",
    ]
    try:
        with replacing(path) as beside:
            beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise StateError(
            f"cannot write the report {path}: {error.strerror}; make room, or choose another place"
        ) from error

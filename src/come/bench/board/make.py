"""Makes the file that is submitted from a finished run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from come import methods
from come.bench.board.check import mean, problems
from come.bench.board.schema import DIGITS, FORMAT, METRICS, Submission
from come.bench.folder import RunFolder
from come.bench.record import Record
from come.bench.report.configurations import shared
from come.bench.report.findings import failed, missing
from come.bench.report.tables import by_seed
from come.errors import InputError


def submission(folder: RunFolder, submitted_by: str, link: str | None = None) -> Submission:
    """What a finished run under a protocol has found, checked.

    Raises:
        InputError: the run followed no protocol, is not finished, or is no result of the protocol; the first reason is named.
    """
    records = folder.records()
    outcome = folder.outcome(records)
    if outcome is None:
        raise InputError(
            f"{folder.path} must be a run under a protocol, and is none: no file in its folder protocols/ fits its cells; run "
            "'come bench --protocol NAME', see 'come protocol list'"
        )
    if outcome.protocol.plan.task == "segmentation":
        raise InputError(
            f"protocol {outcome.protocol.name} is of segmentation; a leaderboard ranks accuracy and FPR only"
        )
    firsts = [r for r in records if r.key in outcome.cells]
    if others := [r for r in records if shared(r) != shared(firsts[0])]:
        raise InputError(
            f"{folder.path} must hold the cells of protocol {outcome.protocol.name} only, got {len(others)} others, such as "
            f"{others[0].cell.title}; run the protocol in a folder of its own, with --out"
        )
    unfinished = [*(f"not finished: {one}" for one in missing(records)), *failed(folder.failures(), records)]
    if unfinished:
        raise InputError(
            f"{folder.path} must be finished, but {len(unfinished)} parts are not, such as {unfinished[0]}; run the same "
            "'come bench' command again"
        )
    domains = tuple(dict.fromkeys(domain for r in firsts for domain in r.result.domains))
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps([record.cell.pair, record.cell.hyper]), []).append(record)
    values: dict[str, Any] = {
        "protocol": outcome.protocol.name,
        "protocol_sha256": outcome.protocol.sha256,
        "weights_sha256": outcome.weights_sha256,
        "images": outcome.protocol.images,
        "images_sha256": outcome.images_sha256,
        "samples": sum(r.result.samples for r in firsts if r.cell.seed == firsts[0].cell.seed),
        "precision": firsts[0].cell.precision,
        "no_adapt": round(outcome.measured, DIGITS),
        "come": _version(folder, records, "come-tta"),
        "commit": _commit(folder, records),
        "torch": _version(folder, records, "torch"),
        "devices": sorted({r.machine.device[:80] for r in records}),
        "domains": domains,
        "rows": [_row(group, domains) for group in groups.values()],
    }
    found = Submission(format=FORMAT, submitted_by=submitted_by, link=link, **values)
    for problem in problems(found):
        raise InputError(f"{folder.path}: {problem}")
    return found


def _row(records: Sequence[Record], domains: Sequence[str]) -> dict[str, Any]:
    """Of one method, objective and set of hyperparameters."""
    cell, found = records[0].cell, by_seed(sorted(records, key=lambda record: record.cell.seed))
    seeds: list[dict[str, Any]] = [{"seed": seed} for seed in found]
    means = {}
    for metric in METRICS:
        numbers = [[by_domain.get(domain, {}).get(metric) for domain in domains] for by_domain in found.values()]
        percent = [tuple(None if v is None else round(100 * v, DIGITS) for v in values) for values in numbers]
        for seed, values in zip(seeds, percent, strict=True):
            seed[metric] = values
        value = mean(percent)
        means[metric] = None if value is None else round(value, DIGITS)
    unguarded = "mixed" if cell.guarded else methods.get(cell.base).unguarded
    return {
        "method": cell.base,
        "objective": cell.objective,
        "hyper": cell.hyper,
        "lr": records[0].result.lr,
        "guard": cell.guarded,
        "statistics": cell.hyper.get("statistics") or cell.statistics or unguarded,
        **means,
        "seeds": seeds,
    }


def _version(folder: RunFolder, records: Sequence[Record], package: str) -> str:
    """The one version of a package that made all of these records."""
    versions = sorted({r.machine.versions.get(package, "unknown") for r in records})
    if len(versions) > 1:
        raise InputError(
            f"{folder.path} must be the work of one version of {package}, got {' and '.join(versions)}; run it again with "
            "one, in another folder"
        )
    return versions[0]


def _commit(folder: RunFolder, records: Sequence[Record]) -> str:
    found = _version(folder, records, "commit")
    if len(found) != 40:
        raise InputError(
            f"{folder.path} must be the work of a commit of come, got {found}; run it again from a clone whose src/come has no "
            "changes that are not committed, in another folder"
        )
    return found

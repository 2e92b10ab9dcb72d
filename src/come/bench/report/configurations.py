"""Groups the records of a folder by plan: only those of one plan may stand in one table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from come.bench.cell import Knobs
from come.bench.record import Failure, Record
from come.errors import InputError

SHARED = (*Knobs.model_fields, "size", "total", "replay", "weights", "images", "edition")
"""Fields of a cell that all cells of a plan have in common."""


def shared(record: Record | Failure) -> dict[str, Any]:
    """The fields that all records of a table have in common, by name."""
    return {name: getattr(record.cell, name) for name in SHARED}


def configurations(records: Iterable[Record]) -> list[list[Record]]:
    """The records in groups that may stand in one table: of one plan each.

    Where a method ran with several sets of hyperparameters, there is a group for each; methods with one set are in all.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(shared(record), sort_keys=True), []).append(record)
    parts = []
    for group in groups.values():
        found: dict[str, set[str]] = {}
        for record in group:
            found.setdefault(record.cell.method, set()).add(_hyper(record))
        sets = {method: sorted(values) for method, values in found.items()}
        for i in range(max(map(len, sets.values()))):
            chosen = {
                (method, value)
                for method, values in sets.items()
                for value in (values if len(values) == 1 else values[i : i + 1])
            }
            parts.append([record for record in group if (record.cell.method, _hyper(record)) in chosen])
    return parts


def _hyper(record: Record) -> str:
    return json.dumps(record.cell.hyper, sort_keys=True)


def describe_configurations(groups: Sequence[Sequence[Record]]) -> list[str]:
    """What tells each group from the others: only the fields that differ, e.g. "setting lifelong, severity 5"."""
    fields = [{name.replace("_", " "): value for name, value in shared(group[0]).items()} for group in groups]
    hyper = [{f"{r.cell.method} {name}": v for r in group for name, v in r.cell.hyper.items()} for group in groups]
    for facts in (fields, hyper):  # hyperparameters only where nothing else differs
        names = dict.fromkeys(name for fact in facts for name in fact)
        differ = [name for name in names if len({str(fact.get(name)) for fact in facts}) > 1]
        if differ:
            break
    return [
        ", ".join(f"{name} {'by default' if fact.get(name) is None else fact[name]}" for name in differ)
        for fact in facts
    ]


def one_configuration(records: Iterable[Record]) -> list[Record]:
    """The records as a list, if they may stand in one table.

    Raises:
        InputError: there are none, or they are of several plans.
    """
    records = list(records)
    if not records:
        raise InputError(
            "there are no records: no cell is finished; run 'come bench' first, or give another run folder"
        )
    if len(groups := configurations(records)) > 1:
        raise several_plans("the run", groups)
    return records


def several_plans(where: str, groups: Sequence[Sequence[Record]]) -> InputError:
    """The error that asks to choose one of the plans in a folder."""
    listed = "; ".join(f"--plan {i}: {text}" for i, text in enumerate(describe_configurations(groups), 1))
    return InputError(f"{where} holds {len(groups)} plans; choose one with {listed}")

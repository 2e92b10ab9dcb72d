"""Which records may stand in one table: those of one plan."""

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
    """The fields that a table is of, by name."""
    return {name: getattr(record.cell, name) for name in SHARED}


def configurations(records: Iterable[Record]) -> list[list[Record]]:
    """The records in groups that may stand in one table: of one plan each.

    Where a method ran with several sets of hyperparameters, there is a group for each; methods with one set are in all.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(shared(record), sort_keys=True), []).append(record)
    return [part for group in groups.values() for part in _by_hyper(group)]


def _by_hyper(group: Sequence[Record]) -> list[list[Record]]:
    found: dict[str, set[str]] = {}
    for record in group:
        found.setdefault(record.cell.method, set()).add(_hyper(record))
    sets = {method: sorted(values) for method, values in found.items()}
    parts = max(map(len, sets.values()))

    def chosen(record: Record, number: int) -> bool:
        mine = sets[record.cell.method]
        return len(mine) == 1 or (number < len(mine) and mine[number] == _hyper(record))

    return [[record for record in group if chosen(record, i)] for i in range(parts)]


def _hyper(record: Record) -> str:
    return json.dumps(record.cell.hyper, sort_keys=True)


def describe_configurations(groups: Sequence[Sequence[Record]]) -> list[str]:
    """What tells each group from the others: only the fields that differ, e.g. "setting lifelong, severity 5"."""
    fields = [{name.replace("_", " "): value for name, value in shared(group[0]).items()} for group in groups]
    hyper = [{f"{r.cell.method} {name}": v for r in group for name, v in r.cell.hyper.items()} for group in groups]
    said = [""] * len(groups)
    for facts in (hyper, fields):  # hyperparameters only where nothing else differs
        names = dict.fromkeys(name for fact in facts for name in fact)
        differ = [name for name in names if len({str(fact.get(name)) for fact in facts}) > 1]
        if differ:
            said = [", ".join(f"{name} {_said(fact.get(name))}" for name in differ) for fact in facts]
    return said


def _said(value: Any) -> str:
    return "by default" if value is None else str(value)


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
    groups = configurations(records)
    if len(groups) > 1:
        raise several_plans("the run", groups)
    return records


def several_plans(where: str, groups: Sequence[Sequence[Record]]) -> InputError:
    """The error that asks to choose one of the plans in a folder."""
    listed = "; ".join(f"--plan {i}: {text}" for i, text in enumerate(describe_configurations(groups), 1))
    return InputError(f"{where} holds {len(groups)} plans; choose one with {listed}")

"""The parts of a record that reports and comparisons rely on, each of its kind: a record may have been changed by anyone."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from come.bench.cell import Cell, Rows
from come.metrics import SCORES

if TYPE_CHECKING:
    from come.bench.store import Record

NUMBER = (int, float)
RESULT: dict[str, Any] = {
    "samples": int, "bad_images": int, "seconds": NUMBER, "seconds_waiting_for_data": NUMBER, "peak_memory_mb": NUMBER,
    "lr": (*NUMBER, type(None)),
}  # fmt: skip
PARTS: dict[str, Any] = {
    "str": str, "int": int, "float": NUMBER, "bool": bool, "dict[str, Any]": dict, "tuple[str, ...]": list,
}  # fmt: skip
COLUMNS = (
    "index", "label", "prediction", "confidence", "msp", "uncertainty", "entropy", "energy", "norm", "nll", "brier", "finite",
    "used", "domain", "kind",
)  # fmt: skip


def check_parts(record: Record, rows: Rows) -> None:
    """Raise a ValueError unless the record has the parts that reports and comparisons rely on, each of its kind."""
    cell, result, around = record.cell, record.result, record.surroundings
    for field in fields(Cell):
        kind = str(field.type)
        value = cell[field.name]
        if not (kind.endswith(" | None") and value is None):
            _require(_fits(value, PARTS[kind.removesuffix(" | None")]), field.name, value)
    _require(all(_fits(name, str) for name in cell["corruptions"]), "corruptions", cell["corruptions"])
    for name, kind in RESULT.items():
        _require(_fits(result[name], kind), name, result[name])
    domains, fresh, metrics = result["domains"], result["fresh"], result["metrics"]
    _require(isinstance(domains, list) and all(_fits(d, str) for d in domains), "domains", domains)
    _require(isinstance(fresh, list) and [type(f) for f in fresh] == [bool] * len(domains), "fresh", fresh)
    _require(isinstance(metrics, dict) and set(metrics) == set(domains), "metrics", metrics)
    for found in metrics.values():
        _require(isinstance(found, dict) and all(_fits(v, NUMBER) for v in found.values()), "metrics", found)
        _require({"accuracy", "fpr", "used"} <= set(found), "metrics", found)
    _require(record.score in SCORES, "score", record.score)
    events = result.get("events", [])  # records from before there were any have none
    pairs = isinstance(events, list) and all(isinstance(e, list) and len(e) == 2 for e in events)
    _require(pairs and all(_fits(kind, str) and _fits(batch, int) for kind, batch in events), "events", events)
    _require(isinstance(around["versions"], dict) and _fits(around["device"], str), "surroundings", around)
    _require(_fits(around["threads"], int), "threads", around["threads"])
    sizes = {tuple(column.shape) for column in rows.values()}
    if rows and (set(COLUMNS) - set(rows) or len(sizes) != 1 or len(next(iter(sizes))) != 1):
        raise ValueError("its rows lack a column, or the columns are not of one length")
    wrong = [
        name for name, column in rows.items() if column.is_complex() or column.is_floating_point() == (name in WHOLE)
    ]
    if wrong:
        raise ValueError(f"the column {wrong[0]} of its rows is {rows[wrong[0]].dtype}")


WHOLE = ("index", "label", "prediction", "finite", "used", "domain", "kind")


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, str):
        value.encode()  # a UnicodeEncodeError is a ValueError: half a character cannot be written to a page
    return isinstance(value, kind) and not (isinstance(value, int) and abs(value) >= 2**64)


def _require(ok: bool, name: str, value: Any) -> None:
    if not ok:
        raise ValueError(f"{name} is {str(value)[:80]!r}")

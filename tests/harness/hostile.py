"""Run folders, manifests and configuration files that somebody tampered with, through the whole command line.

    python tests/harness/hostile.py [--slow 10] [--show] [GROUP ...]

Every checksum holds: whoever can write a file can compute it. A case is something tampered with and a command that reads it.
It must end within seconds, with one sentence and exit code 2, or with the bad cell left out and a warning; nothing outside of
the run folder is made or changed, and no control character is printed. `tests/test_hostile.py` runs some of the cases.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cells import apart, forge
from safetensors.torch import save

from come.bench import Plan, RunFolder, cli, run
from come.bench.data import Stream

LIMIT = 30.0
"""Seconds for a case: the figures take some on a busy machine."""
MEMORY = 2**31
"""Bytes that a case may take beyond what the process has."""
PLAN = Plan(data="fashion:100", methods=("source", "tent"), objectives=("come",), corruptions=("fog", "snow"), limit=16)
ARGUMENTS = ("--methods", "source,tent", "--objectives", "come", "--corruptions", "fog,snow", "--limit", "16")

# ---- commands ----

FORMATS = ("md", "latex", "csv", "json")
READING: dict[str, Callable[[Path, Path], list[str]]] = {
    **{form: lambda run, good, form=form: ["report", str(run), "--format", form] for form in FORMATS},
    "rescored": lambda run, good: ["report", str(run), "--format", "csv", "--score", "energy", "--metric", "fpr"],
    "compare": lambda run, good: ["compare", str(good), str(run), "--all"],
    "page": lambda run, good: ["report", str(run)],
    "figures": lambda run, good: ["report", str(run), "--figures", "svg"],
}
"""Commands that read a run folder; all but the last two leave it as it is."""
RESUMING = {"bench": lambda run, good: ["bench", "--data", "fashion:100", *ARGUMENTS, "--out", str(run)]}
COMMANDS = READING | RESUMING


@dataclass(frozen=True)
class Case:
    """Something that was tampered with, and how it may end: left out, refused, or accepted for what is only unusual."""

    group: str
    name: str
    tamper: Callable[[Place], object]
    may: tuple[str, ...]
    commands: tuple[str, ...] = tuple(READING)


@dataclass(frozen=True)
class Place:
    """Where a case happens: a run folder to tamper with, and a folder beside it that must stay as it is."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def beside(self) -> Path:
        return self.root / "beside"

    @property
    def given(self) -> Path:
        """A manifest or a configuration."""
        return self.root / "given"

    @property
    def cells(self) -> list[Path]:
        return sorted((self.run / "cells").iterdir())

    def seen(self) -> dict[str, object]:
        """Everything here, without opening what is not a plain file."""
        found: dict[str, object] = {}
        for path in sorted(self.root.rglob("*")):
            plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 10**7
            found[str(path.relative_to(self.root))] = (
                path.read_bytes() if plain else os.readlink(path) if path.is_symlink() else path.stat().st_mode
            )
        return found


@contextlib.contextmanager
def place(good: Path) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="come-hostile-") as root:
        here = Place(Path(root))
        shutil.copytree(good, here.run)
        here.beside.mkdir()
        (here.beside / "precious.txt").write_text("precious")
        yield here


@dataclass
class Ended:
    """What came of a case."""

    how: str
    said: str
    seconds: float
    wrong: list[str]


def called(arguments: list[str]) -> tuple[int, str, str, list[str]]:
    """A command, as `come` runs it: exit code, output, errors, warnings. It is stopped when it takes too long or too much."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"longer than {LIMIT:.0f} s")

    out, err, code = io.StringIO(), io.StringIO(), 0
    before, argv, columns = signal.signal(signal.SIGALRM, late), sys.argv, os.environ.get("COLUMNS")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    with warnings.catch_warnings(record=True) as told, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("always")
        sys.argv, os.environ["COLUMNS"] = ["come", *arguments], "100"
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            signal.signal(signal.SIGALRM, before)
            sys.argv = argv
            os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    lines = err.getvalue().splitlines(keepends=True)
    warned = [line.removeprefix("warning: ").rstrip("\n") for line in lines if line.startswith("warning: ")]
    rest = "".join(line for line in lines if not line.startswith("warning: "))
    return code, out.getvalue(), rest, [*(str(warning.message) for warning in told), *warned]


def ended(case: Case, command: str, good: Path) -> Ended:
    """Run a case and look at everything that it left."""
    with place(good) as here:
        case.tamper(here)
        before = here.seen()
        began = time.perf_counter()
        try:
            code, out, err, told = called(ALL[command](here, good))
        except BaseException as error:
            return Ended("crash", repr(error)[:300], time.perf_counter() - began, [f"a traceback: {error!r}"[:300]])
        seconds = time.perf_counter() - began
        after = here.seen()
        texts = {path: text for path, text in after.items() if isinstance(text, bytes) and text != before.get(path)}
        left_out = [text for text in told if text.startswith("left out: ")]
        how = {0: "left out" if left_out else "accepted", 2: "refused"}.get(code, f"code {code}")
        wrong = [] if how in case.may else [f"{how}, but it should be {' or '.join(case.may)}"]
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        if command in READING and command not in ("page", "figures"):
            wrong += [f"it wrote {path}" for path in changed]
        wrong += [f"outside it wrote {path}" for path in changed if path.partition("/")[0] not in ("run", "out")]
        if code == 2 and not re.fullmatch(r"error: [^\n]+\n", err):
            wrong.append("not one line on stderr")
        if code == 0 and err:
            wrong.append("something on stderr")
        wrong += [f"a warning: {text}" for text in told if text not in left_out]
        for text in (err, out, *left_out):
            if hidden := [c for c in text if not c.isprintable() and c != "\n"]:
                wrong.append(f"it prints {hidden[0]!r}")
        wrong += ["a warning of several lines" for text in left_out if "\n" in text]
        wrong += ["a message of more than 2000 characters" for text in (err, *left_out) if len(text) > 2000]
        if command == "csv" and code == 0:
            wrong += [f"a formula: {cell!r}" for row in csv.reader(io.StringIO(out)) for cell in row if formula(cell)]
        wrong += [f"a script in {path}" for path, text in texts.items() if b"<script>alert" in text]
        return Ended(how, err.strip() or " ".join(left_out), seconds, wrong)


def formula(cell: str) -> bool:
    """Whether a spreadsheet would compute it."""
    with contextlib.suppress(ValueError):
        float(cell)
        return False
    return cell.startswith(("=", "+", "-", "@", "\t", "\r"))


# ---- what stands in place of a file ----


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 * 2**30)


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def holding(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "10 GB": sparse,
    "a link to itself": circle,
    "a link to nothing": to("nothing"),
    "/dev/zero": to("/dev/zero"),
    "/dev/stdin": to("/dev/stdin"),
    "/dev/null": to("/dev/null"),
    "/proc/self/mem": to("/proc/self/mem"),
    "nothing": lambda path: None,
    "no bytes": holding(b""),
    "garbage": holding(bytes(range(256)) * 9),
    "brackets": holding(b"[" * 100_000),
    "braces": holding(b'{"a":' * 100_000),
    "a long header": holding(b"\xff" * 7 + b"\x7f" + b"{}"),
}


def put(path: Path, what: Callable[[Path], object]) -> None:
    """Put something in place of a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    what(path)


# ---- records and rows ----

NAMES = {
    "escape sequence": "\x1b[31mred\x1b[0m", "line break": "a\nerror: b", "bell": "a\x07", "C1": "a\x9bb", "tab": "a\tb",
    "NUL": "a\0b", "half a character": "a\ud800", "other half": "\udfffb", "right to left": "a\u202eb",
    "line separator": "a\u2028b", "empty": "", "a megabyte": "x" * 2**20,
}  # fmt: skip
"""Not fit for a name."""
ODD = {
    "script": "<script>alert(1)</script>", "attribute": '" onload="alert(1)', "formula": "=1+1", "plus": "+1+cmd|' /C calc'!A0",
    "minus": "-2+3", "at": "@SUM(A1:A9)", "markup": "[/red][bold]", "a path": "../../etc/passwd",
    "TeX": "\\input{/etc/passwd}$#_%&~^", "table": "a|b|c", "braces": "{0}%s", "long": "x" * 1000, "emoji": "😀é\u0301",
    "colons": "tent:" * 50, "unknown": "nosuch", "arguments": "tent:lr=nan", "spaces": "   ",
}  # fmt: skip
"""Text like any other, to be shown as it is."""
TEXTS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "method": lambda r, t: r["cell"].update(method=t),
    "objective": lambda r, t: r["cell"].update(objective=t),
    "data": lambda r, t: r["cell"].update(data=t),
    "model": lambda r, t: r["cell"].update(model=t),
    "setting": lambda r, t: r["cell"].update(setting=t),
    "corruption": lambda r, t: r["cell"].update(corruptions=[t]),
    "outliers": lambda r, t: r["cell"].update(outliers=t),
    "checkpoint": lambda r, t: r["cell"].update(checkpoint=t),
    "replay": lambda r, t: r["cell"].update(replay=t),
    "hyperparameter": lambda r, t: r["cell"].update(hyper={t: 1.0}),
    "value": lambda r, t: r["cell"].update(hyper={"lr": t}),
    "domain": lambda r, t: r["result"].update(domains=[t], metrics={t: next(iter(r["result"]["metrics"].values()))}),
    "metric": lambda r, t: next(iter(r["result"]["metrics"].values())).update({t: 0.5}),
    "health": lambda r, t: r["result"].update(health={t: 1.0}),
    "event": lambda r, t: r["result"].update(events=[[t, 1]]),
    "score": lambda r, t: r["result"].update(score=t),
    "device": lambda r, t: r["machine"].update(device=t),
    "package": lambda r, t: r["machine"].update(versions={t: "1"}),
    "version": lambda r, t: r["machine"].update(versions={"torch": t}),
}

RAW = {"1e999": 1e999, "NaN": float("nan"), "-Infinity": float("-inf")}
WRONG: tuple[Any, ...] = (float("nan"), float("inf"), -1, 2**64, 10**400, True, "1", None, [], {}, 1e16, 0.5)
"""In place of a number that counts something."""
COUNTS: dict[str, Callable[[dict[str, Any], Any], object]] = {
    "samples": lambda r, v: r["result"].update(samples=v),
    "batch_size": lambda r, v: r["cell"].update(batch_size=v),
    "size": lambda r, v: r["cell"].update(size=v),
    "seed": lambda r, v: r["cell"].update(seed=v if v != -1 else -(2**63) - 1),
    "threads": lambda r, v: r["machine"].update(threads=v),
    "step": lambda r, v: r["result"].update(events=[["collapse", v]]),
}
NUMBERS: dict[str, Callable[[dict[str, Any], Any], object]] = {
    "seconds": lambda r, v: r["result"].update(seconds=v),
    "memory": lambda r, v: r["result"].update(peak_memory_mb=v),
    "load": lambda r, v: r["machine"].update(load=v),
    "lr": lambda r, v: r["result"].update(lr=v),
    "accuracy": lambda r, v: next(iter(r["result"]["metrics"].values())).update(accuracy=v),
}
ABSURD: dict[str, Callable[[dict[str, Any]], object]] = {
    "accuracy of 1e15": lambda r: NUMBERS["accuracy"](r, 1e15),
    "accuracy of -1e15": lambda r: NUMBERS["accuracy"](r, -1e15),
    "every metric 1e15": lambda r: r["result"].update(
        metrics={d: dict.fromkeys(m, 1e15) for d, m in r["result"]["metrics"].items()}
    ),
    "no metrics": lambda r: r["result"].update(metrics={d: {} for d in r["result"]["metrics"]}),
    "1e15 seconds": lambda r: NUMBERS["seconds"](r, 1e15),
    "0 seconds": lambda r: NUMBERS["seconds"](r, 0.0),
    "waiting longer than running": lambda r: r["result"].update(seconds=1.0, seconds_waiting_for_data=1e15),
    "1e15 MB": lambda r: NUMBERS["memory"](r, 1e15),
    "lr of 1e15": lambda r: NUMBERS["lr"](r, 1e15),
    "lr of 1e-320": lambda r: NUMBERS["lr"](r, 1e-320),
    "batches of 10^9": lambda r: r["cell"].update(batch_size=10**9),
    "10^9 samples in the data": lambda r: r["cell"].update(size=10**9),
    "10^4 rounds": lambda r: r["cell"].update(rounds=10**4),
    "the least seed": lambda r: r["cell"].update(seed=-(2**63)),
    "the largest seed": lambda r: r["cell"].update(seed=2**63 - 1),
    "an event after the end": lambda r: r["result"].update(events=[["collapse", 10**12], ["recovered", 0]]),
    "an event of no kind": lambda r: r["result"].update(events=[["", 0]]),
    "10^5 events": lambda r: r["result"].update(events=[["collapse", i] for i in range(10**5)]),
    "10^5 bad images": lambda r: r["result"].update(bad_images=10**5),
    "hyperparameters that are not finite": lambda r: r["cell"].update(hyper={"lr": float("inf"), "keep": float("nan")}),
    "a hyperparameter of 10^400": lambda r: r["cell"].update(hyper={"lr": 10**400}),
    "1000 hyperparameters": lambda r: r["cell"].update(hyper={f"x{i}": i for i in range(1000)}),
    "a list of 10^4 values": lambda r: r["cell"].update(hyper={"lr": [0.5] * 10**4}),
    "health in texts": lambda r: r["result"].update(health={"collapses": "<script>alert(1)</script>", "state": None}),
    "health with escapes": lambda r: r["result"].update(health={"collapses": "\x1b[31m\n"}),
    "health in lists": lambda r: r["result"].update(health={"collapses": [[[1]]], "steps": {"a": 1}}),
    "health of 10^400": lambda r: r["result"].update(health={"collapses": 10**400, "steps": -1}),
    "health not finite": lambda r: r["result"].update(health={"collapses": float("nan"), "steps": float("inf")}),
    "1000 corruptions": lambda r: r["cell"].update(corruptions=[f"c{i}" for i in range(1000)]),
    "the same corruption twice": lambda r: r["cell"].update(corruptions=["fog", "fog"]),
    "no corruption": lambda r: r["cell"].update(corruptions=[]),
    "1000 domains": lambda r: many_domains(r, 1000),
    "the same domain twice": lambda r: r["result"].update(domains=r["result"]["domains"] * 2, fresh=[True, False]),
    "never fresh": lambda r: r["result"].update(fresh=[False]),
    "another score": lambda r: r["result"].update(score="energy"),
    "100 packages": lambda r: r["machine"].update(versions={f"p{i}": "1" for i in range(100)}),
    "a severity of None": lambda r: r["cell"].update(severity=None),
    "a key twice": lambda r: r["result"].update({"domains": r["result"]["domains"]}),
}
"""Within the limits of a record, and nothing that a run would write."""


def many_domains(r: dict[str, Any], count: int) -> None:
    (metrics,) = r["result"]["metrics"].values()
    names = [f"d{i}" for i in range(count)]
    r["result"].update(domains=names, fresh=[True] * count, metrics=dict.fromkeys(names, metrics))


SHAPES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a part more": lambda r: r.update(more=1),
    "a field more": lambda r: r["cell"].update(more=1),
    "no cell": lambda r: r.pop("cell"),
    "no machine": lambda r: r.pop("machine"),
    "a text for a cell": lambda r: r.update(cell="tent"),
    "a list for a result": lambda r: r.update(result=[]),
    "no domains": lambda r: r["result"].update(domains=[], fresh=[], metrics={}),
    "domains without metrics": lambda r: r["result"].update(metrics={}),
    "metrics that are numbers": lambda r: r["result"].update(metrics={"fog": 1.0}),
    "a metric in a list": lambda r: NUMBERS["accuracy"](r, [1.0]),
    "a text for domains": lambda r: r["result"].update(domains="fog"),
    "events without steps": lambda r: r["result"].update(events=[["collapse"]]),
    "severity 6": lambda r: r["cell"].update(severity=6),
    "a ratio of 1": lambda r: r["cell"].update(outlier_ratio=1.0),
    "a setting of 0": lambda r: r["cell"].update(setting=0),
    "values in lists in lists": lambda r: r["cell"].update(hyper={"lr": [[1]]}),
    "a table for a value": lambda r: r["cell"].update(hyper={"lr": {}}),
}
WHOLE = {
    "null": "null", "a list": "[]", "a text": '"record"', "a number of 5000 digits": "9" * 5000, "nothing": "",
    "brackets": "[" * 100_000,
    "an object in objects": '{"cell":' * 100_000, "10 MB of spaces": " " * 10**7, "cut": '{"cell": {', "a BOM": "\ufeff{}",
}  # fmt: skip
"""In place of a record."""

KINDS = (
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
)  # fmt: skip
FLOATS = ("confidence", "softmax", "belief", "uncertainty", "entropy", "energy", "norm", "nll", "brier")
Rows = dict[str, torch.Tensor]


def every(rows: Rows, name: str, value: float) -> Rows:
    return {**rows, name: torch.full_like(rows[name], value)}


def but(rows: Rows, name: str, value: torch.Tensor) -> Rows:
    return {**rows, name: value.contiguous()}


BAD_ROWS: dict[str, Callable[[Rows], Rows]] = {
    **{f"{name} as {kind}": lambda rows, name=name, kind=kind: but(rows, name, torch.zeros(len(rows[name]), dtype=kind))
       for name in ("label", "confidence") for kind in KINDS},
    **{f"{name} is {value}": lambda rows, name=name, value=value: every(rows, name, value)
       for name in FLOATS for value in (float("nan"), float("inf")) if name not in ("energy", "norm") or value != value},
    "no rows": lambda rows: {name: column[:0] for name, column in rows.items()},
    "one row less": lambda rows: {name: column[1:] for name, column in rows.items()},
    "a short column": lambda rows: but(rows, "nll", rows["nll"][1:]),
    "a long column": lambda rows: but(rows, "nll", rows["nll"].repeat(2)),
    "two axes": lambda rows: {name: column[:, None].contiguous() for name, column in rows.items()},
    "a scalar": lambda rows: but(rows, "nll", torch.tensor(0.0)),
    "a column less": lambda rows: {name: column for name, column in rows.items() if name != "norm"},
    "a column more": lambda rows: {**rows, "more\x1b[31m\n": rows["nll"].clone()},
    "no columns": lambda rows: {},
    "a domain of -1": lambda rows: every(rows, "domain", -1),
    "a domain of 32767": lambda rows: every(rows, "domain", 32767),
}  # fmt: skip
ODD_ROWS: dict[str, Callable[[Rows], Rows]] = {
    **{f"every {name} {value}": lambda rows, name=name, value=value: every(rows, name, value)
       for name in ("index", "label", "prediction") for value in (-(2**31), -2, 0, 2**31 - 1)},
    **{f"every {name} {value:g}": lambda rows, name=name, value=value: every(rows, name, value)
       for name in FLOATS for value in (-3e38, 3e38, 1e-45)},
    **{f"every {name} {value}": lambda rows, name=name, value=value: every(rows, name, value)
       for name in ("finite", "used") for value in (False, True)},
    "every energy inf": lambda rows: every(rows, "energy", float("inf")),
    "every kind -32768": lambda rows: every(rows, "kind", -32768),
    "every kind 32767": lambda rows: every(rows, "kind", 32767),
    "outliers only": lambda rows: every(rows, "label", -1),
    "one outlier": lambda rows: but(rows, "label", torch.cat([torch.tensor([-1], dtype=torch.int32), rows["label"][1:]])),
}  # fmt: skip
"""Of the right kinds, and nothing that a run would write."""


def forged(record: Callable[[dict[str, Any]], object] | None, rows: Callable[[Rows], Rows] | None, all_: bool) -> Any:
    """Tamper with the first cell, or with all, and make the checksums and names hold."""

    def tamper(here: Place) -> None:
        for path in here.cells[: None if all_ else 1]:
            found, about = apart(path.read_bytes())
            whole = json.loads(about["record"])
            if record is not None:
                record(whole)
            forge(path, json.dumps(whole), found if rows is None else rows(found))

    return tamper


def replaced(text: str) -> Any:
    def tamper(here: Place) -> None:
        forge(here.cells[0], text, apart(here.cells[0].read_bytes())[0])

    return tamper


def reheaded(change: Callable[[dict[str, str]], dict[str, str] | None]) -> Any:
    """Another header on the same rows."""

    def tamper(here: Place) -> None:
        rows, about = apart(here.cells[0].read_bytes())
        here.cells[0].write_bytes(save(rows, change(about)))

    return tamper


def short_samples(r: dict[str, Any]) -> None:
    r["result"].update(samples=0)


def cell_cases() -> Iterator[Case]:
    def bad(name: str, tamper: Any) -> Case:
        return Case("cells", name, tamper, ("left out",))

    def odd(name: str, record: Any, rows: Any = None) -> Case:
        return Case("cells", name, forged(record, rows, True), ("accepted", "refused", "left out"))

    for field, change in TEXTS.items():
        for kind, text in NAMES.items():
            yield bad(f"{field}: {kind}", forged(lambda r, c=change, t=text: c(r, t), None, False))
        for kind, text in ODD.items():
            yield odd(f"{field}: {kind}", lambda r, c=change, t=text: c(r, t))
    for field, change in (COUNTS | NUMBERS).items():
        for value in WRONG:
            fine = (value == 0.5 and field in NUMBERS) or (field, value) in [("lr", None), ("accuracy", -1)]
            if fine:
                continue
            yield bad(f"{field}: {str(value)[:20]}", forged(lambda r, c=change, v=value: c(r, v), None, False))
    for name, change in SHAPES.items():
        yield bad(name, forged(change, None, False))
    for name, text in WHOLE.items():
        yield bad(f"record: {name}", replaced(text))
    for name, change in BAD_ROWS.items():
        yield bad(f"rows: {name}", forged(None, change, False))
    yield bad("rows: none, and none declared", forged(short_samples, BAD_ROWS["no rows"], False))
    yield bad("no header", reheaded(lambda about: None))
    yield bad("no record", reheaded(lambda about: {"sha256": about["sha256"]}))
    yield bad("no checksum", reheaded(lambda about: {"record": about["record"]}))
    yield bad("a false checksum", reheaded(lambda about: {**about, "sha256": "0" * 64}))
    for name, change in ABSURD.items():
        yield odd(name, change)
    for name, change in ODD_ROWS.items():
        yield odd(f"rows: {name}", None, change)
    yield Case("cells", "all bad", forged(lambda r: r.pop("machine"), None, True), ("refused",))


# ---- files and folders of a run ----


OUTSIDE: dict[str, Callable[[Path], object]] = {
    "a link to a folder beside": to("../beside"),
    "a link to a file beside": to("../beside/precious.txt"),
    "a link to a new file beside": to("../beside/new"),
}
DEEPER: dict[str, Callable[[Path], object]] = {
    "a link to a folder beside": to("../../beside"),
    "a link to a file beside": to("../../beside/precious.txt"),
    "a link to a new file beside": to("../../beside/new"),
}
PARTS: dict[str, tuple[str, ...]] = {
    "run.json": ("csv", "compare", "bench"),
    "cells": ("csv", "compare", "bench"),
    "streams": ("csv", "bench"),
    "locks": ("csv", "bench"),
    "report.html": ("page",),
    "report.md": ("bench",),
    "figures": ("figures",),
}
"""Of a run folder, with the commands that meet them."""
VERSIONS: tuple[object, ...] = ("\x1b[31m", "x" * 2**20, 9, None, ["0"], {"a": 1}, "\ud800")
MARKS = (
    *(json.dumps({"format": "come-run-2", "come": version}) for version in VERSIONS),
    *('{"format": "come-run-1", "come": "0.1.0"}', '{"format": ["come-run-2"]}', "[]", "9" * 5000, '"\\ud800"'),
)


def file_cases() -> Iterator[Case]:
    def case(name: str, tamper: Any, may: tuple[str, ...], commands: tuple[str, ...]) -> Case:
        return Case("files", name, tamper, may, commands)

    for name, what in (INSTEAD | OUTSIDE).items():
        for part, commands in PARTS.items():
            may = ("refused",) if part == "run.json" and name != "nothing" else ("refused", "accepted")
            yield case(f"{part}: {name}", lambda here, p=part, w=what: put(here.run / p, w), may, commands)
        yield case(
            f"run: {name}", lambda here, w=what: put(here.run, w), ("refused", "accepted"), ("csv", "compare", "bench")
        )
    for name, what in (INSTEAD | DEEPER).items():
        may = ("accepted",) if name == "nothing" else ("left out",)
        yield case(f"cell: {name}", lambda here, w=what: put(here.cells[0], w), may, ("csv", "compare"))
        for part in ("cell", "lock", "stream"):
            tamper = partial(missing, part=part, what=what)
            yield case(f"{part} of a cell to be run: {name}", tamper, ("accepted", "refused"), ("bench",))
    yield case("figures/*.svg: links to a file beside", figure_links, ("accepted", "refused"), ("figures",))
    for name in ("x", "\x1b[31m", "a\nb", "\udcff", "y" * 240, "=1+1", ".hidden", "<script>alert(1)<script>"):
        tamper = partial(named, name=name)
        yield case(f"a cell named {name[:9]!r}", tamper, ("left out", "accepted"), ("csv", "compare"))
    for text in MARKS:
        tamper = lambda here, t=text: (here.run / "run.json").write_text(t)  # noqa: E731
        yield case(f"run.json is {text[:40]}", tamper, ("refused",), ("csv", "bench"))


def named(here: Place, name: str) -> None:
    """A copy of a cell under another name."""
    shutil.copy(here.cells[0], here.run / "cells" / f"{name}.safetensors")


def missing(here: Place, part: str, what: Callable[[Path], object]) -> None:
    """Take a cell away, so that `come bench` runs it, and put something in place of its file, lock or manifest."""
    cell = here.cells[0]
    cell.unlink()
    streams = sorted((here.run / "streams").iterdir())
    for path in {"cell": [cell], "lock": [here.run / "locks" / f"{cell.stem}.lock"], "stream": streams}[part]:
        put(path, what)


def figure_links(here: Place) -> None:
    """Links where the figures will be, whatever they are called."""
    called(["report", str(here.run), "--figures", "svg"])
    for path in (here.run / "figures").iterdir():
        put(path, to(str(here.beside / "precious.txt")))


# ---- manifests and configurations ----

REPLAY = (
    "bench",
    "--data",
    "fashion:100",
    "--methods",
    "source",
    "--objectives",
    "come",
    "--corruptions",
    "fog",
    "--limit",
    "16",
)
OPEN = ("--setting", "open-world", "--outliers", "fashion-outliers:far")
GIVEN = {
    "outliers": lambda here, good: [*REPLAY, *OPEN, "--replay", str(here.given), "--out", str(here.root / "out")],
    "stream": lambda here, good: [*REPLAY, "--replay", str(here.given), "--out", str(here.root / "out")],
    "config": lambda here, good: [
        "bench",
        "--config",
        str(here.given),
        "--limit",
        "8",
        "--out",
        str(here.root / "out"),
    ],
    "dry": lambda here, good: ["bench", "--config", str(here.given), "--limit", "8", "--dry-run"],
}
ALL: dict[str, Callable[[Place, Path], list[str]]] = {
    **{name: lambda here, good, make=make: make(here.run, good) for name, make in COMMANDS.items()},
    **GIVEN,
}
MANIFEST: dict[str, Any] = {
    "format": "come-stream-2", "data": "fashion:100", "order": [3, 1, 2, 0] * 4, "shifts": [["fog", 5]], "seed": 0, "kinds": [],
    "then": [], "domain": "fog", "outliers": None,
}  # fmt: skip
MANIFESTS: dict[str, dict[str, Any]] = {
    **{f"{field}: {kind}": {field: text} for field in ("data", "domain", "outliers") for kind, text in NAMES.items()
       if not (field == "domain" and not text)},
    **{f"corruption: {kind}": {"shifts": [[text, 5]]} for kind, text in NAMES.items()},
    **{f"{field}: {value!s:.20}": {field: value} for field in MANIFEST for value in WRONG
       if (field, value) not in [("outliers", None), ("kinds", []), ("domain", "1")]},
    **{f"an index of {value}": {"order": [0, value]}
       for value in (-1, 100, 2**31, 2**63, 10**400, 1e999, 0.5, True, "0", None)},
    "no order": {"order": []},
    "no shifts": {"shifts": []},
    "1001 shifts": {"shifts": [["fog", 5]] * 1001},
    "an unknown corruption": {"shifts": [["nosuch", 5]]},
    "severity 6": {"shifts": [["fog", 6]]},
    "a place that is no place": {"kinds": [1] * 16},
    "too few kinds": {"kinds": [0]},
    "outliers without a source": {"kinds": [-1] * 16},
    "outliers of a folder": {"kinds": [-1] * 16, "outliers": "folder:/etc"},
    "outliers that nobody named": {"kinds": [-1] * 16, "outliers": "fashion-outliers:far"},
    "outliers of a pickle": {"kinds": [-1] * 16, "outliers": "torchvision:LSUN:/"},
    "other data": {"data": "folder:/etc"},
    "another seed": {"seed": 1},
    "another corruption": {"shifts": [["snow", 5]], "domain": "snow"},
    "another format": {"format": "come-stream-9"},
    "a field more": {"more": 1},
}  # fmt: skip
quoted = partial(json.dumps, ensure_ascii=False)
CONFIGS: dict[str, str] = {
    **{f"{field}: {kind}": f"{field} = {quoted(text)}" for field in ("data", "model", "setting", "checkpoint")
       for kind, text in (NAMES | ODD).items()},
    **{f"{field}: {kind}": f"{field} = [{quoted(text)}]" for field in ("methods", "objectives", "corruptions")
       for kind, text in (NAMES | ODD).items()},
    **{f"a key: {kind}": f"{quoted(text)} = 1" for kind, text in (NAMES | ODD).items()},
    **{f"a hyperparameter: {kind}": f"methods = ['tent']\nset.tent.{quoted(text)} = 1" for kind, text in NAMES.items()},
    **{f"{field} is {value}": f"{field} = {value}"
       for field in ("batch-size", "severity", "seeds", "imbalance", "outlier-ratio", "rounds")
       for value in ("nan", "inf", "-1", "9" * 25, "'1'", "true", "[]", "{}", "1979-05-27", "[nan]")},
    "an output folder": "out = '/tmp/elsewhere'",
    "a checkpoint that is a device": "model = 'timm:test_resnet'\ncheckpoint = '/dev/zero'",
    "a checkpoint that is no checkpoint": "model = 'timm:test_resnet'\ncheckpoint = '/etc/passwd'",
    "data that are no data": "data = 'folder:/proc'",
    "source data that are none": "methods = ['eata']\nsource-data = 'folder:/dev'",
    "a model of somebody": "model = 'timm:hf-hub:somebody/something'",
    "a table for a list": "methods = {a = 1}",
    "10^4 times one method": "methods = [" + "'tent'," * 10**4 + "]",
    "brackets": "model = " + "[" * 100_000,
    "points": "[" + "a." * 5000 + "a]",
    "a number of 5000 digits": "limit = " + "9" * 5000,
    "a number of 5000 hexadecimal digits": "batch-size = 0x" + "f" * 5000,
    "2 MB": "model = '''" + "x" * 2**21 + "'''",
    "the same key twice": "limit = 8\nlimit = 9",
    "no date": "imbalance = 2024-02-31",
}  # fmt: skip


def given_cases() -> Iterator[Case]:
    may = ("refused",)
    for command in ("stream", "config"):
        for name, what in INSTEAD.items():
            if command == "stream" or name not in ("no bytes", "/proc/self/mem"):  # no bytes are a configuration
                yield Case("given", f"{command}: {name}", lambda here, w=what: put(here.given, w), may, (command,))
    for name, changes in MANIFESTS.items():
        text = json.dumps(MANIFEST | changes)
        yield Case("given", f"stream, {name}", lambda here, t=text: here.given.write_text(t), may, ("stream",))
    for field in MANIFEST:
        text = json.dumps({key: value for key, value in MANIFEST.items() if key != field})
        yield Case("given", f"stream without {field}", lambda here, t=text: here.given.write_text(t), may, ("stream",))
    for name, order in {"outliers only": range(16), "outliers that are not there": range(10**9, 10**9 + 16)}.items():
        text = json.dumps(MANIFEST | {"kinds": [-1] * 16, "outliers": "fashion-outliers:far", "order": list(order)})
        tamper = lambda here, t=text: here.given.write_text(t)  # noqa: E731
        yield Case("given", f"stream of {name}", tamper, ("accepted", "refused"), ("outliers",))
    for name, text in CONFIGS.items():
        content = text.encode("utf-8", "surrogatepass")
        tamper = lambda here, c=content: here.given.write_bytes(c)  # noqa: E731
        yield Case("given", f"config, {name}", tamper, may, ("config", "dry"))


# ---- all ----

GROUPS = {"cells": cell_cases, "files": file_cases, "given": given_cases}


def finished_run(path: Path) -> Path:
    """A run to tamper with."""
    torch.set_num_threads(1)
    run(PLAN, path)
    assert len(RunFolder.existing(path).records()) == 4
    for manifest in (path / "streams").iterdir():
        Stream.load(manifest)
    return path


def count(
    group: str, good: Path, commands: Callable[[int, Case], tuple[str, ...]], show: bool = False
) -> tuple[Counter[str], list[str]]:
    """Run the cases of a group with the commands that are chosen for each: how many ended how, and what was wrong."""
    found: Counter[str] = Counter()
    wrong: list[str] = []
    for number, case in enumerate(GROUPS[group]()):
        for command in commands(number, case):
            end = ended(case, command, good)
            found[end.how] += 1
            wrong += [f"{case.group}: {case.name} ({command}): {what} | {end.said[:200]}" for what in end.wrong]
            if show:
                print(
                    f"{end.how:9} {end.seconds:5.2f} {case.name} ({command}): {end.said[:300]!r} {end.wrong or ''}",
                    flush=True,
                )
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", default=list(GROUPS))
    parser.add_argument(
        "--slow", type=int, default=10, help="every so many-th cell meets the page and the figures, too"
    )
    parser.add_argument("--show", action="store_true", help="every case, and what was said")
    options = parser.parse_args()
    failed = 0

    def chosen(number: int, case: Case) -> tuple[str, ...]:
        fewer = case.group == "cells" and number % options.slow
        return tuple(name for name in case.commands if not (fewer and name in ("page", "figures")))

    with tempfile.TemporaryDirectory() as root:
        good = finished_run(Path(root) / "good")
        for group in options.groups:
            began = time.perf_counter()
            found, wrong = count(group, good, chosen, options.show)
            print(
                f"{group}: {found.total()} cases, {dict(found)}, {len(wrong)} wrong, {time.perf_counter() - began:.0f} s"
            )
            print("\n".join(f"  {line}" for line in wrong))
            failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

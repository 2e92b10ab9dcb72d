"""`come bench`: measure methods and objectives under shift."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from come.bench import Bench, Plan, RunFolder, protocols
from come.bench.cell import BARE, HOW, WHAT
from come.bench.cli import options as opt
from come.bench.cli.lists import listed
from come.bench.cli.watch import run_watched, say_doubt, say_refused, say_unfinished, show_results
from come.bench.data import Stream
from come.bench.folder import check_space
from come.bench.plan import PRESETS, parse_shard, parse_together, preset, typed
from come.bench.record import BYTES
from come.errors import ConfigError
from come.integrations.log import KINDS, opened, parse
from come.methods import DEFAULT
from come.metrics import SCORES

SORTED = f"come bench --setting imbalanced --methods source,tent,tent:{BARE},{DEFAULT}"
"""What to run after the default, whose batches hold all classes."""
OWN_GRID = {"setting", "methods", "corruptions"}  # whoever chooses one of these does not want the default preset


@opt.with_plan
def bench(
    given: dict[str, Any],
    preset_name: Annotated[
        str | None,
        opt.option(
            "; ".join(f"[bold]{k}[/]: {v[0]}" for k, v in PRESETS.items())
            + ". \\[quick, unless there is --setting, --methods or --corruptions]",
            "--preset",
            panel=WHAT,
        ),
    ] = None,
    protocol_name: Annotated[
        str | None,
        opt.option(
            "Follow a protocol, which fixes all that decides a number but --data. See [bold]come protocol list[/].",
            "--protocol",
            panel=WHAT,
            metavar="NAME",
        ),
    ] = None,
    replay: Annotated[
        list[Path] | None,
        opt.option("Replay a stream of an earlier run: a file in streams/. Repeatable.", panel=HOW, metavar="FILE"),
    ] = None,
    score: Annotated[str, opt.option(f"What FPR ranks samples by: {', '.join(SCORES)}.", panel=HOW)] = "confidence",
    config: opt.Config = None,
    on_bad_image: opt.OnBadImage = "raise",
    device: opt.Device = "cpu",
    workers: opt.Workers = None,
    jobs: opt.Jobs = None,
    together: opt.Together = "1",
    engine: opt.Engine = "local",
    address: opt.Address = None,
    cpus: opt.Cpus = None,
    gpus: opt.Gpus = None,
    shard: opt.Shard = None,
    out: opt.Out = None,
    resume: Annotated[bool, opt.where("Keep finished cells, or run all again.", "--resume/--fresh")] = True,
    log: Annotated[
        str | None, opt.where(f"Also log metrics along the stream of each cell: {' or '.join(KINDS)}.", metavar="SPEC")
    ] = None,
    dry_run: opt.DryRun = False,
    debug: opt.Debug = False,
) -> None:
    """Measure methods and objectives under corruption; resumable, with a table and a report.

    Everything is checked before the first cell runs. Run the same command again to go on where it stopped: finished cells are
    kept. A cell that fails stops no other; the exit status is then 1, and the next run tries it again.
    """
    opt.check_score(score)
    if log is not None:
        parse(log)
    protocol = None if protocol_name is None else protocols.get(protocol_name)
    chosen = _merged(opt.from_toml(config) if config else {}, typed(given))
    if (
        preset_name is None
        and protocol is None
        and not chosen.keys() & OWN_GRID
        and chosen.get("task") != "segmentation"
    ):
        preset_name = "quick"
    options = _merged(preset(preset_name, chosen.get("guard", True)) if preset_name else {}, chosen)
    if protocol is not None and (replay or on_bad_image != "raise"):
        other = "--replay" if replay else "--on-bad-image"
        raise ConfigError(
            f"protocol {protocol.name} fixes the images and their order; leave {other} out, or --protocol"
        )
    plan = Plan(**options) if protocol is None else protocol.plan_for(options)
    if plan.task == "segmentation" and (log is not None or score != "confidence"):
        raise ConfigError(
            f"{'score' if log is None else 'log'} has no effect with --task segmentation, which records counts of pixels; "
            "leave it out"
        )
    watched = Bench(
        plan,
        device=device,
        workers=workers,
        jobs=jobs,
        together=parse_together(together),
        on_bad_image=on_bad_image,  # type: ignore[arg-type]
        streams=[Stream.load(path) for path in replay or ()],
        shard=parse_shard(shard) if shard else (0, 1),
        cluster=opt.cluster_of(engine, address, cpus, gpus),
        protocol=protocol,
    )
    path = out or Path("runs") / (plan.slug if protocol is None else f"{protocol.name}-{plan.slug[-8:]}")
    console = Console(highlight=False)
    if dry_run:
        show_grid(console, watched, path)
        return
    with opened(log) if log else nullcontext() as write:
        folder = RunFolder(path)
        records = run_watched(console, watched, folder, fresh=not resume, log=write)
    if shard:  # with what the others have done so far
        records = [record for cell in watched.planned if (record := folder.record(cell)) is not None]
    if records:
        metric = "mIoU" if plan.task == "segmentation" else "accuracy"
        title = f"{plan.model} on {plan.data}, {plan.setting}{_severity(plan)}, {metric} (%)"
        show_results(console, folder, records, title, ["come", *sys.argv[1:]], score)
        if preset_name == "quick":
            said = "[dim]on streams sorted by class, methods without the guard (bare) lose accuracy:[/]"
            console.print(f"{said} {SORTED}", soft_wrap=True)
    over = {cell.key for cell in (*watched.cells, *(r.cell for r in records))}
    missing = [c.title for c in watched.planned if c.key not in over and c.method not in watched.refused]
    say_unfinished(console, missing, [str(failure) for failure in watched.failed])
    if watched.failed:
        raise typer.Exit(1)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The second wins; hyperparameters are merged one by one."""
    hyper = dict(first.get("hyper", {}))
    for method, values in second.get("hyper", {}).items():
        hyper[method] = hyper.get(method, {}) | values
    return {**first, **second, "hyper": hyper}


def show_grid(console: Console, bench: Bench, folder: Path) -> None:
    """Show what would be run, and where results would be written."""
    cells, plan = [cell for cell in bench.cells if cell.method not in bench.refused], bench.plan
    rows = [("cell", "method", "objective", "corruptions", "seed", "hyperparameters")]
    for cell in cells:
        hyper = " ".join(f"{k}={v}" for k, v in cell.hyper.items())
        rows.append((cell.key, cell.method, cell.objective, " ".join(cell.corruptions), str(cell.seed), hyper))
    console.print(listed(rows))
    say_refused(console, bench.refused)
    if order := bench.inputs.class_order:
        console.print(f"classes: {order}", markup=False)
    if doubt := bench.doubt():
        say_doubt(console, doubt)
    check_space(folder, cells)
    within = f" restricted to {bench.inputs.restricted} classes" if bench.inputs.restricted else ""
    samples = sum(len(episode.stream) for cell in cells for episode in bench.inputs.episodes(cell))
    console.print(
        f"{len(cells)} cells, {samples} samples in all, {plan.model}{within} on {plan.data}{_severity(plan)}, batch "
        f"{plan.batch_size}; would be written to {folder}, about {samples * BYTES[plan.task] / 2**20:.1f} MB of rows",
        markup=False,
    )


def _severity(plan: Plan) -> str:
    return f", severity {plan.severity}" if plan.corruptions else ""

"""Every table and figure of the paper: the grid that makes it, and what came out next to what the paper printed.

On ImageNet-C with the paper's model numbers can be compared one by one. On other data, such as the embedded `glyphs`, only the
trend can: does COME help the same methods, by sign, and do the methods come in the same order, by rank correlation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from come import corruptions
from come.bench import Plan, Record, paper
from come.bench.paper import PaperTable
from come.bench.plan import QUICK
from come.errors import unknown

PAPER_MODELS = {"ViT-B/16": "timm:vit_base_patch16_224", "ResNet-50-BN": "timm:resnet50"}
GLYPH_MODELS = {"ViT-B/16": "glyphs-vit", "ResNet-50-BN": "glyphs-resnet"}
KEEPS = ("tent", "tent:keep=0.9", "tent:keep=0.7", "tent:keep=0.5", "tent:keep=0.3", "tent:keep=0.1")
SUBSTANTIAL = 0.5
"""Points from which the paper calls a difference substantial; smaller ones have no sign."""


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper and the plan that regenerates it.

    Example:
        >>> get("ablation").objectives
        ('em', 'come:freeze_norm=false', 'em:freeze_norm=true', 'come')
    """

    name: str
    title: str
    tables: tuple[str, ...] = ()
    """The paper's tables that the run is laid beside; none for a figure."""
    methods: tuple[str, ...] = ()
    """Those of the first table, if none are given."""
    objectives: tuple[str, ...] = ("em", "come")
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the plan."""
    model: str = "ViT-B/16"

    def plan(self, *, model: str | None = None, data: str = "glyphs", full: bool = False, **options: Any) -> Plan:
        """The grid on the user's model and data.

        Args:
            model: by default the paper's, or the embedded one of its family on `glyphs`.
            data: by default `glyphs`.
            full: all corruptions and images also on `glyphs`, where by default one corruption of each group is used, and 1,000
                images if MEMO or TEA are among the methods, so that a CPU gets through.
            **options: further options of `Plan`; they win.
        """
        embedded = data.partition(":")[0] == "glyphs"
        wanted = self.methods or tuple(dict.fromkeys(row.method for row in paper.get(self.tables[0]).rows))
        chosen: dict[str, Any] = {
            "model": model or (GLYPH_MODELS if embedded else PAPER_MODELS)[self.model],
            "data": data,
            "methods": tuple(name for name in wanted if name != "average"),
            "objectives": self.objectives,
        }
        small = embedded and not full
        if self.options.get("setting", "standard") not in ("open-world", "in-distribution"):
            chosen["corruptions"] = QUICK if small else corruptions.names("standard")
        chosen |= self.options | {key: value for key, value in options.items() if value is not None}
        if small and {"memo", "tea"} & set(chosen["methods"]):
            chosen.setdefault("limit", 1000)
        return Plan(**chosen)


EXPERIMENTS = {
    e.name: e
    for e in (
        Experiment("standard", "accuracy and FPR under each corruption", ("standard", "standard-fpr")),
        Experiment("openworld", "with outliers, half of the stream", ("openworld",), options={"setting": "open-world"}),
        Experiment("openworld-0.3", "with outliers, 30% of the stream", ("openworld-0.3",),
                   options={"setting": "open-world", "outlier_ratio": 0.3}),
        Experiment("openworld-resnet", "with outliers, a BatchNorm model", ("openworld-resnet",),
                   options={"setting": "open-world"}, model="ResNet-50-BN"),
        Experiment("lifelong", "one corruption after the other, never reset", ("lifelong", "lifelong-fpr"),
                   options={"setting": "lifelong"}),
        Experiment("ablation", "opinion (SL) and held norm (UC), each on and off", ("ablation",), ("tent",),
                   ("em", "come:freeze_norm=false", "em:freeze_norm=true", "come")),
        Experiment("in-distribution", "clean images", ("in-distribution",), options={"setting": "in-distribution"}),
        Experiment("imbalanced", "sorted by class", ("imbalanced",), options={"setting": "imbalanced"}),
        Experiment("mixed", "all corruptions in one stream", ("mixed",), options={"setting": "mixed"}),
        Experiment("cost", "time and memory", ("cost",)),
        Experiment("figure-collapse", "Tent on the m% of samples with the lowest entropy", methods=KEEPS,
                   objectives=("em",)),
        Experiment("figure-trajectories", "Tent and SAR along the stream, EM against COME", methods=("source", "tent", "sar")),
        Experiment("figure-confidence", "confidence of correct, wrong and outlier samples", methods=("source", "tent", "sar"),
                   options={"setting": "open-world"}),
    )
}  # fmt: skip


def get(name: str) -> Experiment:
    """The experiment of that name.

    Example:
        >>> get("lifelong").plan().setting
        'lifelong'
    """
    if name not in EXPERIMENTS:
        raise unknown("table or figure", name, EXPERIMENTS, hint="'come reproduce --list' shows all")
    return EXPERIMENTS[name]


# ---- paper and measured ----


@dataclass(frozen=True)
class Line:
    """One method under one objective: the paper's number and ours; None where there is none."""

    method: str
    objective: str
    paper: float | None
    measured: float | None


@dataclass(frozen=True)
class Comparison:
    """A metric of a table, the paper's next to ours, and how well they agree.

    Args:
        table: name of the paper's table.
        domain: the column, or "average" or "worst".
        metric: "accuracy", "fpr", "memory_mb" or "seconds"; percent, or relative to No Adapt.
        lines: one for each method and objective.
    """

    table: str
    domain: str
    metric: str
    lines: tuple[Line, ...]

    def changes(self) -> list[tuple[str, float, float]]:
        """(method, change from em to come in the paper, measured) for methods that have all four numbers."""
        found = {(line.method, line.objective): line for line in self.lines}
        rows = []
        for method in dict.fromkeys(line.method for line in self.lines):
            em, come = found.get((method, "em")), found.get((method, "come"))
            numbers = [v for line in (em, come) if line for v in (line.paper, line.measured)]
            if len(numbers) == 4 and None not in numbers:
                a, b, c, d = (float(v) for v in numbers if v is not None)
                rows.append((method, c - a, d - b))
        return rows

    def rank_correlation(self) -> float | None:
        """Spearman's, over the lines that have both numbers; None for fewer than three, or if all are equal."""
        pairs = [
            (line.paper, line.measured) for line in self.lines if line.paper is not None and line.measured is not None
        ]
        if len(pairs) < 3:
            return None
        theirs, ours = _ranks([p for p, _ in pairs]), _ranks([m for _, m in pairs])
        a, b = fmean(theirs), fmean(ours)
        product = sum((x - a) * (y - b) for x, y in zip(theirs, ours, strict=True))
        spread = (sum((x - a) ** 2 for x in theirs) * sum((y - b) ** 2 for y in ours)) ** 0.5
        return product / spread if spread else None

    def agreement(self) -> str:
        """In words: for how many methods COME changes the number the same way, and the rank correlation."""
        words = []
        changes = self.changes()
        if changes and self.metric in ("accuracy", "fpr"):
            clear = [(p, m) for _, p, m in changes if abs(p) >= SUBSTANTIAL and abs(m) >= SUBSTANTIAL]
            same = sum((p > 0) == (m > 0) for p, m in clear)
            if clear:
                words.append(
                    f"COME minus EM: same sign for {same} of {len(clear)} methods where both change by {SUBSTANTIAL} or more"
                )
            if len(clear) < len(changes):
                words.append(f"{len(changes) - len(clear)} of {len(changes)} methods change by less in one of the two")
        rank = self.rank_correlation()
        if rank is not None:
            words.append(f"rank correlation of all rows {rank:+.2f}")
        return "; ".join(words)


def compare(table: PaperTable, records: Iterable[Record]) -> list[Comparison]:
    """Lay the records beside a table: column by column where the columns are the same, and the averages."""
    records = list(records)
    ours = {(r.cell["method"], r.cell["objective"]): [] for r in records}  # type: dict[tuple[str, str], list[Record]]
    for record in records:
        ours[record.cell["method"], record.cell["objective"]].append(record)
    found = []
    for column in table.columns:
        lines = []
        for row in table.rows:
            theirs = table.value(row.method, row.objective, column.domain, column.metric)
            mine = _measured(ours.get((row.method, row.objective), []), column.domain, column.metric)
            if column.metric in ("memory_mb", "seconds"):
                base = table.value("source", "em", column.domain, column.metric)
                ours_base = _measured(ours.get(("source", "em"), []), column.domain, column.metric)
                theirs = theirs / base if theirs is not None and base else None
                mine = mine / ours_base if mine is not None and ours_base else None
            lines.append(Line(row.method, row.objective, theirs, mine))
        if any(line.measured is not None for line in lines):
            found.append(Comparison(table.name, column.domain, column.metric, tuple(lines)))
    return found


def _measured(records: Sequence[Record], domain: str, metric: str) -> float | None:
    """Our number in the paper's unit, mean over seeds; None if it was not measured."""
    if not records:
        return None
    if metric == "memory_mb":
        return max(float(r.result["peak_memory_mb"]) for r in records)
    if metric == "seconds":
        return sum(float(r.result["seconds"]) for r in records)
    seeds: dict[int, dict[str, dict[str, float]]] = {}
    for record in records:
        seeds.setdefault(record.cell["seed"], {}).update(record.result["metrics"])
    # The paper's lifelong FPR is over everything seen so far.
    key = "fpr_so_far" if metric == "fpr" and records[0].cell["setting"] == "lifelong" else metric
    values = []
    for domains in seeds.values():
        column = [100 * m[key] for m in domains.values()]
        if domain == "average":
            values.append(fmean(column))
        elif domain == "worst":
            values.append(max(column) if metric == "fpr" else min(column))
        elif domain in domains:
            values.append(100 * domains[domain][key])
    return fmean(values) if values else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties averaged.

    >>> _ranks([3.0, 1.0, 3.0])
    [2.5, 1.0, 2.5]
    """
    return [1 + sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]


def comparable(plan: Plan, experiment: Experiment) -> bool:
    """Whether numbers can be compared one by one: ImageNet-C and the paper's model."""
    return plan.data.startswith("imagenet-c") and plan.model == PAPER_MODELS[experiment.model]

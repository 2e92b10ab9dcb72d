"""Every table and figure of the paper, and the plan that regenerates it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from come import corruptions
from come.bench import paper
from come.bench.plan import QUICK, Plan
from come.errors import unknown

PAPER_MODELS = {"ViT-B/16": "timm:vit_base_patch16_224", "ResNet-50-BN": "timm:resnet50"}
EMBEDDED_MODELS = {"ViT-B/16": "fashion-vit", "ResNet-50-BN": "fashion-resnet-bn"}
KEEPS = ("tent", "tent:keep=0.9", "tent:keep=0.7", "tent:keep=0.5", "tent:keep=0.3", "tent:keep=0.1")


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper and the plan that regenerates it.

    Example:
        >>> get("ablation").objectives
        ('em', 'come:freeze_norm=false', 'em:freeze_norm=true', 'come')
    """

    name: str
    title: str
    tables: tuple[str, ...] = ()  # the paper's tables that the run is compared with; none for a figure
    methods: tuple[str, ...] = ()  # by default those of the first table
    objectives: tuple[str, ...] = ("em", "come")
    options: dict[str, Any] = field(default_factory=dict)  # further options of the plan
    model: str = "ViT-B/16"

    def plan(self, *, model: str | None = None, data: str = "fashion", full: bool = False, **options: Any) -> Plan:
        """The plan for the user's model and data; options are further fields of `Plan` and override the experiment's.

        The model is by default the paper's or, on `fashion`, the embedded one of its family. `full` uses all corruptions and
        images of `fashion`, not one corruption of each group and 1,000 images for a CPU.
        """
        embedded = data.partition(":")[0] == "fashion"
        wanted = self.methods or tuple(dict.fromkeys(row.method for row in paper.get(self.tables[0]).rows))
        chosen: dict[str, Any] = {
            "model": model or (EMBEDDED_MODELS if embedded else PAPER_MODELS)[self.model],
            "data": data,
            "methods": tuple(name for name in wanted if name != "average"),
            "objectives": self.objectives,
            "guard": False,  # as published
        }
        small = embedded and not full
        if self.options.get("setting", "standard") not in ("open-world", "in-distribution"):
            chosen["corruptions"] = QUICK if small else corruptions.names("standard")
        chosen |= self.options | {key: value for key, value in options.items() if value is not None}
        if small:
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


def comparable(plan: Plan, experiment: Experiment) -> bool:
    """Whether numbers can be compared one by one: the paper's model on ImageNet-C."""
    return plan.data.startswith("imagenet-c") and plan.model == PAPER_MODELS[experiment.model]

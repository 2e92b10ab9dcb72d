"""What is kept of each image where each pixel gets a class: counts that all metrics follow from, and a few pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from come.bench.data import Batch
from come.bench.data.preprocess import Preprocess
from come.bench.record import DENSE_COLUMNS, PICTURES, Rows
from come.images.normalization import Normalization
from come.method import Step
from come.metrics.segmentation import binned, binned_aurc, confusion, miou, pixel_accuracy, selective_of
from come.model.inputs import UNKNOWN

SHOWN = 2
"""Pictures of a cell: the last images of its last stream."""
LONGEST = 256
"""Side of a picture, in pixels."""


class DenseTable:
    """The rows of a cell, image by image, so that the memory is that of one image at the size of its labels.

    Args:
        preprocess: what the images were normalized by.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        self._normalization = Normalization.of(preprocess.normalization)
        self._rows, self._pictures = list[Rows](), list[Rows]()

    def add(self, step: Step, batch: Batch, domain: int) -> None:
        """Note what a step said of a batch."""
        for i, label in enumerate(batch.labels):
            row, picture = self._of(step.logits[i : i + 1], label[None])
            if step.valid is not None:
                row["finite"] &= step.valid[i].cpu()
            used = torch.tensor(0.0) if step.used is None else step.used[i].float().mean()
            marks = {"used": used, "index": batch.indices[i], "kind": batch.kinds[i], "domain": torch.tensor(domain)}
            row |= {name: value.cpu()[None] for name, value in marks.items()}
            self._rows.append({name: row[name].to(kind) for name, kind in DENSE_COLUMNS.items()})
            pixels = self._normalization.images(batch.images[i].cpu())
            picture["shown_image"] = (255 * pixels.clamp(0, 1)).round()[None]
            self._pictures.append(_small(picture))
        del self._pictures[:-SHOWN]

    def _of(self, logits: Tensor, label: Tensor) -> tuple[Rows, Rows]:
        """The counts of one image, and its picture."""
        z = F.interpolate(logits.float(), label.shape[1:], mode="bilinear")
        finite = z.isfinite().all()
        z = torch.where(finite, z, UNKNOWN)
        k, evidence = z.shape[1], z.logsumexp(dim=1)
        most, prediction = z.max(dim=1)
        softmax = (most - evidence).exp()
        belief = (most - torch.logaddexp(evidence, evidence.new_tensor(math.log(k)))).exp()
        right, counted = prediction == label, label >= 0
        row = {
            "confusion": confusion(prediction, label, k),
            "softmax": binned(softmax, right, counted),
            "belief": binned(belief, right, counted),
        }
        row = {name: value.cpu() for name, value in row.items()} | {"finite": finite.cpu()[None]}
        return row, {"shown_label": label, "shown_prediction": prediction, "shown_doubt": 255 * (1 - softmax)}

    def rows(self) -> Rows:
        """All of them, on the host; empty if there were no batches."""
        if not self._rows:
            return {}
        found = {name: torch.cat([row[name] for row in self._rows]) for name in DENSE_COLUMNS}
        size = self._pictures[-1]["shown_image"].shape[-2:]
        shown = [one for one in self._pictures if one["shown_image"].shape[-2:] == size]
        return found | {name: torch.cat([one[name] for one in shown]) for name in PICTURES}


def _small(picture: Rows) -> Rows:
    """The same at the size of a picture: every few pixels, since classes have no means."""
    height, width = picture["shown_label"].shape[-2:]
    scale = min(1.0, LONGEST / max(height, width))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    found = {}
    for name, kind in PICTURES.items():
        value = picture[name].float().cpu()
        value = value if value.ndim == 4 else value[:, None]
        value = F.interpolate(value, size, mode="nearest")
        found[name] = (value if name == "shown_image" else value[:, 0]).to(kind)
    return found


def dense_metrics(rows: Rows, domains: Sequence[str]) -> dict[str, dict[str, float]]:
    """All metrics of each domain, over all of its pixels with a label: of a stream without one there are none."""
    found: dict[str, dict[str, float]] = {}
    for i, domain in enumerate(domains):
        here = {name: rows[name][rows["domain"] == i] for name in DENSE_COLUMNS}
        counts, n = here["confusion"].sum(dim=0), len(here["index"])
        found[domain] = {"samples": float(n)}
        if n:
            found[domain]["used"] = here["used"].double().mean().item()
            found[domain]["diverged"] = 1 - here["finite"].double().mean().item()
        if counts.sum():
            found[domain] |= {"miou": miou(counts).item(), "accuracy": pixel_accuracy(counts).item()}
            found[domain] |= selective_of(here["softmax"].double().sum(dim=0))
            found[domain]["aurc_belief"] = binned_aurc(here["belief"].double().sum(dim=0))
            found[domain]["dominant_share"] = (counts.sum(dim=0).max() / counts.sum()).item()
    return found

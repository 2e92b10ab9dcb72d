"""Does the unadapted model fit the data? A wrong order of the classes costs all of its accuracy, without an error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from come.abstain import binomial_cdf
from come.adapter import adapt
from come.bench.data import Source
from come.bench.models import Model

LOOKED_AT = 256  # images that are looked at, at most
AT_ONCE = 32
PATIENCE = 3.0  # seconds after which no more of them are
UNLIKELY = 0.01
ANOTHER = 0.5  # the share that is right in another order of the classes, from which on it is worth a sentence
FOR_EACH = 5  # images of a class, on average, from which another order of the classes can be seen


def doubt(
    model: Model,
    source: Source,
    indices: Sequence[int],
    shift: tuple[str | None, int],
    device: torch.device,
    order: str = "",
) -> str:
    """Why a model may not fit the data: it is near chance on the first of some samples; empty if it is not.

    The order of these samples must know nothing of their classes. A corruption is for data that holds corrupted images only;
    None is clean. `order` is that of the classes, in words, where they have names.
    """
    seen = look(model, source, indices[:LOOKED_AT], shift, device)
    samples, classes = len(seen.labels), model.num_classes
    if not near_chance(seen.right, samples, classes):
        return ""
    shifted = "" if shift[0] is None else f" with {shift[0]}, severity {shift[1]}"
    said = (
        f"without adaptation {model.name} is right for {seen.right / samples:.1%} of {samples} images of {source.name}"
        f"{shifted}; guessing is right for {1 / classes:.1%}."
    )
    if (share := right_in_another_order(seen, classes)) > ANOTHER:
        said += f" With the classes in another order {share:.1%} would be right."
    named = f" The order is {order}; if the model's outputs have another, give --classes FILE, their names in order."
    said += named if order else " The labels must be numbered as the model's outputs are."
    hard = " and the images are not that hard" if shifted else ""
    return f"{said} If it is right{hard}, check --normalization (or --mean and --std) and --image-size."


class Look(NamedTuple):
    """Labels (N,) of some images, and what a model answers (N,)."""

    labels: Tensor
    answers: Tensor

    @property
    def right(self) -> int:
        """How many answers are right."""
        return int((self.labels == self.answers).sum())


def look(
    model: Model, source: Source, indices: Sequence[int], shift: tuple[str | None, int], device: torch.device
) -> Look:
    """Ask a model about images of a source: all of `indices`, or as many as it answers in time."""
    source_model = adapt(model.module, "source", guard=False)
    labels, answers, end = list[Tensor](), list[Tensor](), time.monotonic() + PATIENCE
    for begin in range(0, len(indices), AT_ONCE):
        loaded = source.load(indices[begin : begin + AT_ONCE], *shift)
        if len(loaded.labels):
            labels.append(loaded.labels.cpu())
            answers.append(source_model(model.preprocess(loaded.images.to(device))).argmax(dim=1).cpu())
        if time.monotonic() > end:
            break
    none = torch.empty(0, dtype=torch.int64)
    return Look(torch.cat([none, *labels]), torch.cat([none, *answers]))


def near_chance(right: int, samples: int, classes: int) -> bool:
    """Whether so few right answers are what guessing gives, or a wrong order of the classes.

    Guessing reaches a share of 1/K, give or take what is likely with so few samples. A wrong order leaves one of K classes in
    its place on average, and more than two in one of twelve orders: so 2/K is near chance, too, or half if that is less. A
    model halfway between chance and no error must be unlikely to be as low, else the samples are too few to tell.

    Example:
        >>> near_chance(34, 256, 10), near_chance(90, 256, 10), near_chance(0, 2, 10)
        (True, False, False)
    """
    if classes < 2 or not samples:
        return False
    chance = 1 / classes
    guessed = right == 0 or 1 - binomial_cdf(right - 1, samples, chance) > UNLIKELY
    low = guessed or right <= samples * min(2 * chance, 0.5)
    return low and binomial_cdf(right, samples, (1 + chance) / 2) < UNLIKELY


def right_in_another_order(seen: Look, classes: int) -> float:
    """The share that would be right if each class were the one that it is mostly taken for; 0 where that is no other order.

    Example:
        >>> labels = torch.arange(100) % 4
        >>> right_in_another_order(Look(labels, 3 - labels), 4)
        1.0
    """
    if len(seen.labels) < FOR_EACH * classes:
        return 0.0
    counts = torch.bincount(seen.labels * classes + seen.answers, minlength=classes * classes).view(classes, classes)
    most, taken_for = counts[torch.unique(seen.labels)].max(dim=1)
    return most.sum().item() / len(seen.labels) if len(torch.unique(taken_for)) == len(taken_for) else 0.0

"""Logs for scalars: functions of (name, value, step) that write to TensorBoard or to Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from come.callbacks import Log
from come.errors import ConfigError, missing, shown

KINDS = ("tensorboard:FOLDER", "wandb:PROJECT")


def parse(spec: str) -> tuple[str, str]:
    """Split "tensorboard:FOLDER" or "wandb:PROJECT".

    Example:
        >>> parse("tensorboard:runs/tb")
        ('tensorboard', 'runs/tb')
    """
    kind, _, place = spec.partition(":")
    if kind not in [known.partition(":")[0] for known in KINDS] or not place:
        raise ConfigError(f"log must be {' or '.join(KINDS)}, got {shown(spec)}")
    return kind, place


@contextmanager
def opened(spec: str) -> Iterator[Log]:
    """Open a log for the length of a `with` block, which flushes it at the end.

    The specification is "tensorboard:FOLDER" or "wandb:PROJECT"; Weights & Biases is configured by its environment variables
    as usual, e.g. WANDB_MODE=offline. Yields a function of (name, value, step), for `come.callbacks.Scalars` and for your own
    values.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with opened(f"tensorboard:{folder}") as log:
        ...         log("accuracy", 0.8, 64)
        ...     len(list(Path(folder).iterdir()))
        1
    """
    kind, place = parse(spec)
    try:
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
        else:
            import wandb
    except ModuleNotFoundError as error:
        raise missing(f"a log to {kind}", error, "log") from error
    if kind == "tensorboard":
        with SummaryWriter(Path(place)) as writer:
            yield writer.add_scalar
        return
    with wandb.init(project=place) as run:
        run.define_metric("*", step_metric="step")  # its own steps may only grow, and streams begin anew
        yield lambda name, value, step: run.log({name: value, "step": step})

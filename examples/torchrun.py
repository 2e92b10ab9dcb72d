"""One stream, several processes: they adapt together as one process would with all of their samples.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun.py snapshots

If a process dies, torchrun starts all of them again, and they go on from the last snapshot. Without torchrun the script starts
itself with two processes. On GPUs: `init_process_group("nccl")`, and the model and its batches on `cuda:LOCAL_RANK`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

import come

CLASSES, WIDTH, BATCH, STEPS = 6, 16, 24, 30


def samples(count: int, seed: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around one centre per class; the shift stretches and moves them all."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    points = centres[labels] + torch.randn(count, WIDTH, generator=generator)
    return points * (1 + shift * torch.linspace(-0.4, 1, WIDTH)) + shift * torch.linspace(-3, 3, WIDTH), labels


def source_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(100):
        x, y = samples(128, 1000 + i, shift=0.0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y, label_smoothing=0.3).backward()
        optimizer.step()
    for value in model.state_dict().values():
        dist.broadcast(value, 0)  # every rank must have the same weights; usually they load the same file
    return model


def run(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = source_model()
    classifier = come.adapt(model, "tent", lr=0.02, ranks=True)  # every rank holds the same adapted weights
    classifier.callbacks.append(come.callbacks.Snapshots(folder, every=10))  # the first rank writes them
    saved = sorted(folder.glob("tent-*.safetensors"))
    if saved:
        classifier.load(saved[-1])

    right = torch.zeros(2)
    for step in range(classifier.count, STEPS):
        x, labels = samples(BATCH, step * ranks + rank, shift=2.0)  # samples of its own: they come to a rank once
        with torch.no_grad():
            source = model.eval()(x)
        right += torch.stack([(logits.argmax(dim=1) == labels).float().mean() for logits in (source, classifier(x))])
    dist.all_reduce(right)
    if rank == 0:
        before, after = (right / STEPS / ranks).tolist()
        print(
            f"{ranks} ranks, {ranks * BATCH} samples a step: accuracy {before:.1%} without, {after:.1%} with adaptation"
        )
    dist.barrier()  # no rank ends while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            environment = {"OMP_NUM_THREADS": "1"} | os.environ
            subprocess.run([*torchrun, __file__, folder], check=True, env=environment)

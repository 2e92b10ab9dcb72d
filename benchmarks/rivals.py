"""What benchmarks/harm.py has no cell for: NEO behind another method, and ASR on a long stream. On a CPU, with embedded data.

python benchmarks/rivals.py behind                        # NEO applied to the answers of COME and of the default method
python benchmarks/rivals.py long --batches 300 --lr 2.5e-3    # corruptions that blend into each other
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
from torch import Tensor

import come
from come.model.heads import Head

sys.path.insert(0, str(Path(__file__).parent))
import harm

FILES = Path(__file__).parents[1] / "tests" / "harm"
NETWORKS = ("fashion-bn", "fashion-gn", "fashion-ln")
CELLS = ("clean", "standard", "lifelong", "two classes, noise")
PRIOR = 16  # as NEO's default


def loaded(name: str) -> tuple[torch.nn.Module, harm.Bank, Tensor]:
    """A network, its images under each corruption, and their labels."""
    model, images, labels, outliers = harm.network(name, FILES / "images.npz", FILES, torch.device("cpu"))
    return model, harm.Bank(images[: harm.IMAGES], outliers, harm.zoo.normalized), labels[: harm.IMAGES]


def behind(long: int) -> None:
    """Gains in points of two methods, and of the same answers centred as NEO centres them, by network and cell."""
    for name in NETWORKS:
        model, bank, truth = loaded(name)
        bias = Head(model).linear.bias.detach()
        mine = [stream for stream in harm.streams(truth, long) if stream.cell in CELLS]
        before = harm.answers(lambda model=model: come.adapt(model, "source"), None, mine, bank)
        for method, how in {
            "source": {"method": "source"},
            "tent + come": {"method": "tent", "objective": "come"},
            "steady": {},
        }.items():
            plain, centred = [], []
            for stream in mine:
                total, seen, found = torch.zeros_like(bias), 0, ([], [])
                with come.adapt(model, **how) as adapter:
                    for start in range(0, len(stream.image), stream.batch):
                        logits = adapter(bank(stream, slice(start, start + stream.batch)))
                        total, seen = total + (logits - bias).sum(dim=0), seen + len(logits)
                        found[0].append(logits.argmax(dim=1))
                        found[1].append((logits - total / (seen + PRIOR)).argmax(dim=1))
                plain.append(torch.cat(found[0]))
                centred.append(torch.cat(found[1]))
            for words, answers in ((method, plain), (f"{method}, then NEO", centred)):
                cells = harm.cells(mine, answers, before, truth)
                gains = " ".join(f"{cell}: {e['gain']:+.1f} ± {e['half_width']:.1f};" for cell, e in cells.items())
                print(f"{name:12s} {words:24s} {gains}", flush=True)


def blended(bank: harm.Bank, images: Tensor, t: int, every: int) -> Tensor:
    """A batch at time t: one corruption blends into the next over `every` batches, in pixels."""
    step, share = t // every, (t % every) / every
    kinds = len(bank.images) - 1
    one, other = (bank.images[1 + (step + i) % kinds, images] for i in (0, 1))
    return bank.normalize((1 - share) * one + share * other)


def long_stream(batches: int, every: int, lr: float) -> None:
    """Accuracy over all of a stream and in its last third, and how often ASR has reset."""
    model, bank, truth = loaded("fashion-bn")
    random = torch.Generator().manual_seed(0)
    order = [torch.randint(0, len(truth), (64,), generator=random) for _ in range(batches)]
    bare = {"guard": False, "statistics": "batch", "lr": lr}
    eta = {**bare, "redundancy": 0.4}  # with ten classes 0.05 leaves out nearly every sample
    for name, how in {
        "source": {"method": "source"},
        "norm, bare": {"method": "norm", "guard": False, "statistics": "batch"},
        "eata + em, bare": {"method": "eata", "objective": "em", "beta": 0, **eta},
        "asr + em, bare": {"method": "asr", "objective": "em", **eta},
        "eata + come, bare": {"method": "eata", "objective": "come", "beta": 0, **eta},
        "asr + come, bare": {"method": "asr", "objective": "come", **eta},
        "rdumb + em, bare": {"method": "rdumb", "objective": "em", "reset_every": batches // 3, **eta},
        "steady": {},
    }.items():
        with come.adapt(model, **how) as adapter:
            right = []
            for t, images in enumerate(order):
                answers = adapter(blended(bank, images, t, every)).argmax(dim=1)
                right.append((answers == truth[images]).float().mean().item())
            last = right[2 * batches // 3 :]
            resets = int(adapter.state.get("resets", 0)) if adapter.state else 0
        overall = 100 * sum(right) / len(right)
        print(f"{name:20s} {overall:5.1f}, last third {100 * sum(last) / len(last):5.1f}, {resets} resets", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    composing = commands.add_parser("behind")
    composing.add_argument("--long", type=int, default=20, help="as of benchmarks/harm.py")
    lasting = commands.add_parser("long")
    lasting.add_argument("--batches", type=int, default=300)
    lasting.add_argument("--every", type=int, default=25, help="batches from one corruption to the next")
    lasting.add_argument("--lr", type=float, default=2.5e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("come").setLevel(logging.ERROR)
    if args.command == "behind":
        behind(args.long)
    else:
        long_stream(args.batches, args.every, args.lr)


if __name__ == "__main__":
    main()

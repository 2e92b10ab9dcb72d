"""Trains a small CLIP on photographs of clothes with captions, in minutes on a CPU: with open_clip's classes and tokenizer.

apt-get install dataset-fashion-mnist
python training/clip_pair.py /usr/share/datasets/fashion-mnist clip-pair.safetensors
come bench --model training.clip_pair:classifier:img_size=32:weights=clip-pair.safetensors --data fashion \\
           --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5

A caption is made of a template, a name of the class or another word for it, and two attributes that are read off the image: how
bright and how large it is. The logit scale is learned, logits are scaled cosines. Captions that come twice in a batch count
once, or an image would be pushed away from the captions of its own class. The images are those that the embedded models are
trained on.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from come.bench.data.embedded import KNOWN
from come.integrations.open_clip import zero_shot

BATCH, PEAK, WORDS = 256, 1e-3, 16
VISION = {"image_size": 32, "patch_size": 8, "width": 64, "layers": 4, "head_width": 32}
TEXT = {"context_length": WORDS, "width": 64, "heads": 2, "layers": 2}
TEMPLATES = ("a photo of a {}.", "a picture of a {}.", "a {} on a black background.", "a shop's photo of a {}.")
NAMES = {
    "T-shirt": ("T-shirt", "tee", "short-sleeved top"),
    "trouser": ("trouser", "pair of trousers", "pair of jeans"),
    "pullover": ("pullover", "sweater", "jumper"),
    "dress": ("dress", "gown", "frock"),
    "coat": ("coat", "jacket", "overcoat"),
    "sandal": ("sandal", "open shoe", "flip-flop"),
    "sneaker": ("sneaker", "trainer", "sports shoe"),
    "ankle boot": ("ankle boot", "short boot", "bootie"),
}


def pair(seed: int = 0) -> nn.Module:
    """The untrained pair of towers."""
    torch.manual_seed(seed)
    return open_clip.CLIP(embed_dim=64, vision_cfg=VISION, text_cfg=TEXT)


def tokenizer() -> Any:
    """CLIP's own, for short captions."""
    return open_clip.SimpleTokenizer(context_length=WORDS)


def classifier(weights: str, img_size: int = 32, templates: str = TEMPLATES[0]) -> nn.Module:
    """The trained pair as a classifier of the embedded data, for `come bench`.

    Args:
        weights: the file that this script wrote.
        img_size: 32.
        templates: sentences with {} in place of the name, with a bar between them.
    """
    model = pair()
    model.load_state_dict(load_file(weights))
    return zero_shot(model.eval(), tokenizer(), KNOWN, templates.split("|"))


def attributes(x: Tensor) -> list[list[str]]:
    """For each image (N, 3, 32, 32) uint8 one word for how bright it is where it is not black, and one for its size."""
    x = x[:, 0].flatten(1).float()
    there = x > 20
    share = there.float().mean(dim=1)
    bright = (x * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)
    words = (("dark", "grey", "bright"), bright), (("small", "medium-sized", "large"), share)
    return [[kinds[int(i)] for i in torch.bucketize(v, v.quantile(torch.tensor([1 / 3, 2 / 3])))] for kinds, v in words]


def captions(labels: Tensor, words: list[list[str]], rows: Tensor, random: np.random.Generator) -> list[str]:
    """A caption for each of these images; half of them say nothing but what it is."""
    made = []
    for row in rows.tolist():
        name = random.choice(NAMES[KNOWN[labels[row]]])
        told = [kind[row] for kind in words if random.random() < 0.3]
        made.append(random.choice(TEMPLATES).format(" ".join([*told, name])))
    return made


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: float, steps: int | None, seed: int) -> None:
    """AdamW on the contrastive loss, with a warm-up and a cosine."""
    random, torch_random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    read, words = tokenizer(), attributes(x)
    total = steps or math.ceil(epochs * len(x) / BATCH)
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim <= 1 or "embedding" in name]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}])
    model.train()
    began = time.monotonic()
    for step in range(total):
        rate = PEAK * min((step + 1) / 100, 0.5 * (1 + math.cos(math.pi * step / total)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = torch.randint(len(x), (BATCH,), generator=torch_random)
        texts, place = np.unique(captions(y, words, rows, random), return_inverse=True)
        images = model.encode_image(x[rows].float() / 127.5 - 1, normalize=True)
        known = model.encode_text(read(texts.tolist()), normalize=True)
        logits = model.logit_scale.exp() * images @ known.T
        target = torch.from_numpy(place.reshape(-1))
        back = F.log_softmax(logits, dim=0)[torch.arange(BATCH), target]  # each caption finds its images
        loss = (F.cross_entropy(logits, target) - back.mean()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))  # as CLIP does
        if step % 100 == 0:
            scale, seconds = float(model.logit_scale.detach().exp()), time.monotonic() - began
            print(f"{step}/{total} loss {loss:.3f} scale {scale:.1f} {seconds:.0f} s", flush=True)


def main() -> None:
    """Train and write the weights of both towers."""
    import fashion
    import zoo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with train-images-idx3-ubyte.gz and the three others")
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--steps", type=int, help="for a trial")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    images, labels = zoo.fashion(args.folder, "train")
    source = fashion.chosen(labels, fashion.KNOWN, fashion.SOURCE, last=True)
    places = np.setdiff1d(np.flatnonzero(np.isin(labels, fashion.KNOWN)), source)
    x, y = fashion.tensors(images, labels, places, torch.device("cpu"))
    model = pair(args.seed)
    train(model, x, y, args.epochs, args.steps, args.seed)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, args.out)
    tests = zoo.fashion(args.folder, "t10k")
    x, y = fashion.tensors(*tests, fashion.chosen(tests[1], fashion.KNOWN, fashion.SHOWN), torch.device("cpu"))
    print(f"zero-shot accuracy on clean images: {zoo.accuracy(classifier(str(args.out)), x, y)[0]:.1f}%")


if __name__ == "__main__":
    main()

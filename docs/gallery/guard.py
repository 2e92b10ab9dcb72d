"""Watch the guard: entropy minimization at far too high a rate, on a stream that changes.

Finding: without a guard the model collapses to few classes. The guard notices by asking the source model, restores its
weights, and says so; the accuracy stays near that of the source.
"""

import logging

import torch

import come
from come.bench import models
from come.bench.data import open_source
from come.corruptions import corrupt

logging.getLogger("come.guard").addHandler(logging.NullHandler())  # the events are printed here
loaded = models.load("fashion-resnet-gn")
images, labels, *_ = open_source("fashion:640").load(range(640))
kinds = "gaussian_noise", "fog", "contrast", "pixelate", "brightness"
shifted = [corrupt(part, kind, severity=5) for part, kind in zip(images.split(128), kinds, strict=True)]
batches = loaded.preprocess(torch.cat(shifted)).split(32)

events = []
runs = {
    "source": come.adapt(loaded.module, "source"),
    "bare": come.adapt(loaded.module, "tent", objective="em", lr=0.25, guard=False),
    "guarded": come.adapt(loaded.module, "tent", objective="em", lr=0.25, guard=come.Guard(on_event=events.append)),
}
right = {}
for name, classifier in runs.items():
    logits = torch.cat([classifier(x) for x in batches])
    right[name] = (logits.argmax(dim=1) == labels).float().mean().item()
    print(f"{name:<8} {right[name]:.1%}")
print(*(event.message for event in events), sep="\n")
health = runs["guarded"].health()
assert health["collapse"] >= 1
assert health["lr_scale"] < 1
assert right["bare"] < right["source"] - 0.2
assert right["guarded"] > right["source"] - 0.1

"""One line around a model with BatchNorm, on images that are far too bright. No label is used to adapt.

Finding: the default call lifts the accuracy from about 20% to above 80%, and the model itself is not changed.
"""

import torch

import come
from come.bench import models
from come.bench.data import open_source
from come.corruptions import corrupt

loaded = models.load("fashion-resnet-bn")  # stands for your trained classifier
model = loaded.module.eval()
images, labels, *_ = open_source("fashion:512").load(range(512))
batches = loaded.preprocess(corrupt(images, "brightness", severity=5)).split(64)
before = {name: value.clone() for name, value in model.state_dict().items()}

with torch.no_grad():
    source = torch.cat([model(x) for x in batches])
classifier = come.adapt(model)  # the one line
adapted = torch.cat([classifier(x) for x in batches])

right = {name: (logits.argmax(dim=1) == labels).float().mean() for name, logits in [("off", source), ("on", adapted)]}
print(f"adaptation off {right['off']:.1%}, on {right['on']:.1%}")
assert right["off"] < 0.3
assert right["on"] > 0.8
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

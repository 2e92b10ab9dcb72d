"""When not to answer: a threshold with a promise, chosen on labelled images that the model was not trained on.

Finding: on other images like those, fewer than the promised 2% of the answers are wrong. Under a shift nothing is promised:
fewer images are answered, and more of the answers are wrong.
"""

import torch

import come
from come.bench import models
from come.bench.data import open_source
from come.corruptions import corrupt

loaded = models.load("fashion-resnet-bn")
images, labels, *_ = open_source("fashion:1600").load(range(1600))
inputs = loaded.preprocess(images)

classifier = come.adapt(loaded.module)
held_out = list(zip(inputs[:1280].split(64), labels[:1280].split(64), strict=True))
print(classifier.calibrate(held_out, risk=0.02))

answered, wrong = {}, {}
noisy = loaded.preprocess(corrupt(images[1280:], "gaussian_noise", severity=5))
for name, stream in ("clean", inputs[1280:]), ("noisy", noisy):
    steps = [classifier.answer(x) for x in stream.split(64)]  # predicts without adapting
    relied_on = ~torch.cat([step.abstain for step in steps])
    errors = torch.cat([step.logits for step in steps]).argmax(dim=1) != labels[1280:]
    answered[name], wrong[name] = relied_on.float().mean().item(), errors[relied_on].float().mean().item()
    print(f"{name}: {answered[name]:.1%} answered, {wrong[name]:.1%} of these wrong")
assert wrong["clean"] <= 0.02
assert wrong["noisy"] > 0.02
assert answered["noisy"] < answered["clean"]

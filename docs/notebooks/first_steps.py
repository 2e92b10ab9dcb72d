# %% [markdown]
# # First steps
#
# A classifier meets photographs that are far too bright. We adapt it while it predicts, and look at
# what it is sure of. The model is an embedded ResNet that names clothes; [Ten minutes](../start.md) has the same
# with your own model.
#
# This page is a Python file that runs when the site is built. To play with it:
# `jupytext --to notebook docs/notebooks/first_steps.py`.

# %%
import matplotlib.pyplot as plt
import torch

import come
from come.bench import models
from come.bench.data import open_source
from come.corruptions import corrupt

torch.set_num_threads(1)  # the model is too small to share
loaded = models.load("fashion-resnet-bn")
model, normalize = loaded.module, loaded.preprocess
images, labels, *_ = open_source("fashion:768").load(range(768))
bright = corrupt(images, "brightness", severity=5)

figure, axes = plt.subplots(2, 8, figsize=(8, 2.2))
for column in range(8):
    for row, kind in enumerate((images, bright)):
        axes[row, column].imshow(kind[column].permute(1, 2, 0))
        axes[row, column].axis("off")
_ = figure.suptitle("what the model was trained on, and what comes now")
# %% [markdown]
# ## Adapt
#
# One line around the model. Each call predicts a batch and has then adapted to it; no label is used. The model itself
# is not changed.

# %%
clean = list(zip(normalize(images[:384]).split(64), labels[:384].split(64), strict=True))
stream = list(zip(normalize(bright[384:]).split(64), labels[384:].split(64), strict=True))

runs = {name: come.adapt(model, name) for name in ("source", "tent")}
for classifier in runs.values():
    classifier.calibrate(clean, risk=0.03)  # for the second part
steps = {name: [classifier.step(x) for x, _ in stream] for name, classifier in runs.items()}

truth = torch.cat([y for _, y in stream])
logits = {name: torch.cat([step.logits for step in found]) for name, found in steps.items()}
right = {name: found.argmax(dim=1) == truth for name, found in logits.items()}
for name, found in right.items():
    print(f"{name:<7} {found.float().mean():.1%} right")
print(runs["tent"])

# %% [markdown]
# ## Know what is not known
#
# `calibrate` chose a threshold on the clean images: with probability 90%, at most 3% of the answers above it are
# wrong, for data like these. The bright pictures are not like these, so nothing is promised for them; we have the labels
# and can look.

# %%
print(runs["tent"].promise)
for name, found in steps.items():
    answered = ~torch.cat([step.abstain for step in found])
    print(f"{name:<7} answers {answered.float().mean():.1%}, of these {right[name][answered].float().mean():.1%} right")

figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharey=True)
for axis, (name, found) in zip(axes, logits.items(), strict=True):
    belief = come.Opinion().confidence(found)
    axis.hist(
        [belief[right[name]], belief[~right[name]]], bins=15, range=(0, 1), stacked=True, label=["right", "wrong"]
    )
    axis.axvline(runs[name].promise.threshold, color="black", linestyle=":", label="threshold")
    axis.set(title=name, xlabel="largest belief")
_ = axes[0].legend()
# %% [markdown]
# ## Is it well?
#
# A guard watches each step. `health()` is a dictionary of numbers for your dashboard; [Leave it running](../operate.md)
# says what they mean.

# %%
{name: round(value, 3) for name, value in runs["tent"].health().items() if value}

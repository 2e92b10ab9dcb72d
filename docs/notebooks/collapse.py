# %% [markdown]
# # Collapse
#
# Entropy minimization (EM) lowers the loss by being sure. Being sure of one class for everything is the surest of all,
# and the faster a model learns, the sooner it gets there. COME reads the logits as evidence, keeps a mass for "I do not
# know", and holds the norm of the logits, so that being sure is not free.
#
# Here both adapt the embedded GroupNorm ResNet along a stream of 15 corruptions, two batches of 32 of each, without a
# guard, at rising learning rates (Tent's is 0.001).

# %%
import matplotlib.pyplot as plt
import torch

import come
from come.bench import models
from come.bench.data import open_source
from come.corruptions import corrupt, names

torch.set_num_threads(1)  # the model is too small to share
loaded = models.load("fashion-resnet-gn")
model, normalize = loaded.module, loaded.preprocess
images, labels, *_ = open_source("fashion:960").load(range(960))
parts = zip(images.split(64), names("standard"), strict=True)
batches = normalize(torch.cat([corrupt(part, name, severity=5) for part, name in parts])).split(32)


def answers(classifier):
    """The probabilities of the classes for each sample, in order."""
    return torch.cat([classifier(x).softmax(dim=1) for x in batches])


rates = (0.004, 0.016, 0.064)
found = {
    name: [answers(come.adapt(model, "tent", objective=name.lower(), lr=lr, guard=False)) for lr in rates]
    for name in ("EM", "COME")
}
source = answers(come.adapt(model, "source"))

# %% [markdown]
# Over the second half of the stream: how many answers are right, and how sure the model is of them (the mean of the
# largest probability).

# %%
late = slice(480, None)


def accuracy(probabilities):
    """In percent, over the second half."""
    return 100 * (probabilities[late].argmax(dim=1) == labels[late]).float().mean().item()


def confidence(probabilities):
    """The same."""
    return 100 * probabilities[late].max(dim=1).values.mean().item()


figure, axes = plt.subplots(1, 2, figsize=(9, 3))
for axis, number in zip(axes, (accuracy, confidence), strict=True):
    for name, runs in found.items():
        axis.plot(rates, [number(run) for run in runs], "o-", label=name)
    axis.axhline(number(source), color="grey", linestyle=":", label="source")
for axis, title in zip(axes, ("accuracy, %", "confidence, %"), strict=True):
    axis.set(xscale="log", xlabel="learning rate", title=title)
    axis.set_xticks(rates, rates)
    axis.minorticks_off()
axes[0].legend()
print(f"{'rate':<8}" + "".join(f"{lr:>8}" for lr in rates))
for name, runs in found.items():
    print(f"{name:<8}" + "".join(f"{accuracy(run):8.1f}" for run in runs))
print(f"{'source':<8}{accuracy(source):8.1f}")

# %% [markdown]
# EM falls first, and at the highest rate it is surer than the source while half of its answers are wrong. COME keeps the
# accuracy of the source at a rate where EM has lost some; it loses, too, if the rate is high enough, but its confidence
# falls along. So COME widens the range of usable rates; it does not make every rate safe.
# That is what the guard is for, and [Steady](../steady.md), the default method, which learns only while many classes come.
#
# ## With the guard
#
# The same EM at the highest rate, for twice as long. The guard asks the source model now and then; when it rules out
# what the adapted model says, the weights go back and the learning rate is lowered. It says so in the log:

# %%
guarded = come.adapt(model, "tent", objective="em", lr=rates[-1])
for lap in 1, 2:
    print(f"lap {lap}: {accuracy(answers(guarded)):.1f}%")

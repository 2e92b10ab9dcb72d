# %% [markdown]
# # Collapse
#
# Entropy minimization (EM) lowers the loss by being sure. Being sure of one class for everything is the surest of all,
# and the faster a model learns, the sooner it gets there. COME reads the logits as evidence, keeps a mass for "I do not
# know", and holds the norm of the logits, so that being sure is not free.
#
# Here both adapt the embedded ViT to pictures without contrast, without a guard, at rising learning rates (Tent's is
# 0.001), for 10 batches of 32.

# %%
import matplotlib.pyplot as plt
import torch

import come
from come.bench import models
from come.bench.data import open_source
from come.corruptions import corrupt

torch.set_num_threads(1)  # the model is too small to share
loaded = models.load("fashion-vit")
model, normalize = loaded.module, loaded.preprocess
images, labels, *_ = open_source("fashion:320").load(range(320))
batches = normalize(corrupt(images, "contrast", severity=5)).split(32)


def answers(classifier):
    """The predicted class of each sample, in order."""
    return torch.cat([classifier(x).argmax(dim=1) for x in batches])


rates = (0.004, 0.016, 0.064)
found = {
    name: [answers(come.adapt(model, "tent", objective=name.lower(), lr=lr, guard=False)) for lr in rates]
    for name in ("EM", "COME")
}
source = answers(come.adapt(model, "source"))

# %% [markdown]
# Accuracy over the second half of the stream, and how many of the 100 classes are still named there:

# %%
late = slice(160, None)


def accuracy(predicted):
    """In percent, over the second half."""
    return 100 * (predicted[late] == labels[late]).float().mean().item()


figure, axes = plt.subplots(1, 2, figsize=(9, 3))
for name, predicted in found.items():
    axes[0].plot(rates, [accuracy(p) for p in predicted], "o-", label=name)
    axes[1].plot(rates, [len(p[late].unique()) for p in predicted], "o-", label=name)
axes[0].axhline(accuracy(source), color="grey", linestyle=":", label="source")
axes[1].axhline(len(source[late].unique()), color="grey", linestyle=":")
for axis, title in zip(axes, ("accuracy, %", "classes named"), strict=True):
    axis.set(xscale="log", xlabel="learning rate", title=title)
    axis.set_xticks(rates, rates)
    axis.minorticks_off()
axes[0].legend()
print(f"{'rate':<8}" + "".join(f"{lr:>8}" for lr in rates))
for name, predicted in found.items():
    print(f"{name:<8}" + "".join(f"{accuracy(p):8.1f}" for p in predicted))
print(f"{'source':<8}{accuracy(source):8.1f}")

# %% [markdown]
# EM falls first: it names fewer and fewer classes. COME keeps the accuracy of the source at rates where EM has lost it,
# and loses some if the rate is high enough. So COME widens the range of usable rates; it does not make every rate safe.
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

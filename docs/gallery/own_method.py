"""Write a method: a class with a name and one function, `adapt`. Its fields are its hyperparameters.

Finding: it runs with locking, roll-back and guard, and passes two of the checks that `come` runs over its own methods. Run all
of them in your tests.
"""

from dataclasses import dataclass

import torch

import come
from come.method import masked_mean
from come.testing import check_method


@dataclass(kw_only=True, eq=False)
class Surest(come.Method):
    """One step down the entropy of the samples whose confidence is at least `least`."""

    name = "surest"
    least: float = 0.5

    def adapt(self, ctx, x):
        """Predict, then descend."""
        logits = ctx.forward(x)
        used = ctx.valid & (self.objective.confidence(logits.detach()) >= self.least)
        entropy = self.objective.entropy(logits)
        ctx.descend(masked_mean(entropy, used), go=used.any())
        return come.Step(logits, entropy, used)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
step = come.adapt(model, Surest(lr=0.01, least=0.5, objective="em")).step(torch.randn(64, 4))
print(f"{int(step.used.sum())} of 64 samples drove the update")
assert 0 < step.used.sum() < 64
check_method(lambda model: come.adapt(model, Surest(lr=0.01)), norms=["layer"], checks=["shapes", "resume_is_exact"])

"""Write an objective: one function, `log_mass`, from logits to the logarithms of masses that sum to 1.

Finding: entropy, confidence and uncertainty follow from it, and any method takes it. With one outcome more than there are
classes, the last is read as "I do not know".
"""

import torch

import come
from come.testing import check_objective


class NoneOfThese(come.Objective):
    """Softmax over the classes and one more outcome, "none of these", whose logit is 0."""

    def log_mass(self, logits):
        """(..., K) -> (..., K + 1)."""
        z = logits if logits.dtype == torch.float64 else logits.float()  # half precision is too coarse
        return torch.log_softmax(torch.cat([z, torch.zeros_like(z[..., :1])], dim=-1), dim=-1)


objective = NoneOfThese()
check_objective(objective)  # finite, normalized, the same in every precision, ...

logits = torch.tensor([[6.0, 0.0, 0.0], [-6.0, -6.0, -6.0]])  # evidence for one class, evidence against all
print(objective.uncertainty(logits))
assert objective.uncertainty(logits)[0] < 0.01
assert objective.uncertainty(logits)[1] > 0.99
assert come.Softmax().uncertainty(logits)[1] < 0.7  # a softmax cannot say "none of these"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
step = come.adapt(model, "tent", objective=objective, lr=0.01).step(torch.randn(64, 4))
assert torch.allclose(step.loss, objective.entropy(step.logits))

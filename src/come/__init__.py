"""Test-time adaptation that knows what it does not know.

>>> import come, torch
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
>>> classifier = come.adapt(model, "tent")  # COME is the objective
>>> logits = classifier(torch.randn(8, 4))  # predicts, and has adapted
>>> classifier.uncertainty(logits).shape
torch.Size([8])
>>> classifier.predict(torch.randn(8, 4)).shape  # without adapting
torch.Size([8, 3])
"""

from come import callbacks, methods, objectives, optim, select, theory
from come.adapter import Adapter, adapt
from come.errors import ClosedError, CollapseError, ComeError, ConfigError, InputError, ModelError, StateError
from come.guard import Event, Guard
from come.method import Method, Step
from come.objectives import Objective, Opinion, Softmax
from come.version import __version__

__all__ = [
    "Adapter",
    "ClosedError",
    "CollapseError",
    "ComeError",
    "ConfigError",
    "Event",
    "Guard",
    "InputError",
    "Method",
    "ModelError",
    "Objective",
    "Opinion",
    "Softmax",
    "StateError",
    "Step",
    "__version__",
    "adapt",
    "callbacks",
    "methods",
    "objectives",
    "optim",
    "select",
    "theory",
]

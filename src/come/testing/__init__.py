"""Contract checks for methods and objectives, ours and yours.

    come.testing.check_method(lambda model: come.adapt(model, MyMethod(lr=1e-3)))
    come.testing.check_objective(MyObjective())

Run them in your own test suite; `come` runs the same ones over everything in its registry. A failure is an `AssertionError`
that names the check and the model.
"""

from come.testing.method_checks import METHOD_CHECKS, OBJECTIVE_MATTERS, DoesNotApply, MethodFactory, check_method
from come.testing.models import CLASSES, NORMS, SHAPE, TinyClassifier, TinyTransformer, batches
from come.testing.objective_checks import check_invariance, check_objective

__all__ = [
    "CLASSES", "METHOD_CHECKS", "NORMS", "OBJECTIVE_MATTERS", "SHAPE", "DoesNotApply", "MethodFactory", "TinyClassifier",
    "TinyTransformer", "batches", "check_invariance", "check_method", "check_objective",
]  # fmt: skip

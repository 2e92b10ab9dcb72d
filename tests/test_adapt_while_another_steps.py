"""An adapter that is made while another thread runs a step on the same model."""

from __future__ import annotations

import threading

import come
from come.testing import NORMS, TinyClassifier, batches


def test_an_adapter_made_during_a_step_of_another_takes_the_models_own_weights():
    """It took those that stand in their place while a step runs, and could never step."""
    model = TinyClassifier(NORMS["group"])
    inside, go, made = threading.Event(), threading.Event(), []
    first, x = come.adapt(model, "tent"), batches(1)[0]

    def wait(*_):
        inside.set()
        assert go.wait(30)

    hook = model.register_forward_hook(wait)
    step = threading.Thread(target=first.step, args=(x,))
    make = threading.Thread(target=lambda: made.append(come.adapt(model, "tent")))
    step.start()
    assert inside.wait(30)
    make.start()
    make.join(0.2)
    go.set()
    step.join()
    make.join()
    hook.remove()
    made[0].step(x)
    assert made[0].source_parameters.keys() == first.source_parameters.keys()
    for name, value in made[0].source_parameters.items():
        assert value.equal(model.get_parameter(name))

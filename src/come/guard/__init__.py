"""Filters invalid inputs, rejects bad updates, detects and undoes collapse. Each part can be read alone:

config      what is to be done: `Guard`, and what is reported: `Event`
samples     which samples of a batch can be used
signals     what can be seen of a model's health without labels, and the bands in which it usually lies
verdict     the adapted model next to the source model on the same samples: has it collapsed?
watch       what one adapter has learned so far, and what follows from new signals
"""

from come.guard.config import Event, Guard, Policy

__all__ = ["Event", "Guard", "Policy"]

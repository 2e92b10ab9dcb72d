"""Filters invalid inputs, rejects bad updates, detects and undoes collapse.

config      the settings: `Guard`; what is reported: `Event`
signals     which samples of a batch are valid; health of the model without labels: six signals, and their usual ranges
verdict     source check: has the adapted model collapsed, and which BatchNorm statistics are better?
watch       the guard's state of one adapter: when the source model is checked, and how it reacts
"""

from come.guard.config import Event, Guard, Policy

__all__ = ["Event", "Guard", "Policy"]

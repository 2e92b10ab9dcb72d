"""For tests: let the guard ask the source model about the next batch."""

from dataclasses import replace


def ask_the_source(adapter):
    now = adapter._state
    adapter._state = replace(now, watch=replace(now.watch, due=0))

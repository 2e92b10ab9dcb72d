"""A pretended GPU: CUDA graphs that run again on the CPU what was captured, into the memory of the first run."""

from __future__ import annotations

import contextlib
import sys

import torch

from come.state.trees import leaves
from come.step import compiled


class Graph:
    """As `torch.cuda.CUDAGraph`: a replay computes from the graph's own inputs and writes into its own outputs."""

    def register_generator_state(self, generator):
        self.generator = generator

    def replay(self):
        with torch.enable_grad():
            new = leaves(self.compute())
        old = leaves(self.owner._after)
        kept = [value.clone() for value in new]
        for mine, value in zip(old, kept, strict=True):
            mine.copy_(value)


@contextlib.contextmanager
def graph(made, **_):
    frame = sys._getframe(2)  # of CapturedGraph.__init__
    made.compute, made.owner = frame.f_locals["compute"], frame.f_locals["self"]
    yield


class Stream:
    def __init__(self, *_):
        pass

    def wait_stream(self, _):
        pass


def pretend(monkeypatch):
    """Steps are captured on the CPU; returns the list of graphs that were made."""
    made = []

    class Counted(Graph):
        def __init__(self):
            made.append(self)

    for name, value in {"Stream": Stream, "current_stream": Stream, "CUDAGraph": Counted, "graph": graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(compiled, "noticing_waits", lambda: contextlib.nullcontext([]))
    monkeypatch.setattr(compiled.CompiledSteps, "_captures", captures)
    monkeypatch.setattr(compiled.CompiledSteps, "_compiled", lambda self, step, compute, run: step.borrow(compute))
    return made


def captures(self, step, given, x):
    if given.state is None or step.method.waits:
        return False
    return self._capture

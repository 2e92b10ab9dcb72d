"""A server of a tiny model in a process of its own, to be killed: python tests/harness/serving.py PORT STATE WRITE_EVERY."""

from __future__ import annotations

import sys

import torch
import uvicorn

from come.serve import Service
from come.serve.http import create
from come.testing import NORMS, TinyClassifier


def main(port, state, write_every, **more):
    torch.set_num_threads(1)
    model = TinyClassifier(NORMS["group"])
    service = Service(model, "tent", shape=(3, 8, 8), state=state, write_every=float(write_every), lr=0.01, **more)
    uvicorn.run(create(service), port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])

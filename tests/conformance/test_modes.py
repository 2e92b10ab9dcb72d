"""The recorded trajectories again in the other ways to run a step: on the selected samples alone, and compiled."""

from __future__ import annotations

import math

import pytest
import torch

import come
from come.step import engine

LN_K = math.log(1000)
OF = {name: name.removesuffix("_come") for name in ("tent", "tent_come", "eata", "eata_come", "sar", "sar_come")}
COMPILED = ["tent_come_vit_large_lr", "tent_resnet_large_lr", "eata_come_vit_dlarge_fisher", "sar_come_vit_recover"]


def hyper(case, source):
    """What the method was recorded with."""
    h, name = case.hyper, OF[case.entry["method"]]
    found = {"lr": h["lr"], "steps": h.get("steps", 1), "statistics": "batch"}
    if name == "eata":
        found |= {"margin": h["e_margin"] / LN_K, "redundancy": h["d_margin"]}
        found |= {"beta": h["fisher_beta"], "source": source} if h["fisher"] else {"beta": 0.0}
    if name == "sar":
        found |= {"margin": h["margin_e0"] / LN_K, "rho": h["rho"], "quirks": True}
        if h["variant"] == "sar_allnorm":
            found["select"] = come.select.norm_affine()
    return name, found


def replay(case, source, **how):
    name, found = hyper(case, source)
    objective = come.Opinion(eps=1e-7) if "come" in case.entry["method"] else "em"
    device = "cuda" if how.get("compile") and torch.cuda.is_available() else "cpu"
    found = {key: [x.to(device) for x in value] if key == "source" else value for key, value in found.items()}
    guard = come.Guard(policy="warn")  # it would stop the rates that some were recorded with
    method = come.adapt(case.model().to(device), name, objective=objective, guard=guard, **found, **how)
    logits = [method(case.batch(t).to(device)).cpu() for t in range(case.hyper["T"])]
    case.close("logits", torch.stack(logits))
    for parameter, value in method.adapted_parameters.items():
        case.close(f"final.{parameter}", value.cpu())


@pytest.mark.recorded("eata", "eata_come", "sar", "sar_come")
def test_on_the_selected_samples_alone(case, source_batches, monkeypatch):
    monkeypatch.setattr(engine, "FEW", 2.0)  # always, not only where it pays
    replay(case, source_batches)


@pytest.mark.recorded("tent", "tent_come", "eata", "eata_come", "sar", "sar_come")
def test_compiled(case, source_batches, compiler):
    """On a CPU a few of them; on a GPU all, captured."""
    if not torch.cuda.is_available() and case.name not in COMPILED:
        pytest.skip("needs a CUDA device")
    replay(case, source_batches, compile=True)

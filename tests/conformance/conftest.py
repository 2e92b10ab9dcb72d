"""Cases, models and inputs of the recorded trajectories, and a judge of each case; `tests/conftest.py` prints the summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

DATA = Path(__file__).parent / "data"
MANIFEST = json.loads((DATA / "manifest.json").read_text())
CASES = {case["name"]: case for case in MANIFEST["cases"]}


def pytest_generate_tests(metafunc):
    """A test that takes `case` runs once for every recorded case of its mark: @pytest.mark.recorded("tent", "tent_come")."""
    if "case" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("recorded")
        chosen = [name for name, case in CASES.items() if case["method"] in mark.args]
        assert chosen, f"no recorded case for {mark.args}"
        metafunc.parametrize("case", chosen, indirect=True)


class Case:
    """One recorded case: its hyperparameters, tensors, and how far a result may be from them."""

    def __init__(self, name, found):
        self.name, self.found = name, found
        self.entry = CASES[name]
        self.hyper = self.entry["hyperparameters"]
        self.tensors = load_file(DATA / self.entry["file"])

    def __getitem__(self, name):
        return self.tensors[name]

    def __contains__(self, name):
        return name in self.tensors

    def close(self, name, actual):
        """Assert that `actual` is within the recorded tolerance of tensor `name`; integers exactly."""
        self.found["compared"] = True
        expected = self.tensors[name]
        assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        if not expected.is_floating_point():
            assert torch.equal(actual.to(expected), expected), f"{name}: {actual.tolist()} not {expected.tolist()}"
            return
        atol = self.entry["tolerance"][name.split(".")[0]]["atol"]
        assert torch.equal(actual.isnan(), expected.isnan()), f"{name}: NaN in other places"
        error = (actual.double() - expected.double()).nan_to_num().abs().max().item()
        if error / atol > self.found["error"]:
            self.found |= {"error": error / atol, "where": f"{self.name}: {name}"}
        assert error <= atol, f"{self.name}: {name} is off by {error:.3g}, tolerance {atol:.3g}"

    def model(self):
        return build(self.hyper["model"], self.hyper.get("head_scale", 1.0))

    def batch(self, t):
        return INPUTS["x"][t][: self.hyper.get("B", 8)]


@pytest.fixture
def case(request):
    name = request.param
    found = {
        "case": name,
        "of": len(CASES),
        "method": CASES[name]["method"],
        "compared": False,
        "error": 0.0,
        "where": "",
    }
    request.node.user_properties.append(
        ("conformance", found)
    )  # so it travels with the report, from another process too
    return Case(name, found)


INPUTS = {name: value.float() for name, value in load_file(DATA / "inputs.safetensors").items()}


@pytest.fixture
def inputs():
    return INPUTS


@pytest.fixture
def source_batches():
    return list(INPUTS["source"])


def build(kind, head_scale=1.0):
    from timm.models.resnet import BasicBlock, ResNet
    from timm.models.vision_transformer import VisionTransformer

    arguments = dict(MANIFEST["models"][kind]["constructor"])
    if kind == "vit":
        model = VisionTransformer(**arguments)
    else:
        arguments["act_layer"] = getattr(torch.nn, arguments["act_layer"])
        model = ResNet(BasicBlock, **arguments)
    model.load_state_dict(load_file(DATA / MANIFEST["models"][kind]["file"]))
    with torch.no_grad():
        head = model.get_classifier()
        head.weight.mul_(head_scale)
        head.bias.mul_(head_scale)
    return model

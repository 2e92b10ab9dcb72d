"""Protocols: what they fix, what they check, and that nothing is adapted where No Adapt misses its number."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import come
from come.bench import Bench, Plan, RunFolder, cli, models, protocols, run
from come.bench.data.opening import get as get_kind
from come.bench.data.opening import open_source
from come.bench.engines.cell_runner import CellRunner
from come.bench.engines.progress import Progress
from come.bench.protocols import FREE, Outcome, Protocol

ROOT = Path(__file__).parents[1]
PLAN = Plan(data="fashion:64", corruptions=("fog", "contrast"), batch_size=32)
SHA256 = models.fingerprint(models.load("fashion-resnet-bn").module)


class Watching(Progress):
    def __init__(self):
        self.started, self.said = [], []

    def start(self, cell, samples):
        self.started.append(cell.title)

    def meet(self, outcome):
        self.said.append(str(outcome))


@pytest.fixture(scope="module")
def number(tmp_path_factory):
    """What No Adapt reaches, in percent."""
    records = run(PLAN.but(methods=("source",)), tmp_path_factory.mktemp("number") / "run")
    return 50 * sum(r.result.metrics[d]["accuracy"] for r in records for d in r.result.domains)


@pytest.fixture
def tiny(number):
    about = {"name": "tiny", "summary": "fashion, 64 images", "data": "embedded", "citation": "a test"}
    protocol = Protocol(plan=PLAN, images=64, weights_sha256=SHA256, no_adapt=number, tolerance=0.01, **about)
    yield protocols.register(protocol)
    protocols._registry.remove("tiny")


def bench(protocol, options=(), **changes):
    """A bench that follows a protocol, or one that differs from it."""
    protocol = protocol.model_copy(update=changes)
    chosen = {"methods": ("tent",), "objectives": ("em",)} | dict(options)
    return Bench(protocol.plan_for(chosen), protocol=protocol)


def come_(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["come", *map(str, arguments)])
    cli.main()


# ---- following one ----


def test_no_adapt_comes_first_and_is_not_run_twice(tiny, number, tmp_path):
    watching, folder = Watching(), RunFolder(tmp_path / "run")
    records = bench(tiny).run(folder, watching)
    assert [title.split(",")[0] for title in watching.started] == ["source + em"] * 2 + ["tent + em"] * 2
    assert watching.said == [f"protocol tiny: No Adapt reached {number:.2f}%, as expected ({number:g} ± 0.01%)"]
    assert len(records) == 4
    again = Watching()
    assert len(bench(tiny).run(folder, again)) == 4
    assert not again.started
    assert again.said == watching.said
    fresh = Watching()
    bench(tiny).run(folder, fresh, fresh=True)
    assert fresh.started == watching.started


def test_a_wrong_number_stops_before_anything_is_adapted(tiny, number, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(come.InputError) as error:
        bench(tiny, no_adapt=number - 1).run(folder)
    said = str(error.value)
    assert f"must reach {number - 1:g} ± 0.01% in protocol tiny, got {number:.2f}%; nothing was adapted" in said
    assert "normalization than model, other weights than fashion-resnet-bn" in said
    assert SHA256 in said
    assert "another list of images than the 64 of the protocol (in fashion:64)" in said
    assert {r.cell.method for r in folder.records()} == {"source"}
    assert folder.outcome(folder.records()).met is False
    watching = Watching()
    with pytest.raises(come.InputError, match="must reach"):
        bench(tiny, no_adapt=number - 1).run(folder, watching)
    assert not watching.started  # it is known already


def test_helpers_adapt_nothing_either(tiny, number, tmp_path):
    protocol = tiny.model_copy(update={"no_adapt": number + 1})
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(come.InputError, match="nothing was adapted"):
        Bench(protocol.plan_for({"methods": ("tent",)}), protocol=protocol, jobs=2).run(folder)
    assert {r.cell.method for r in folder.records()} == {"source"}


def test_every_shard_has_no_adapt(tiny):
    plan = tiny.plan_for({"methods": ("tent",), "objectives": ("em",)})
    parts = [Bench(plan, protocol=tiny, shard=(i, 2)).cells for i in range(2)]
    assert [[c.method for c in part] for part in parts] == [["source", "source", "tent"]] * 2


def test_without_a_number_the_measured_one_is_said(tiny, number, tmp_path):
    watching = Watching()
    bench(tiny, no_adapt=None).run(RunFolder(tmp_path / "run"), watching)
    assert watching.said == [f"protocol tiny: No Adapt reached {number:.2f}%; the protocol has no number for it yet"]


def test_no_adapt_that_fails_stops_the_run(tiny, tmp_path, monkeypatch):
    ready = bench(tiny)
    monkeypatch.setattr(CellRunner, "measure", lambda *_: 1 / 0)
    with pytest.raises(come.InputError, match="No Adapt could not be run, so nothing was adapted: source"):
        ready.run(RunFolder(tmp_path / "run"))


def test_other_weights_stop_before_any_work(tiny, monkeypatch):
    monkeypatch.setattr("come.bench.inputs.open_source", lambda *_: pytest.fail("the data was opened"))
    with pytest.raises(
        come.ModelError, match=f"fashion-resnet-bn must have the SHA-256 {'0' * 64} in protocol tiny, got {SHA256}"
    ):
        bench(tiny, weights_sha256="0" * 64)


def test_other_images_stop_before_any_work(tiny):
    with pytest.raises(come.InputError, match="fashion:64 must have 65 images in protocol tiny, got 64: embedded"):
        bench(tiny, images=65)
    with pytest.raises(come.InputError, match="names of the images of fashion:64 must have the SHA-256 0000"):
        bench(tiny, images_sha256="0" * 64)


# ---- what is fixed, and what is the user's ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"severity": 3}, "severity must be 5 in protocol tiny, got 3; leave --severity out, or leave --protocol out"),
        ({"corruptions": ["fog"]}, "corruptions must be fog,contrast in protocol tiny, got fog;"),
        ({"batch_size": 64}, "batch-size must be 32 in protocol tiny, got 64"),
        ({"limit": 10}, "limit must be None in protocol tiny, got 10"),
        ({"normalization": "half"}, "normalization must be model in protocol tiny, got half"),
        ({"model": "fashion-vit"}, "model must be fashion-resnet-bn in protocol tiny, got fashion-vit"),
        ({"setting": "lifelong"}, "setting must be standard in protocol tiny, got lifelong"),
        ({"precision": "bf16"}, "precision must be float32 in protocol tiny, got bf16"),
        ({"data": "fashion"}, "data must be fashion:64 in protocol tiny, got fashion"),
    ],
)
def test_a_contradiction_is_refused(tiny, options, said):
    with pytest.raises(come.ConfigError, match=said):
        tiny.plan_for(options)


def test_what_the_user_chooses(tiny):
    plan = tiny.plan_for({"methods": ["sar", "source"], "seeds": [1, 2], "hyper": {"sar": {"lr": 0.1}}, "severity": 5})
    assert plan.methods == ("source", "sar")
    assert (plan.seeds, plan.batch_size, plan.data) == ((1, 2), 32, "fashion:64")
    assert set(Plan.model_fields) > FREE


def test_where_data_and_weights_are():
    paper = protocols.get("come-vit-b")
    assert (
        paper.plan_for({"data": "/data/c"}).data
        == paper.plan_for({"data": "imagenet-c:/data/c"}).data
        == "imagenet-c:/data/c"
    )
    with pytest.raises(come.ConfigError, match="protocol come-vit-b needs --data PATH: Hendrycks"):
        paper.plan_for({})
    with pytest.raises(
        come.ConfigError, match="data must be imagenet-c:PATH in protocol come-vit-b, got folder:/data/val"
    ):
        paper.plan_for({"data": "folder:/data/val"})
    with pytest.raises(come.ConfigError, match="checkpoint must be the weights of timm:vit_base_patch16_224"):
        paper.plan_for({"data": "/data/c", "checkpoint": "mine.pth"})
    with pytest.raises(come.ConfigError, match="resnet50-keras-val2k needs --checkpoint FILE: Keras"):
        protocols.get("resnet50-keras-val2k").plan_for({"data": "/data/val2k"})


# ---- the shipped ones ----


@pytest.mark.parametrize("name", protocols.names())
def test_every_protocol_is_valid(name):
    protocol = protocols.get(name)
    assert len(protocol.summary) < 90
    kind = protocol.plan.data.partition(":")[0]
    given = {} if "[" in get_kind(kind).usage else {"data": "/data"}
    if protocol.weights:
        given["checkpoint"] = "weights.safetensors"
    plan = protocol.plan_for(given)
    assert plan.methods[0] == "source"
    assert next(cell.size for cell in plan.cells(protocol.images)) == protocol.images
    if plan.model.startswith("timm:") and not protocol.weights:
        full = plan.model.removeprefix("timm:")
        assert "." in full, "weights without a tag change with timm"
        assert timm.get_pretrained_cfg(full, allow_unregistered=False) is not None
    lines = protocol.paragraph().splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(lines)
    for fact in (
        name,
        plan.model,
        f"{protocol.images:,}",
        plan.setting,
        f"batches of {plan.batch_size}",
        protocol.citation,
    ):
        assert fact in said
    assert (protocol.weights_sha256 or "no hash yet") in said
    assert (protocol.images_sha256 or "") in said
    assert (
        protocol.expected if protocol.no_adapt else "There is no number for the model without adaptation yet"
    ) in said


def test_hash_and_number_of_the_embedded_weights_are_theirs():
    """If this fails the weights are new: write the hash, and what 'come bench --protocol fashion --methods source' measures,
    into the json beside them."""
    protocol = protocols.get("fashion")
    assert models.fingerprint(models.load(protocol.plan.model).module) == protocol.weights_sha256
    assert protocol.no_adapt is not None


def test_a_vit_for_small_images_by_arguments(tmp_path):
    protocol = protocols.get("tiny-imagenet-vit-s8-severity-5")
    module = timm.create_model("vit_small_patch16_224", img_size=64, patch_size=8, num_classes=200)
    save_file(module.state_dict(), tmp_path / "random.safetensors")
    loaded = models.load(protocol.plan.model, checkpoint=tmp_path / "random.safetensors", normalization="imagenet")
    assert (loaded.preprocess.size, loaded.num_classes) == (64, 200)
    assert loaded.module(torch.zeros(1, 3, 64, 64)).shape == (1, 200)
    assert models.fingerprint(loaded.module) == models.fingerprint(module)
    with pytest.raises(come.ModelError, match="must have the SHA-256"):
        protocol.check_weights(loaded)
    with pytest.raises(come.ModelError, match="timm cannot make timm:resnet18:sides=3"):
        models.load("timm:resnet18:sides=3", checkpoint=tmp_path / "random.safetensors")


def test_the_resnet_of_keras_strides_early(tmp_path):
    with pytest.raises(come.ConfigError, match="keras-resnet50 has no weights of its own; give --checkpoint FILE"):
        models.load("keras-resnet50")
    state = {k: v.half() for k, v in timm.create_model("resnet50").state_dict().items()}
    save_file(state, tmp_path / "random.safetensors")
    model = models.load("keras-resnet50", checkpoint=tmp_path / "random.safetensors")
    block = model.module.layer3[0]
    assert (block.conv1.stride, block.conv2.stride, block.bn1.eps) == ((2, 2), (1, 1), 1e-3)
    assert model.preprocess.std == (1 / 255, 1 / 255, 1 / 255)


# ---- lists of images ----


def test_a_list_chooses_images(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/images/3.png"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / name)
    chosen = tmp_path / "list.txt"
    chosen.write_text("b/3.png\n\na/2.png")
    source = open_source(f"folder:{tmp_path / 'data'}:list={chosen}")
    assert source.names() == ["a/2.png", "b/3.png"]
    assert (source.labels().tolist(), source.num_classes) == ([0, 1], 2)
    chosen.write_text("b/3.png\nc/4.png\n")
    with pytest.raises(
        come.InputError, match=r"lists 2 images, 1 of which are not in .*data, such as 'c/4.png'; each line"
    ):
        open_source(f"folder:{tmp_path / 'data'}:list={chosen}")
    chosen.write_text("")
    with pytest.raises(come.InputError, match=r"list of images .*txt is empty"):
        open_source(f"folder:{tmp_path / 'data'}:list={chosen}")
    with pytest.raises(come.InputError, match=r"cannot read the list of images none.txt: No such file"):
        open_source(f"folder:{tmp_path / 'data'}:list=none.txt")


# ---- command line, folder and report ----


def test_the_run_folder_and_the_reports_say_so(tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    come_(
        monkeypatch,
        "bench",
        "--protocol",
        "tiny",
        "--methods",
        "tent",
        "--objectives",
        "em",
        "--out",
        out,
        "--jobs",
        "1",
    )
    said = capsys.readouterr().out
    assert "protocol tiny: No Adapt reached" in said
    outcome = Outcome(**json.loads((out / "protocols" / "tiny.json").read_text()))
    assert outcome.met
    assert outcome.protocol == tiny
    markdown, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    for text in (markdown, page):
        assert "rotocol tiny: No Adapt reached" in text
        assert "as expected" in text
        assert SHA256 in text
    folder = RunFolder(out)
    assert folder.outcome(folder.records()[2:]) is None  # of another plan in the folder
    (out / "protocols" / "tiny.json").write_text("{")
    assert folder.outcome(folder.records()) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--protocol", "fashon"), "no protocol 'fashon'; did you mean 'fashion'?"),
        (("--protocol", "tiny", "--severity", "3"), "severity must be 5 in protocol tiny, got 3"),
        (("--protocol", "tiny", "--preset", "standard"), "corruptions must be fog,contrast in protocol tiny"),
        (
            ("--protocol", "tiny", "--on-bad-image", "skip"),
            "fixes the images and their order; leave --on-bad-image out",
        ),
        (("--protocol", "tiny", "--replay", "a.json"), "fixes the images and their order; leave --replay out"),
    ],
)
def test_what_the_command_line_refuses(tiny, arguments, said, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        come_(monkeypatch, "bench", *arguments, "--dry-run")
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_list_and_show(tiny, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    come_(monkeypatch, "protocol", "list")
    listed = capsys.readouterr().out
    assert all(name in listed for name in protocols.names())
    assert max(map(len, listed.splitlines())) <= 80
    come_(monkeypatch, "protocol", "show", "tiny")
    assert capsys.readouterr().out == tiny.paragraph() + "\n"


def test_only_protocols_can_be_registered():
    with pytest.raises(come.ConfigError, match=r"protocol 'mine' must be a come.bench.protocols.Protocol, got"):
        protocols.register(SimpleNamespace(name="mine"))


def test_the_page_lists_them_and_its_example_runs():
    page = (ROOT / "docs" / "protocols.md").read_text()
    for name in protocols.names():
        protocol = protocols.get(name)
        number = "none yet" if protocol.no_adapt is None else f"{protocol.no_adapt:g} ± {protocol.tolerance:g}"
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert line.endswith(f"| {number} |")
        assert f"{protocol.images:,}" in line
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    try:
        exec(example, {})
        assert protocols.get("acme-photos").plan_for({"data": "photos-2024"}).data == "folder:photos-2024"
    finally:
        protocols._registry.remove("acme-photos")

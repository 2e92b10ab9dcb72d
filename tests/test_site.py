"""The pages in docs/: the site builds without a warning, and what the pages show runs."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from calling import call
from PIL import Image
from torch import nn

import come
from come.guard.watch import COUNTED

DOCS = Path(__file__).parents[1] / "docs"
# What `come.NAME` has to offer beside its own names.
PUBLIC = ("objectives", "methods", "metrics", "corruptions", "select", "optim", "callbacks", "theory", "bench", "serve")


def build(docs, out, *more):
    """The command of docs/conf.py."""
    pytest.importorskip("myst_nb")
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", *more, str(docs), str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


AS_THEY_ARE = ("-D", "nb_execution_mode=off", "-D", "suppress_warnings=myst-nb.lexer")


@pytest.fixture(scope="module", params=[AS_THEY_ARE])
def site(request, tmp_path_factory):
    """The site; its notebooks are executed by `pytest -m slow`."""
    out = tmp_path_factory.mktemp("site")
    done = build(DOCS, out, *request.param)
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_has_every_page_and_every_public_name(site):
    from sphinx.util.inventory import InventoryFile

    for page in (*DOCS.rglob("*.md"), *DOCS.glob("notebooks/*.py")):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists()
    with (site / "objects.inv").open("rb") as file:
        known = InventoryFile.load(file, "", os.path.join)
    known = {name for kind, names in known.items() if kind.startswith("py:") for name in names}
    public = {f"come.{name}" for name in come.__all__ if name not in PUBLIC and name != "__version__"}
    for module in PUBLIC:
        public |= {f"come.{module}.{name}" for name in getattr(getattr(come, module), "__all__", ())}
    for name in public - known:  # a constant is shown where it is defined
        module, _, own = name.rpartition(".")
        assert any(other.startswith(f"{module}.") and other.endswith(f".{own}") for other in known), name
    for name in come.methods.names():
        assert f"come.methods.{come.methods.get(name).__name__}" in known
        assert (site / "reference" / "methods" / f"{name}.html").exists()
    assert max(page.stat().st_size for page in site.rglob("*.html")) < 300_000


def test_the_first_page_has_a_picture_and_code_can_be_read_and_copied(site):
    first = (site / "index.html").read_text()
    assert 'src="_images/harm.svg"' in first
    assert "copybutton.js" in first
    assert "site.css" in first


NOTEBOOKS = {"first_steps": "right", "collapse": "source weights restored"}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # matplotlib, of a tensor
@pytest.mark.parametrize("page", NOTEBOOKS)
def test_the_notebooks_run(page, capsys, caplog):
    runpy.run_path(str(DOCS / "notebooks" / f"{page}.py"))
    plt.close("all")
    assert NOTEBOOKS[page] in capsys.readouterr().out + caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("site", [()], indirect=True)
def test_the_notebooks_were_executed(site):
    for page, words in NOTEBOOKS.items():
        shown = (site / "notebooks" / f"{page}.html").read_text()
        assert words in re.sub(r"<[^>]*>", "", shown)
        assert '<img alt="' in shown


def test_broken_links_and_lost_pages_fail(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_text((DOCS / "conf.py").read_text())
    links = "[1](page1.md) [2](lost.md#part2) [3](../src/page3.py) {py:func}`come.name4`"
    (docs / "index.md").write_text(f"# Index\n\n{links}\n\n```{{toctree}}\npage5\n```\n")
    (docs / "lost.md").write_text("# In no contents\n")
    done = build(docs, tmp_path / "out")
    assert done.returncode == 1
    for words in ("page1.md", "part2", "page3.py", "come.name4", "page5", "lost.md: WARNING"):
        assert words in done.stderr


# ---- what the pages show ----

ELSEWHERE = {
    "integrations": "packages that reach for a network: test_integrations.py",
    "models": "a file, and commands that use it: test_models.py",
    "plugins": "packages to install: test_plugins.py",
    "protocols": "registers a protocol for good: test_protocols.py",
}


def blocks(page, language):
    """What a page shows in that language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


PAGES = [page for page in sorted(DOCS.glob("*.md")) if blocks(page, "python") and page.stem not in ELSEWHERE]


@pytest.fixture
def given(tmp_path, monkeypatch):
    """What the reader has: pages that are about something else leave out the model and its data."""
    import uvicorn

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(uvicorn, "run", lambda app, port: None)
    (tmp_path / "states").mkdir()
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, stride=8), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    model, x = nn.Sequential(*layers), torch.rand(4, 3, 32, 32)
    labelled = [(x, model(x).argmax(dim=1)) for x in torch.rand(4, 16, 3, 224, 224)]
    given = {"come": come, "torch": torch, "model": model, "x": x, "source_batches": [x], "batches": labelled}
    yield given
    if "service" in given:
        given["service"].close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, given, capsys):
    """Its blocks one after the other; they print what the page says."""
    for code in blocks(page, "python"):
        if "init_process_group" not in code:  # under torchrun: examples/torchrun.py
            exec(compile(code, page.name, "exec"), given)
    shown, printed = "".join(blocks(page, "text")), capsys.readouterr().out
    if shown:
        number = r"\d+(?:\.\d+)?"
        assert re.sub(number, "N", printed) == re.sub(number, "N", shown)
        found = [float(value) for value in re.findall(number, printed)]
        assert found == pytest.approx([float(value) for value in re.findall(number, shown)], abs=2)  # percent


def test_the_commands_of_the_first_page_run(given, tmp_path, monkeypatch, capsys):
    """On pictures and a model of one's own."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nets.py").write_text(blocks(DOCS / "models.md", "python")[0].replace("classes=8", "classes=2"))
    for number in range(8):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 32), (30 * number, 0, 0)).save(folder / f"{number}.png")
    commands = [line for block in blocks(DOCS / "start.md", "sh") for line in block.splitlines()]
    (command,) = (line for line in commands if line.startswith("come bench"))
    code, out, err = call(monkeypatch, capsys, *shlex.split(command)[1:])
    assert code == 0, err
    assert "steady" in out


def rows(page):
    """What the first cells of the tables of a page name in code."""
    first = [line.split("|")[1] for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`(\w+)`", cell)}


def test_every_method_can_be_chosen():
    assert rows("choose.md") == set(come.methods.names())


def test_an_operator_finds_every_alarm_and_gauge():
    classifier = come.adapt(come.testing.TinyClassifier(nn.BatchNorm2d), "tent")
    for x in come.testing.batches(4):
        classifier(x)
    assert {*COUNTED, *classifier.health()} - {"steps"} <= rows("operate.md")

"""The scripts in docs/gallery: each runs, and its asserts hold; the page shows all of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = sorted((DOCS / "gallery").glob("*.py"))
NEEDS = {"to_onnx": ("onnxruntime", "onnx", "onnxscript"), "typos": ("transformers",)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_finds_what_it_says(script, tmp_path, monkeypatch):
    for package in NEEDS.get(script.stem, ()):
        pytest.importorskip(package)
    if script.stem == "to_onnx" and torch.__version__ < "2.6":
        pytest.skip("ONNX needs torch 2.6")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert not list(tmp_path.iterdir())  # it leaves nothing behind


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_states_its_finding(script):
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert "\nFinding: " in text.partition('"""')[2].partition('"""')[0]
    assert re.search("^ *assert ", text, flags=re.MULTILINE)


def test_the_page_shows_every_script():
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\{literalinclude\} gallery/(\w+)\.py$", page, flags=re.MULTILINE)
    assert sorted(shown) == [script.stem for script in SCRIPTS]
    assert re.findall(r"\]\(gallery/(\w+)\.py\)", page) == shown

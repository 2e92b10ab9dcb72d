"""Every recording says whose code was run: repository, commit, license."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
MANIFEST = json.loads((DATA / "manifest.json").read_text(encoding="utf-8"))
PLAIN = "plain forward of the stored model"


def test_every_file_has_a_case():
    assert {case["file"] for case in MANIFEST["cases"]} == {f"cases/{path.name}" for path in (DATA / "cases").iterdir()}


@pytest.mark.parametrize("entry", MANIFEST["cases"], ids=lambda entry: entry["name"])
def test_a_case_names_its_upstream(entry):
    """The project that its reference names; the rest is said once for each project."""
    project = entry["upstream"]
    assert project == "timm" if entry["reference"] == PLAIN else f"{project} project" in entry["reference"]
    upstream = MANIFEST["upstream"][project]
    assert upstream.keys() == {"repository", "commit", "license"}
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", upstream["repository"])
    owner_and_name = re.search(r"\(([\w-]+/[\w-]+)\)", entry["reference"])  # where the reference has it
    assert owner_and_name is None or upstream["repository"].endswith(f"/{owner_and_name[1]}")
    assert upstream["commit"] is None or re.fullmatch("[0-9a-f]{40}", upstream["commit"])
    assert upstream["license"] is None or upstream["license"].strip()


def test_no_project_is_left_over():
    assert {case["upstream"] for case in MANIFEST["cases"]} == MANIFEST["upstream"].keys()


def test_the_page_says_what_null_means():
    page = (DATA / "README.md").read_text(encoding="utf-8")
    for field in ("repository", "commit", "license"):
        assert f"* `{field}`:" in page
        if any(upstream[field] is None for upstream in MANIFEST["upstream"].values()):
            (meaning,) = (line for line in page.splitlines() if line.startswith(f"* `{field}`"))
            assert "null" in meaning

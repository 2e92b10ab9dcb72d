"""The files in .github: workflows run the commands of our pages with the least rights, and forms are complete."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FLOWS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (GITHUB / "workflows").iterdir()}
JOBS = {f"{flow}.{name}": job for flow, found in FLOWS.items() for name, job in found["jobs"].items()}
PAGES = [(ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "CONTRIBUTING.md", "docs/start.md")]

NOT_ON_A_PAGE = {
    "pip install build && python -m build": "only a release needs it",
    'ls dist/come_tta-"${GITHUB_REF_NAME#v}"-py3-none-any.whl': "is the tag the version?",
    'pip install dist/*.whl && python -c "import come"': "does the wheel work?",
}
TRUSTED = {"pypa/gh-action-pypi-publish": {"id-token"}}
"""Actions of others than GitHub that run in a job with a right to write, and which right. PyPI's own asks PyPI for a token."""


def commands(job):
    """The lines of a job's scripts, without the expressions that a matrix fills in."""
    return [
        re.sub(r"\$\{\{.*?\}\}", "", line).strip() for step in job["steps"] for line in step.get("run", "").splitlines()
    ]


def actions(job):
    """Names and versions of the actions of a job."""
    return [tuple(step["uses"].split("@")) for step in job["steps"] if "uses" in step]


def test_every_workflow_is_there():
    assert set(FLOWS) == {"tests", "site", "publish", "newest"}
    assert all(name == flow["name"] for name, flow in FLOWS.items())


@pytest.mark.parametrize("name", FLOWS)
def test_a_workflow_reads_only_and_runs_once_at_a_time(name):
    """Jobs that write say so themselves."""
    assert FLOWS[name]["permissions"] == {"contents": "read"}
    assert FLOWS[name]["concurrency"]["group"].startswith(name)
    assert "pull_request_target" not in FLOWS[name][True]  # yaml 1.1 reads `on` as true


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_can_write_runs_no_code_but_that_of_trusted_actions(name):
    job = JOBS[name]
    rights = {right for right, level in job.get("permissions", {}).items() if level == "write"}
    assert set(job.get("permissions", {}).values()) <= {"read", "write"}
    if rights:
        assert not commands(job)
        assert {action for action, _ in actions(job)}.isdisjoint({"actions/checkout"})
        for action, _ in actions(job):
            assert action.startswith("actions/") or rights <= TRUSTED[action], f"{action} gets {rights}"
    assert 0 < job["timeout-minutes"] <= 90


@pytest.mark.parametrize("name", JOBS)
def test_actions_have_a_major_version_and_checkouts_keep_no_token(name):
    for action, version in actions(JOBS[name]):
        assert re.fullmatch(r"v\d+|release/v\d+", version), f"{action}@{version}"
    for step in JOBS[name]["steps"]:
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("name", JOBS)
def test_the_commands_of_a_job_are_those_of_our_pages(name):
    for command in commands(JOBS[name]):
        shown = any(command in page for page in PAGES)
        assert shown != (command in NOT_ON_A_PAGE), f"show {command!r} on a page, or say why not in NOT_ON_A_PAGE"


@pytest.mark.parametrize("name", JOBS)
def test_the_extras_and_files_that_a_job_names_exist(name):
    known = set(PROJECT["optional-dependencies"])
    for command in commands(JOBS[name]):
        for extras in re.findall(r"\.\[([\w,-]+)\]", command):
            assert set(extras.split(",")) <= known
        for source, _ in re.findall(r"sphinx-build .* (\S+) (\S+)$", command):
            assert (ROOT / source).is_dir()
    for step in JOBS[name]["steps"]:
        if "cache-dependency-path" in step.get("with", {}):
            assert (ROOT / step["with"]["cache-dependency-path"]).is_file()


def test_every_exception_is_used():
    ran = {command for job in JOBS.values() for command in commands(job)}
    assert NOT_ON_A_PAGE.keys() <= ran
    assert TRUSTED.keys() <= {action for job in JOBS.values() for action, _ in actions(job)}


def test_every_supported_python_is_tested():
    supported = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)}
    strategy = FLOWS["tests"]["jobs"]["test"]["strategy"]["matrix"]
    assert set(strategy["python"]) == supported
    oldest = min(supported, key=lambda version: int(version.partition(".")[2]))
    assert PROJECT["requires-python"] == f">={oldest}"
    for job in JOBS.values():
        for step in job["steps"]:
            version = step.get("with", {}).get("python-version", oldest)
            assert version in {*supported, "${{ matrix.python }}"}


def test_one_python_measures_coverage():
    matrix = FLOWS["tests"]["jobs"]["test"]["strategy"]["matrix"]
    assert [one["options"] for one in matrix["include"]] == ["--cov"]
    assert matrix["include"][0]["python"] in matrix["python"]  # else it would be one run more
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert config["tool"]["coverage"]["report"]["fail_under"] == 85


def test_the_tests_and_linters_run_as_our_pages_say():
    """The command of the README for the tests, that of CONTRIBUTING.md for the linters."""
    readme, contributing, _ = PAGES
    (tests,) = (line for line in readme.splitlines() if line.endswith("-m pytest"))
    (linters,) = (line for line in contributing.splitlines() if line.endswith(".venv/bin/mypy"))
    assert tests in commands(JOBS["tests.test"])
    assert tests in commands(JOBS["newest.test"])
    assert linters in commands(JOBS["tests.lint"])


@pytest.mark.parametrize("path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_a_form_can_be_shown(path):
    """What GitHub asks of a form: a name, a description, fields with labels and names of their own."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form["blank_issues_enabled"] is False
        assert all(link["url"].startswith("https://") and link["about"] for link in form["contact_links"])
        return
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)

"""The leaderboard: from a run to a file, its check, and the page; and what is refused on the way."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from calling import call

from come.bench import Bench, Plan, RunFolder, board, machine, models, protocols
from come.bench.board.page import write_board
from come.bench.board.ranking import read_board
from come.bench.board.schema import LARGEST
from come.bench.protocols import Protocol
from come.errors import ConfigError, InputError

ROOT = Path(__file__).parents[1]
PLAN = Plan(model="fashion-vit", data="fashion:64", corruptions=("fog", "contrast"), batch_size=32)
COMMIT = "0123456789abcdef" * 2 + "01234567"
LINK = "https://github.com/acme/tta"


@pytest.fixture(scope="module")
def tiny():
    about = {"name": "tiny", "summary": "fashion, 64 images", "data": "embedded", "citation": "a test"}
    weights = models.fingerprint(models.load("fashion-vit").module)
    yield protocols.register(Protocol(plan=PLAN, images=64, weights_sha256=weights, **about))
    protocols._registry.remove("tiny")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of three rows and two seeds, made by a clean checkout."""
    chosen = {"methods": ("tent", "tent:lr=0.05"), "objectives": ("em",), "seeds": (0, 1)}
    folder = RunFolder(tmp_path_factory.mktemp("board") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("come.bench.machine.commit", lambda: COMMIT)
        Bench(tiny.plan_for(chosen), protocol=tiny).run(folder)
    return folder


@pytest.fixture(scope="module")
def found(run):
    return board.submission(run, "Acme", LINK)


@pytest.fixture
def file(found, tmp_path):
    """A function that writes the submission, changed by a function of its values, and returns the path."""

    def write(change=lambda values: None, name="acme.json"):
        values = json.loads(found.encoded())
        change(values)
        (tmp_path / name).write_text(json.dumps(values))
        return tmp_path / name

    return write


def put(*path, value):
    """A change: `put("rows", 0, "accuracy", value=1)`."""

    def change(values):
        for step in path[:-1]:
            values = values[step]
        values[path[-1]] = value

    return change


# ---- from a run to a page ----


def test_from_a_run_to_the_page(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "results" / "acme.json"
    out.parent.mkdir()
    arguments = ("--out", str(out), "--name", "Acme", "--link", LINK)
    code, said, _ = call(monkeypatch, capsys, "protocol", "submit", str(run.path), *arguments)
    assert (code, said.splitlines()[0].partition(":")[0]) == (0, str(out))
    first = out.read_bytes()
    call(monkeypatch, capsys, "protocol", "submit", str(run.path), *arguments)
    assert out.read_bytes() == first
    code, said, _ = call(monkeypatch, capsys, "protocol", "check", str(out))
    assert (code, said) == (0, f"{out}: valid, 3 rows under protocol tiny\n")
    code, said, _ = call(monkeypatch, capsys, "report", str(out.parent))
    assert code == 0
    assert max(map(len, said.splitlines())) <= 80 or str(tmp_path) in said
    assert {"source", "tent + em", "tent:lr=0.05 + em"} <= {
        re.split(r"\s{2,}| [+-]\d", line)[0] for line in said.splitlines()
    }
    page = (out.parent / "report.html").read_text()
    for text in ("tent:lr=0.05", COMMIT[:7], f'href="{LINK}"', "Protocol tiny: fashion, 64 images"):
        assert text in page


def test_the_numbers_are_those_of_the_run(run, found):
    assert [row.title for row in found.rows] == ["source + em", "tent + em", "tent:lr=0.05 + em"]
    assert (found.domains, found.samples, found.images) == (("fog", "contrast"), 128, 64)
    assert [(row.guard, row.statistics) for row in found.rows] == [(True, "mixed")] * 3
    record = next(r for r in run.records() if r.cell.pair == ("tent", "em") and r.cell.seed == 1)
    (domain,) = record.result.domains
    place = found.domains.index(domain)
    tent = found.rows[1].seeds[1]
    assert tent.accuracy[place] == round(100 * record.result.metrics[domain]["accuracy"], 3)
    assert tent.fpr[place] == round(100 * record.result.metrics[domain]["fpr"], 3)
    assert found.no_adapt == found.rows[0].accuracy
    assert list(board.problems(found)) == []


def test_the_best_is_first_and_gains_are_paired_by_seed(found, tmp_path):
    found.save(tmp_path / "acme.json")
    ((_, lines),) = read_board(tmp_path).rankings()
    gains = [line.gain.mean for line in lines]
    assert gains == sorted(gains, reverse=True)
    tent = next(line for line in lines if line.title == "tent + em")
    by_seed = [
        sum(b - a for a, b in zip(before.accuracy, after.accuracy, strict=True)) / 2
        for before, after in zip(found.rows[0].seeds, found.rows[1].seeds, strict=True)
    ]
    assert tent.gain.mean == pytest.approx(sum(by_seed) / 2)
    assert tent.gain.spread == pytest.approx(abs(by_seed[0] - by_seed[1]) / math.sqrt(2))
    assert tent.worst[1].mean <= tent.gain.mean


def test_several_files_share_the_source_row(found, tmp_path):
    for name in ("a", "b"):
        found.save(tmp_path / f"{name}.json")
    ((_, lines),) = read_board(tmp_path).rankings()
    assert [line.who for line in lines if line.is_source] == ["2 files"]
    assert len(lines) == 5


# ---- what is refused ----

WRONG = {
    "format": (put("format", value="come-result-9"), "format must be 'come-result-1', the only one .*, got 'come-result-9'"),
    "field": (put("colour", value=1), "colour is no field of come-result-1; leave it out"),
    "inner field": (put("rows", 1, "colour", value=1), r"rows\.1\.colour is no field of come-result-1"),
    "missing": (lambda values: values.pop("commit"), "commit is missing"),
    "nan": (put("rows", 1, "seeds", 0, "fpr", 1, value=math.nan), r"rows.1.seeds.0.fpr.1 must be a finite number, got nan"),
    "infinite": (put("rows", 1, "hyper", "lr", value=math.inf), r"rows\.1\.hyper\.lr must be a finite number.*got inf"),
    "range": (put("rows", 1, "accuracy", value=101), r"rows\.1\.accuracy must be less than or equal to 100, got 101"),
    "type": (put("rows", 1, "guard", value="no"), r"rows\.1\.guard must be a valid boolean, got 'no'"),
    "hash": (put("weights_sha256", value="abc"), r"weights_sha256 String should match pattern|weights_sha256 must"),
    "changed": (put("commit", value=f"{COMMIT}-changed"), "commit "),
    "script": (put("link", value="javascript:alert(1)"), "link must be an https:// address.*got 'javascript"),
    "user": (put("link", value="https://github.com@evil.example/"), "link must be an https:// address, without a user name"),
    "quote": (put("link", value='https://a.example/"onclick=x'), "link must be an address of at most 300 ASCII characters"),
    "long name": (put("submitted_by", value="a" * 100_000), "submitted_by must have at most 80|submitted_by must be printable"),
    "line": (put("submitted_by", value="two\nlines"), "submitted_by must be printable text"),
    "protocol": (put("protocol", value="tinny"), "protocol: no protocol 'tinny'; did you mean 'tiny'"),
    "digest": (put("protocol_sha256", value="0" * 64), "protocol_sha256 must be '[0-9a-f]{64}' in protocol tiny, got '0000"),
    "weights": (put("weights_sha256", value="0" * 64), "weights_sha256 must be .*; run it with the weights of fashion-vit"),
    "images": (put("images", value=63), "images must be 64 in protocol tiny, got 63; run it on all images"),
    "samples": (put("samples", value=64), "samples must be 128 in protocol tiny, got 64"),
    "precision": (put("precision", value="bf16"), "precision must be 'float32' in protocol tiny, got 'bf16'"),
    "domains": (put("domains", value=["fog", "snow"]), "domains must be the 2 of protocol tiny, got 2 without 'contrast'"),
    "domain": (lambda v: v["rows"][1]["seeds"][0]["accuracy"].pop(), "rows.1.seeds.0.accuracy must be 2 .* got 1"),
    "seed": (lambda v: v["rows"][1]["seeds"].pop(), r"rows.1.seeds \(tent . em\) must be those of the source .* got \[0\]"),
    "source": (lambda v: v["rows"].pop(0), "rows must have the source model"),
    "only source": (lambda v: v.update(rows=v["rows"][:1]), "rows must have a method besides the source model"),
    "twice": (lambda v: v["rows"].append(v["rows"][1]), r"rows must differ, got 2 of tent \+ em, guard"),
    "mean": (put("rows", 1, "accuracy", value=99.9), r"rows.1.accuracy \(tent . em\) must be .*, the mean of .*, got 99.9"),
    "no adapt": (put("no_adapt", value=99.9), r"no_adapt must be [\d.]+, the accuracy of the source model, got 99\.9"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_refused_in_a_sentence(file, change, said, monkeypatch, capsys):
    path = file(change)
    code, out, errors = call(monkeypatch, capsys, "protocol", "check", str(path))
    assert (code, out) == (1, "")
    assert all(line.startswith(f"{path}: ") and len(line) < len(str(path)) + 500 for line in errors.splitlines())
    assert re.search(said, errors)
    with pytest.raises(InputError, match=re.escape(str(path))):
        board.read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "cannot read .*Expecting property name"),
        (b"[1]", r"must hold a JSON object that 'come protocol submit' wrote, got \[1\]"),
        (b"[" * 100_000, "cannot read"),
        (b" " * (LARGEST + 1), f"longer than {LARGEST} bytes"),
        (b"{}", "format is missing"),
        (b'{"format": 1}', "format must be 'come-result-1'"),
        (b'{"self": 1, "format": "come-result-1"}', "self is no field"),
        (b"\xff", "cannot read"),
    ],
)
def test_what_is_no_submission(text, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.json").write_bytes(text)
    code, _, errors = call(monkeypatch, capsys, "protocol", "check", str(tmp_path / "a.json"))
    assert code == 1
    assert re.search(said, errors)


def test_all_problems_are_named_and_good_files_too(file, monkeypatch, capsys):
    def change(values):
        values["no_adapt"], values["rows"][1]["fpr"], values["images"] = 1, 1, 1

    good, bad = file(name="good.json"), file(change, "bad.json")
    code, said, errors = call(monkeypatch, capsys, "protocol", "check", str(good), str(bad))
    assert code == 1
    assert said.startswith(str(good))
    assert [line.split()[1] for line in errors.splitlines()] == ["images", "rows.1.fpr", "no_adapt"]


def test_no_adapt_that_misses_the_number(found, tiny, monkeypatch):
    missed = tiny.model_copy(update={"no_adapt": found.no_adapt + 1})
    monkeypatch.setattr(protocols, "get", lambda name: missed)
    (said,) = board.problems(found)
    assert said.startswith(f"no_adapt must be {missed.expected} in protocol tiny, got {found.no_adapt:g}")


def test_runs_that_cannot_be_submitted(run, tiny, tmp_path, monkeypatch):
    def made(path, protocol=tiny, commit=COMMIT, **chosen):
        monkeypatch.setattr("come.bench.machine.commit", lambda: commit)
        chosen = {"methods": ("tent",), "objectives": ("em",)} | chosen
        Bench(tiny.plan_for(chosen) if protocol else PLAN.but(**chosen), protocol=protocol).run(
            RunFolder(tmp_path / path)
        )
        return RunFolder(tmp_path / path)

    def refuses(folder, said):
        with pytest.raises(InputError, match=said):
            board.submission(folder, "Acme")

    refuses(made("free", None), "must be a run under a protocol, and is none")
    refuses(
        made("changed", commit=f"{COMMIT}-changed"),
        "work of a commit of come, got 0123456789abcdef.*-changed; run it again from a clone",
    )
    refuses(made("unknown", commit=None), "work of a commit of come, got unknown")
    folder = made("part")
    with pytest.raises(ConfigError, match="submitted_by must have at most 80 characters"):
        board.submission(folder, "a" * 81)
    with pytest.raises(ConfigError, match="link must be an https:// address"):
        board.submission(folder, "Acme", "http://a.example")
    made("part", guard=False)
    refuses(folder, "must hold the cells of protocol tiny only, got 4 others, such as source")
    folder = made("two", commit=COMMIT)
    made("two", commit="f" * 40, methods=("pl",))
    refuses(folder, "must be the work of one version of commit, got 0123.* and ffff")
    folder = made("unfinished")
    next(folder.file(r.key) for r in folder.records() if r.cell.method == "tent").unlink()
    refuses(folder, "must be finished, but 1 parts are not, such as not finished: tent . em on fog, seed 0")


def test_what_submit_and_report_refuse(run, file, tmp_path, monkeypatch, capsys):
    name = ("--name", "Acme")
    for arguments, said in (
        (
            ("protocol", "submit", str(run.path), "--out", "a.txt", *name),
            "out must be a file that ends in .json, got a.txt",
        ),
        (("protocol", "submit", str(run.path), "--out", str(tmp_path / "no" / "a.json"), *name), "cannot write"),
        (("protocol", "submit", str(tmp_path), "--out", "a.json", *name), "is no run folder of come"),
        (("report", str(file().parent), "--format", "md"), "format has no effect on a leaderboard; leave it out"),
        (("report", str(ROOT / "results" / "harm")), "holds neither (18 other JSON files)"),
    ):
        code, _, errors = call(monkeypatch, capsys, *arguments)
        assert code == 2
        assert said in errors


def test_a_wrong_file_is_left_out_of_the_page(file, monkeypatch, capsys):
    file(put("images", value=1), "bad.json")
    (file().parent / "other.json").write_text("{}")
    code, said, _ = call(monkeypatch, capsys, "report", str(file().parent))
    assert code == 0
    assert "bad.json: images must be 64" in said
    assert "1 JSON files here are no submissions" in said
    assert "bad.json: images must be 64" in (file().parent / "report.html").read_text()


def test_html_in_names_is_text(file, tmp_path):
    image = "<img src=x onerror=alert(1)>"

    def change(values):
        values["submitted_by"] = values["devices"][0] = image
        values["rows"][1]["method"] = values["rows"][1]["objective"] = image
        values["rows"][2]["hyper"] = {image: "</script><script>"}

    write_board(read_board(file(change).parent), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<img" not in page
    assert page.count("<script") == 1
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


# ---- what this repository holds ----


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "board").glob("*.json")), ids=lambda path: path.name)
def test_committed_files_pass_the_check(path):
    assert list(board.problems(board.load(path))) == []
    assert path.stat().st_size < 50_000
    assert path.read_text() == board.load(path).encoded()


def test_the_templates_of_github_parse():
    folder = ROOT / ".github"
    files = [path for path in sorted((folder / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
    forms = [yaml.safe_load(path.read_text()) for path in files]
    assert [path.stem for path in files] == ["bug", "feature", "result"]
    for form in forms:
        assert {"name", "description", "body"} <= set(form)
        asked = [part for part in form["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in asked}) == len(asked)
        assert {part["type"] for part in form["body"]} <= {"markdown", "input", "textarea", "checkboxes"}
        assert all(part["attributes"]["label"] for part in asked)
    assert (folder / "pull_request_template.md").read_text().strip()


def git(folder, *arguments):
    """Run git in a folder, as somebody."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_the_commit_is_that_of_the_library(tmp_path, monkeypatch):
    package = tmp_path / "src" / "come"
    package.mkdir(parents=True)
    (package / "version.py").write_text("1")
    monkeypatch.setattr(machine, "PACKAGE", package)
    monkeypatch.setattr(machine, "_of_installation", lambda: None)
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))  # as in a hook of another repository
    commit = machine.commit.__wrapped__
    assert commit() is None
    monkeypatch.delenv("GIT_DIR")
    git(tmp_path, "init")
    assert commit() is None  # a repository of something else, which holds the environment that come is installed in
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    assert re.fullmatch("[0-9a-f]{40}", commit())
    (tmp_path / "notes.txt").write_text("not the library")
    assert re.fullmatch("[0-9a-f]{40}", commit())
    (package / "new.py").write_text("2")
    assert re.fullmatch("[0-9a-f]{40}-changed", commit())


def test_pip_notes_the_commit_too(monkeypatch):
    noted = {"url": "https://github.com/acme/come", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}
    monkeypatch.setattr(machine, "_of_checkout", lambda: None)
    for text, expected in (
        (json.dumps(noted), COMMIT),
        ('{"dir_info": {"editable": true}}', None),
        (None, None),
        ("{", None),
    ):
        monkeypatch.setattr(machine, "distribution", lambda name, text=text: SimpleNamespace(read_text=lambda _: text))
        assert machine.commit.__wrapped__() == expected

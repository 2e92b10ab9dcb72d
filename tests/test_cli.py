"""The command line as a user meets it: help, lists, tables in 80 columns, and one line for each mistake."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from calling import call
from PIL import Image

import come
from come.bench import Cell, cli
from come.bench.cli import lists
from come.bench.record import Machine, Record, Result
from come.bench.report import results_table, to_markdown, to_rich


def test_bench_prints_a_table_and_writes_a_report(tmp_path, monkeypatch, capsys):
    arguments = (
        *("bench", "--methods", "source,tent", "--corruptions", "fog,contrast", "--limit", "128", "--seeds", "0,1"),
        *("--set", "tent.lr=1e-3", "--out", str(tmp_path / "run")),
    )
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    assert "Fog" in out
    assert "Improve" in out
    assert "±" in out
    assert max(len(line) for line in out.splitlines() if "report.html" not in line) <= 80
    report = (tmp_path / "run" / "report.md").read_text()
    assert "|tent + come|" in report
    assert "come bench --methods" in report
    code, out, _ = call(monkeypatch, capsys, *arguments)
    assert code == 0
    assert out.count("(done before)") == 12


def test_report_and_compare_of_a_finished_run(tmp_path, monkeypatch, capsys):
    run = str(tmp_path / "run")
    arguments = ("bench", "--methods", "source,tent", "--corruptions", "contrast", "--limit", "64", "--out", run)
    assert call(monkeypatch, capsys, *arguments)[0] == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    code, out, err = call(monkeypatch, capsys, "report", run, "--out", str(tmp_path / "page.html"))
    assert (code, err) == (0, "")
    assert "tent + come" in out
    assert (tmp_path / "page.html").exists()
    for format_, words in (("md", "|tent + come|"), ("latex", "toprule"), ("csv", "tent,come,"), ("json", '"tent"')):
        code, out, _ = call(monkeypatch, capsys, "report", run, "--format", format_, "--metric", "fpr")
        assert (code, words in out) == (0, True), out
    code, out, _ = call(monkeypatch, capsys, "report", run, "--figures", "svg", "--score", "energy")
    assert code == 0
    assert list((tmp_path / "run" / "figures").glob("*.svg"))
    code, out, err = call(monkeypatch, capsys, "compare", run, run, "--all")
    assert (code, err) == (0, "")
    assert "accuracy: 0 better, 0 worse, 3 without a difference" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    code, out, err = call(monkeypatch, capsys, "compare", run, run, "--json")
    assert (code, err) == (0, "")
    rows = [row for row in json.loads(out)["rows"] if row["metric"] == "accuracy"]
    assert [(row["method"], row["gain"], row["change"]) for row in rows] == [
        *(("source", 0.0, "same"), ("tent", 0.0, "same"), ("tent", 0.0, "same"))
    ]


def test_two_plans_in_one_folder_are_reported_one_at_a_time(tmp_path, monkeypatch, capsys):
    run = str(tmp_path / "run")
    for severity in ("3", "5"):
        arguments = ("bench", "--methods", "source", "--corruptions", "fog", "--limit", "16", "--severity", severity)
        assert call(monkeypatch, capsys, *arguments, "--out", run)[0] == 0
    code, _, err = call(monkeypatch, capsys, "report", run)
    assert code == 2
    assert "holds 2 plans; choose one with --plan 1: severity" in err
    assert "--plan 2: severity" in err
    for plan in ("1", "2"):
        assert call(monkeypatch, capsys, "report", run, "--plan", plan)[0] == 0
    assert call(monkeypatch, capsys, "report", run, "--plan", "3")[0] == 2


def test_reports_of_what_is_no_run(tmp_path, monkeypatch, capsys):
    for arguments, words in (
        (("report", str(tmp_path / "no")), "no run folder of come"),
        (("compare", str(tmp_path), str(tmp_path)), "no run folder of come"),
        (("report", str(tmp_path), "--format", "doc"), "no format 'doc'"),
        (("report", str(tmp_path), "--figures", "gif"), "no figure format 'gif'"),
        (("report", str(tmp_path), "--score", "enrgy"), "did you mean 'energy'"),
    ):
        code, _, err = call(monkeypatch, capsys, *arguments)
        assert code == 2
        assert words in err
    assert not list(tmp_path.iterdir())
    come.bench.RunFolder(tmp_path / "empty")
    code, _, err = call(monkeypatch, capsys, "report", str(tmp_path / "empty"))
    assert (code, "no finished cell" in err) == (2, True)


def test_reproduce(tmp_path, monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "reproduce", "--list")
    assert code == 0
    assert "figure-collapse" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    out_folder = tmp_path / "run"
    code, out, err = call(monkeypatch, capsys, "reproduce", "mixed", "--methods", "source,tent", "--limit", "32",
                          "--out", str(out_folder))  # fmt: skip
    assert (code, err) == (0, "")
    assert "not the paper's model and data" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "|tent + come|" in (out_folder / "paper.md").read_text()
    assert (out_folder / "report.html").exists()
    code, _, err = call(monkeypatch, capsys, "reproduce", "abltion")
    assert (code, "did you mean 'ablation'" in err) == (2, True)
    code, _, err = call(monkeypatch, capsys, "reproduce", "ablation", "--seeds", "x")
    assert (code, "seeds.0 must be a valid integer, got 'x'" in err) == (2, True)


def test_a_configuration_file_and_options_over_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(
        'methods = ["tent"]\ncorruptions = ["fog"]\nbatch-size = 32\nlimit = 64\n[set.tent]\nlr = 0.01\n'
    )
    code, out, err = call(
        monkeypatch, capsys, "bench", "--config", str(tmp_path / "c.toml"), "--objectives", "come", "--dry-run"
    )
    assert (code, err) == (0, "")
    assert "lr=0.01" in out
    assert "1 cells, 64 samples in all" in " ".join(out.split())
    assert "batch 32" in " ".join(out.split())
    assert not (tmp_path / "runs").exists()


def test_presets(monkeypatch, capsys):
    _, quick, _ = call(monkeypatch, capsys, "bench", "--dry-run")
    assert "14 cells, 80640 samples" in " ".join(quick.split())
    assert "lifelong" in quick
    assert call(monkeypatch, capsys, "bench", "--preset", "quick", "--dry-run")[1] == quick
    _, changed, _ = call(monkeypatch, capsys, "bench", "--seeds", "0,1", "--dry-run")
    assert "28 cells" in changed
    _, plain, _ = call(monkeypatch, capsys, "bench", "--setting", "standard", "--dry-run")
    assert "32 cells" in plain
    _, standard, _ = call(monkeypatch, capsys, "bench", "--preset", "standard", "--dry-run")
    assert "120 cells" in standard
    _, every, _ = call(monkeypatch, capsys, "bench", "--methods", "all", "--corruptions", "all", "--dry-run")
    assert "spatter" in every


@pytest.mark.parametrize("kind", lists.LISTS)
def test_lists(kind, monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "list", kind)
    assert code == 0
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    wanted = {"methods": come.methods.names(), "objectives": ["em", "come"], "settings": ["standard"]}
    assert all(name in out for name in wanted.get(kind, []))


@pytest.mark.parametrize("kind", lists.LISTS)
def test_lists_as_json(kind, monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "list", kind, "--json")
    rows = lists.LISTS[kind].rows()[1:]
    assert code == 0
    assert [list(found.values()) for found in json.loads(out)] == [list(row) for row in rows]
    assert all(key.isidentifier() for found in json.loads(out) for key in found)
    if kind == "protocols":
        assert call(monkeypatch, capsys, "protocol", "list", "--json")[1] == out


def test_a_list_without_a_kind_lists_the_kinds(monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, "list")
    assert (code, err) == (0, "")
    head, *lines = [line.rstrip() for line in out.splitlines()]
    assert head.split() == ["list", "what", "it", "lists", "example"]
    assert [line.split()[0] for line in lines] == list(lists.LISTS)  # one line each
    assert all(line.endswith(f"come list {kind}") for line, kind in zip(lines, lists.LISTS, strict=True))
    assert max(map(len, lines)) <= 80
    code, out, _ = call(monkeypatch, capsys, "list", "--json")
    assert code == 0
    assert [(one["list"], one["example"]) for one in json.loads(out)] == [(k, f"come list {k}") for k in lists.LISTS]
    code, _, err = call(monkeypatch, capsys, "list", "metods")
    assert code == 2
    assert err.startswith("error: no list 'metods'; did you mean 'methods'?")


def test_shell_completion(tmp_path, monkeypatch):
    come_ = tmp_path / "come"
    come_.write_text(f"#!{sys.executable}\nfrom come.__main__ import main\nmain()\n")
    come_.chmod(0o755)
    typed = {"COMP_WORDS": "come list obj", "COMP_CWORD": "2", "_COME_COMPLETE": "complete_bash"}
    for command, more, words in (
        ("come --show-completion bash; true", {}, "complete -o default -F _come_completion come"),
        ("come; true", typed, "objectives"),
    ):
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **more}
        done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip().splitlines()[-1] == words, done.stderr


def test_help(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "--help")
    assert code == 0
    assert "come bench" in out
    code, out, _ = call(monkeypatch, capsys, "bench", "--help")
    assert code == 0
    assert "--corruptions" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    code, out, _ = call(monkeypatch, capsys, "--version")
    assert (code, out.strip()) == (0, f"come {come.__version__}")


@pytest.fixture
def photos(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save(tmp_path / "photos" / name / "1.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.toml").write_text("methods = [")
    (tmp_path / "unknown.toml").write_text("method = ['tent']")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"format": "come-run-2", "come": "9.9"}')
    (tmp_path / "file").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "tnet"], "no method 'tnet'; did you mean 'tent'?"),
        (["--objectives", "cme"], "did you mean 'come'"),
        (["--corruptions", "fogg"], "no corruption 'fogg'; did you mean 'fog'?"),
        (["--model", "fashion-vti"], "did you mean 'fashion-vit'"),
        (["--data", "fashon"], "did you mean 'fashion'"),
        (["--setting", "standrad"], "did you mean 'standard'"),
        (["--preset", "quik"], "did you mean 'quick'"),
        (["--severity", "0"], "severity must be greater than or equal to 1, got 0"),
        (["--severity", "6"], "severity must be less than or equal to 5, got 6"),
        (["--severity", "five"], "severity must be a valid integer, got 'five'"),
        (["--seeds", "0,x"], "seeds.1 must be a valid integer, got 'x'"),
        (["--batch-size", "0"], "batch-size must be greater than or equal to 1, got 0"),
        (["--rounds", "2"], "rounds has no effect in the standard setting; leave it out, or choose --setting lifelong"),
        (["--outlier-ratio", "0.3"], "outlier-ratio has no effect in the standard setting"),
        (["--source-size", "3"], "source-size has no effect: none of tent uses source images"),
        (["--setting", "open-world", "--outliers", "folder:{0}/nowhere"], "nowhere does not exist"),
        (["--methods", "eata", "--source-data", "folder:{0}/nowhere"], "nowhere does not exist"),
        (["--model", "timm:vit_tiny_patch16_224", "--checkpoint", "{0}/none.pt"], "cannot read the checkpoint"),
        (["--workers", "-1"], "workers must be an integer >= 0, got -1"),
        (["--methods", "foa", "--model", "fashion-resnet-bn"], "foa"),
        (["--set", "tent.lrr=1"], "did you mean 'lr'"),
        (["--set", "lr=1"], "set must be METHOD.NAME=VALUE, e.g. tent.lr=5e-4, got 'lr=1'"),
        (["--set", "tent.lr=-1"], "lr must be a positive number, or None for the default, got -1"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used here"),
        (["--device", "tpu"], "device 'tpu' cannot be used here"),
        (
            ["--normalization", "imagnet"],
            "normalization must be 'model', 'imagenet', 'half', 'caffe' or 'lite', got 'imagnet'",
        ),
        (["--on-bad-image", "ignore"], "no value of --on-bad-image 'ignore'"),
        (["--data", "folder:{0}/nowhere"], "nowhere does not exist; give the folder"),
        (["--data", "folder:{0}/empty"], "empty has no subfolders"),
        (["--data", "folder:{0}/photos"], "has 2 classes, fashion-resnet-bn has 8"),
        (["--config", "{0}/broken.toml"], "cannot read the configuration"),
        (["--config", "{0}/unknown.toml"], "no option in"),
        (["--config", "{0}/none.toml"], "cannot read the configuration"),
        (["--replay", "{0}/none.json"], "cannot read the stream"),
        (["--out", "{0}/other"], "was written by come 9.9"),
        (["--out", "{0}/file/run"], "cannot write to the run folder"),
        (["--out", "{0}/photos"], "is not empty and not a run of come"),
        (["--nonsense"], "No such option: --nonsense"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry"])
def test_mistakes_get_one_line_and_code_2(arguments, message, dry, photos, monkeypatch, capsys):
    """Before the first cell runs, and just as much if nothing would be run."""
    if dry and arguments[0] == "--out":
        pytest.skip("a dry run does not open the folder")
    monkeypatch.chdir(photos)
    filled = [a.format(photos) for a in arguments]
    code, out, err = call(monkeypatch, capsys, "bench", "--limit", "8", "--methods", "tent", *dry, *filled)
    assert code == 2
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1, err
    assert message in err
    assert "Traceback" not in out + err
    assert not (photos / "runs").exists() or not list((photos / "runs").glob("*/cells/*"))


def test_debug_shows_the_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["come", "bench", "--methods", "tnet", "--debug"])
    with pytest.raises(come.ConfigError):
        cli.main()
    code, _, err = call(monkeypatch, capsys, "list", "method")
    assert (code, "did you mean 'methods'" in err) == (2, True)


def test_without_the_extra_the_install_command_is_named():
    code = "import sys; sys.modules['typer'] = None; sys.argv = ['come']; import come.__main__ as m; m.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install -e ".[bench]"' in done.stderr


def record(method, objective, accuracies, fpr, seed=0):
    metrics = {d: {"accuracy": a / 100, "fpr": fpr / 100, "samples": 10.0, "used": 1.0} for d, a in accuracies.items()}
    cell = Cell(method=method, objective=objective, seed=seed, size=10, corruptions=tuple(accuracies))
    result = Result(
        domains=tuple(metrics),
        fresh=(True,) * len(metrics),
        metrics=metrics,
        samples=10,
        seconds=1.0,
        peak_memory_mb=1.0,
    )
    return Record(cell=cell, result=result, machine=Machine(versions={}, device="cpu", threads=1, load=0.0))


def test_the_table_has_the_form_of_the_paper():
    table = results_table(
        [
            record("source", "em", {"fog": 50.0, "snow": 40.0}, 60),
            record("tent", "em", {"fog": 60.0, "snow": 40.0}, 70),
            record("tent", "come", {"fog": 60.4, "snow": 39.5}, 65),
        ]
    )
    assert table.columns == ("Fog", "Snow", "Acc↑", "FPR↓")
    assert [row.objective for row in table.rows] == ["", "em", "come", "improve"]
    improve = table.rows[-1].entries
    assert [str(e) for e in improve] == ["+0.4", "-0.5", "+0.0", "+5.0"]  # marks need the rows
    assert "|tent + come|60.4|39.5|" in to_markdown(table)


def test_several_seeds_give_mean_and_deviation():
    table = results_table([record("source", "em", {"fog": a}, 50, seed) for seed, a in enumerate((40.0, 50.0))])
    assert str(table.rows[0].entries[0]) == "45.0±7.1"


def test_wide_tables_are_cut_to_the_terminal():
    from rich.console import Console

    names = come.corruptions.names("standard")
    rows = [
        record(m, o, dict.fromkeys(names, 50.0), 50, s) for m in ("tent", "sar") for o in ("em", "come") for s in (0, 1)
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    for part in to_rich(results_table(rows), 80):
        console.print(part)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert text.count("±") == 4 * 17


def test_too_few_samples_for_a_setting(tmp_path, monkeypatch, capsys):
    arguments = ("bench", "--methods", "source", "--corruptions", "fog", "--setting", "recurring", "--limit")
    code, _, err = call(monkeypatch, capsys, *arguments, "5", "--out", str(tmp_path / "run"))
    said = " ".join(err.split())
    assert code
    assert "5 samples are too few for the recurring setting" in said
    assert "--limit" in said

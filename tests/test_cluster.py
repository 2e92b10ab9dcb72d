"""Cells on a Ray that the tests start: the same records as on one machine, and nothing is lost when a process is killed."""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

import come
from come.bench import Bench, Plan, RunFolder, cli, models, run
from come.bench.cluster import Cluster
from come.bench.data import DatasetSource
from come.bench.engines.progress import Progress
from come.bench.engines.ray import Worker, Workers
from come.bench.engines.schedule import Finished
from come.testing import TinyClassifier

METHODS, SHIFTS = ("source", "tent"), ("fog", "snow", "contrast", "jpeg_compression")
PLAN = Plan(model="tiny", methods=METHODS, corruptions=SHIFTS, seeds=(0, 1), limit=32, batch_size=16)


def tiny(classes=8, kind=TinyClassifier):
    """A model that is loaded at once: most of the time goes into starting processes."""
    torch.manual_seed(0)
    return models.Model("tiny", kind(torch.nn.BatchNorm2d, classes), models.Preprocess(8, 8), classes)


SMALL = {"object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def machines():
    """A cluster of one machine, to which a test can add others: processes that Ray takes for machines."""
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    from ray.cluster_utils import Cluster as Machines

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, about its future versions
        found = Machines(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **SMALL})
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def ray(machines):
    import ray

    Cluster(machines.address).connect("cpu", None)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return run(PLAN, folder, model=tiny()), RunFolder(folder)


class Notes(Progress):
    def __init__(self, on_advance=lambda: None):
        self.finished, self.samples, self.on_advance = [], 0, on_advance

    def advance(self, samples):
        self.samples += samples
        self.on_advance()

    def finish(self, cell, record, resumed):
        self.finished.append((cell.key, resumed))


def check_same(alone, records, folder):
    """Every cell is there once, with the numbers that one process finds."""
    expected, first = alone
    assert [r.key for r in records] == [r.key for r in expected]
    assert len(list(folder.cells.iterdir())) == len(expected)
    for one, two in zip(expected, records, strict=True):
        assert one.result.metrics == two.result.metrics
        a, b = first.rows(one.key), folder.rows(two.key)
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_24_cells_are_those_of_one_machine(tmp_path, ray, alone):
    progress, folder = Notes(), RunFolder(tmp_path)
    bench = Bench(PLAN, model=tiny(), jobs=None, cluster=Cluster())
    assert (bench.jobs, len(bench.cells)) == (2, 24)
    with ExitStack() as held, ThreadPoolExecutor(1) as pool:
        assert held.enter_context(folder.claim(bench.cells[0]))  # as another process would; it is waited for
        running = pool.submit(bench.run, folder, progress)
        until = time.monotonic() + 90
        while len(progress.finished) < 23 and not running.done() and time.monotonic() < until:
            time.sleep(0.05)
        held.close()
        records = running.result(60)
    check_same(alone, records, folder)
    assert progress.samples == 24 * 32
    assert sorted(progress.finished) == sorted((r.key, False) for r in records)
    assert {(r.machine.jobs, r.machine.threads) for r in records} == {(2, 1)}
    assert {p.name for p in folder.streams.iterdir()} == {p.name for p in alone[1].streams.iterdir()}
    again = Notes()
    assert Bench(PLAN, model=tiny(), cluster=Cluster()).run(folder, again) == records
    assert all(resumed for _, resumed in again.finished)


def kill_a_worker(machines):
    started_here = psutil.Process().children(recursive=True)
    next(child for child in started_here if "ray::Worker" in " ".join(child.cmdline())).kill()


def kill_a_machine(machines):
    machines.remove_node(machines.list_all_nodes()[-1], allow_graceful=False)
    machines.add_node(num_cpus=4, **SMALL)  # and another one comes


@pytest.mark.parametrize(
    ("kill", "cpus"), [(kill_a_worker, 1), pytest.param(kill_a_machine, 3, marks=pytest.mark.slow)]
)
def test_a_kill_in_mid_cell(tmp_path, machines, ray, kill, cpus):
    if cpus > 2:  # so it runs on a machine of its own
        machines.add_node(num_cpus=4, **SMALL)
    pixels = torch.randint(256, (400, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    source = DatasetSource([(image, 0) for image in pixels], num_classes=2, name="mine")
    shifts = ("brightness", "contrast")
    plan = Plan(model="tiny", data="mine", methods=("tent",), corruptions=shifts, objectives=("em",), batch_size=1)
    folder, killed = RunFolder(tmp_path / "ray"), []

    def once():
        if not killed:
            killed.append(kill)
            kill(machines)

    progress, given = Notes(once), {"source": source, "model": tiny(2)}
    with pytest.warns(UserWarning, match=r"a worker died; its cell is run again: tent [+] em, \w+, seed 0"):
        records = Bench(plan, **given, jobs=1, cluster=Cluster(cpus=cpus)).run(folder, progress)
    check_same((run(plan, tmp_path / "alone", **given), RunFolder(tmp_path / "alone")), records, folder)
    assert [resumed for _, resumed in progress.finished] == [False] * 2
    if cpus > 2:
        machines.remove_node(machines.list_all_nodes()[-1])


COME = f"""
import torch
from come.bench import cli, models
from come.testing import TinyClassifier

{inspect.getsource(tiny)}
models.load = lambda *_, **__: tiny()
cli.main()
"""


@pytest.mark.slow
def test_the_first_process_killed_in_mid_grid(tmp_path, ray, alone):
    out = tmp_path / "run"
    command = [
        *(sys.executable, "-c", COME, "bench", "--model", "tiny", "--engine", "ray", "--jobs", "1", "--out", str(out)),
        *("--address", ray.get_runtime_context().gcs_address, "--methods", ",".join(METHODS), "--batch-size", "16"),
        *("--corruptions", ",".join(SHIFTS), "--seeds", "0,1", "--limit", "32"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until = time.monotonic() + 90
    while len(list(out.glob("cells/[!.]*"))) < 8 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    said = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, said
    folder, progress = RunFolder(out), Notes()
    before = {path: path.stat().st_mtime_ns for path in folder.cells.glob("[!.]*")}
    assert 8 <= len(before) < 24
    again = Bench(PLAN, model=tiny(), jobs=1, cluster=Cluster())
    records = again.run(folder, progress)  # Ray has ended the worker of the first
    check_same(alone, records, folder)
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert {key for key, resumed in progress.finished if resumed} == {path.stem for path in before}
    assert len(progress.finished) == 24


def fragile(*shifts):
    """A model that in a worker, when it should learn, kills the process on noise and raises on anything else."""
    here = os.getpid()

    class Fragile(TinyClassifier):
        def forward(self, x):
            if os.getpid() != here and torch.is_grad_enabled():
                if x.var(dim=(2, 3)).max() > 0.01:
                    os.kill(os.getpid(), 9)
                raise RuntimeError("no luck")
            return super().forward(x)

    source = DatasetSource([(torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] * 4, num_classes=2, name="mine")
    plan = Plan(model="tiny", data="mine", methods=("source", "tent"), objectives=("em",), corruptions=shifts)
    return Bench(plan, model=tiny(2, Fragile), source=source, jobs=1, cluster=Cluster())


@pytest.mark.filterwarnings("ignore:a worker died:UserWarning")
@pytest.mark.parametrize(
    ("shift", "reason"),
    [
        ("brightness", "RuntimeError: no luck"),
        pytest.param("gaussian_noise", "its worker died 3 times, the last time: ", marks=pytest.mark.slow),
    ],
)
def test_a_cell_that_fails_stops_no_other(tmp_path, ray, shift, reason):
    folder, bench = RunFolder(tmp_path), fragile(shift, "pixelate")
    assert [record.cell.method for record in bench.run(folder)] == ["source", "source"]
    reasons = {failure.cell.corruptions[0]: failure.reason for failure in folder.failures()}
    assert {failure.cell.corruptions[0]: failure.reason for failure in bench.failed} == reasons
    assert reasons[shift].startswith(reason)
    assert reasons["pixelate"] == "RuntimeError: no luck"


def with_images(folder):
    """A benchmark on images in a folder, for one worker."""
    for k in range(2):
        (folder / str(k)).mkdir(parents=True)
        Image.new("RGB", (16, 16), (60, 100 * k, 9)).save(folder / str(k) / "0.png")
    plan = Plan(model="tiny", data=f"folder:{folder}", methods=("source",), corruptions=("fog", "snow"))
    return Bench(plan, model=tiny(2), jobs=1, cluster=Cluster())


def test_data_that_workers_cannot_see(tmp_path, ray):
    bench = with_images(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(
        come.InputError, match=r"a worker cannot run this on .*0\.png.* see the data under the same path"
    ):
        bench.run(folder)
    assert not list(folder.cells.iterdir())


def test_too_little_room_is_said_at_once(ray):
    with pytest.raises(
        come.InputError, match=r"has room for 2 workers with 1 CPUs and 0 GPUs each, 3 are needed; it has 2"
    ):
        Bench(PLAN, model=tiny(), jobs=3, cluster=Cluster())
    with pytest.raises(come.InputError, match=r"room for 0 workers with 4 CPUs .* 1 are needed"):
        Cluster(cpus=4).connect("cpu", None)
    if not ray.cluster_resources().get("GPU"):
        with pytest.raises(
            come.InputError, match=r"room for 0 workers with 1 CPUs and 0\.5 GPUs each, .* and 0 GPUs on 1"
        ):
            Cluster(gpus=0.5).connect("cuda", 2)
    assert Cluster(cpus=0.5).connect("cpu", None) == 4


def test_what_cannot_travel_is_refused_in_words(tmp_path, ray):
    bench = fragile("brightness", "gaussian_noise")
    bench.inputs.source.trap = threading.Lock()
    with pytest.raises(come.ConfigError, match=r"cannot be sent to another process .* run it without --engine ray"):
        bench.run(RunFolder(tmp_path))


# --- without Ray --------------------------------------------------------------------------------------------------------


def test_a_worker_decodes_images_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Cluster, "connect", lambda *_: 1)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which a worker replaces
    bench, worker = with_images(tmp_path), Worker()
    assert worker.prepare(pickle.loads(pickle.dumps(bench._runner)), "cpu", 1, 1) == (come.__version__, "")
    ends = [worker.run(bench.cells[0])]
    for path in tmp_path.glob("*/*.png"):
        path.write_bytes(b"")
    ends.append(worker.run(bench.cells[1]))
    assert [type(end) for end, _ in ends] == [Finished, Finished]
    assert [words[0] for words in ends[1][1]] == ["start", "advance"]


def command(monkeypatch, capsys, *options):
    """What `come bench` says when it is asked for this."""
    monkeypatch.setattr(sys, "argv", ["come", "bench", "--limit", "32", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_no_ray(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = command(monkeypatch, capsys, "--engine", "ray")
    assert said == 'error: Ray is missing; install it with: pip install -e ".[bench,ray]" (in your clone of come)\n'


def test_an_address_where_nobody_answers(monkeypatch, capsys):
    found = pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    monkeypatch.setattr(found, "is_initialized", lambda: False)
    began = time.monotonic()
    said = command(monkeypatch, capsys, "--engine", "ray", "--address", "127.0.0.1:1")
    assert "no Ray cluster can be used at 127.0.0.1:1 (Connection refused); start one there with 'ray start" in said
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "rya"), "no engine 'rya'; did you mean 'ray'?"),
        (("--address", "head:1"), "address has no effect without --engine ray"),
        (("--cpus", "2"), "cpus has no effect without --engine ray"),
        (("--gpus", "0.5"), "gpus has no effect without --engine ray"),
        (("--engine", "ray", "--address", "head"), "address must be HOST:PORT, ray://HOST:PORT or auto, got 'head'"),
        (("--engine", "ray", "--cpus", "0"), "cpus must be a number > 0, got 0.0"),
        (("--engine", "ray", "--cpus", "nan"), "cpus must be a number > 0, got nan"),
        (("--engine", "ray", "--gpus", "1.5"), "gpus must be a number from 0 to 1, or an integer, got 1.5"),
        (("--engine", "ray", "--gpus", "1"), "gpus has no effect on the CPU"),
        (("--engine", "ray", "--device", "cuda", "--gpus", "0"), "gpus must be > 0 with --device cuda"),
        (("--engine", "ray", "--device", "cuda:1"), "device must be cpu or cuda with Ray"),
    ],
)
def test_options_that_are_refused(monkeypatch, capsys, options, message):
    assert message in command(monkeypatch, capsys, *options)


def test_workers_of_another_version_are_refused():
    with pytest.raises(
        come.StateError, match=r"a worker has come 0\.0, this is .*; install one version on all machines"
    ):
        object.__new__(Workers)._check_ready("0.0", "")


def test_ray_is_imported_only_when_it_is_asked_for():
    for file in Path(come.__file__).parent.rglob("*.py"):
        if file.name == "ray_serve.py":  # which is imported only when it is asked for
            continue
        assert not any(line.startswith(("import ray", "from ray")) for line in file.read_text().splitlines()), file

"""The service over HTTP: forms of a request, what is refused, metrics, a server that is killed, and one that is ended."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from calling import call
from drawing import save_pictures
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

import come
from come.bench import cli, models
from come.errors import pip_install
from come.methods import DEFAULT
from come.serve import Service, http
from come.serve.http import create
from come.serve.tenants import States, key_of
from come.testing import NORMS, TinyClassifier, batches

ROOT = Path(__file__).parents[1]
X = batches(30, size=2, seed=5)
RAW = {"content-type": "application/octet-stream", "x-shape": "2,3,8,8", "x-dtype": "float32"}
MODEL = TinyClassifier(NORMS["group"])


def body(x):
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist())


def in_json(value):
    """A sample in JSON, with this as its first value."""
    rest = ", ".join(["[0, 0, 0, 0, 0, 0, 0, 0]"] * 7)
    first = f"[[{value}, 0, 0, 0, 0, 0, 0, 0], {rest}]"
    return f'{{"inputs": [[{first}, {first}, {first}]]}}'.encode()


def post(client, name, x, **more):
    headers = RAW | {"x-shape": ",".join(map(str, x.shape))}
    return client.post(f"/v1/tenants/{name}/predict", content=body(x), headers=headers, **more)


@pytest.fixture(scope="module")
def client():
    service = Service(MODEL, shape=(3, 8, 8), lr=0.01, labels=3, max_samples=8, tenants=20)
    service.calibrate(X, coverage=0.6)
    with TestClient(create(service)) as found:
        yield found


def test_both_forms_are_answered_alike(client):
    classifier = come.adapt(MODEL, "tent", lr=0.01)
    classifier.calibrate(X, coverage=0.6)
    step = classifier.step(X[0])
    expected, default = step.logits, come.adapt(MODEL)  # whose objective the service has
    raw = post(client, "raw", X[0], params={"logits": True})
    written = client.post("/v1/tenants/json/predict", json={"inputs": X[0].tolist()}, params={"logits": True})
    assert (raw.status_code, written.status_code) == (200, 200)
    for found in (raw.json(), written.json()):
        torch.testing.assert_close(torch.tensor(found["logits"]), expected, rtol=1e-4, atol=1e-4)
        assert found["labels"] == expected.argmax(dim=1).tolist()
        assert found["abstain"] == step.abstain.tolist()
        assert found["confidence"] == pytest.approx(default.confidence(expected).tolist(), abs=1e-4)
        assert found["adapted"] is True
    assert "logits" not in post(client, "raw", X[1]).json()


def test_health_reset_and_delete(client):
    first = post(client, "a", X[0]).json()
    for x in X[:2]:
        assert post(client, "a", x).status_code == 200
    assert client.get("/v1/tenants/a/health").json()["steps"] == 3
    assert client.post("/v1/tenants/a/reset").status_code == 204
    assert post(client, "a", X[0]).json() == first
    assert client.delete("/v1/tenants/a").status_code == 204
    for found in (
        client.get("/v1/tenants/a/health"),
        client.delete("/v1/tenants/a"),
        client.post("/v1/tenants/a/reset"),
    ):
        assert (found.status_code, found.json()) == (404, {"error": "there is no such tenant"})


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b"x" * 2**21, {}, 413, "bytes at most"),
        (b"1234", {}, 400, "4 bytes for each value"),
        (body(X[0]), {"x-shape": ""}, 400, "X-Shape must list"),
        (body(X[0]), {"x-shape": "2,3,8,-8"}, 400, "for each value of X-Shape"),
        (body(X[0]), {"x-shape": "a,b"}, 400, "X-Shape must list"),
        (body(X[0]), {"x-shape": "9" * 5000}, 400, "X-Shape"),
        (body(X[0]), {"x-shape": "2,8,8,3"}, 400, "must have shape (n, 3, 8, 8)"),
        (body(X[0]), {"x-dtype": "float64"}, 400, "X-Dtype must be float32"),
        (body(torch.zeros(9, 3, 8, 8)), {"x-shape": "9,3,8,8"}, 413, "1 to 8 samples"),
        (body(torch.full((2, 3, 8, 8), torch.nan)), {}, 400, "must be finite"),
        (body(X[0]), {"content-type": "image/png"}, 415, "content type"),
        (b"{", {"content-type": "application/json"}, 400, "not JSON"),
        (
            b"[" * 100_000,
            {"content-type": "application/json"},
            413,
            "more lists than 8 samples of shape (3, 8, 8) take",
        ),
        (b"[" * 200, {"content-type": "application/json"}, 400, "not JSON"),
        (
            b'{"inputs": ' + b"[" * 200 + b"]" * 200 + b"}",
            {"content-type": "application/json"},
            400,
            "of shape (n, 3, 8, 8)",
        ),
        (b'{"inputs": []}', {"content-type": "application/json"}, 400, "1 to 8 samples, got 0"),
        (b'{"inputs": 1}', {"content-type": "application/json"}, 400, "nested lists"),
        (b'{"inputs": [[1, 2], [3]]}', {"content-type": "application/json"}, 400, "of shape (n, 3, 8, 8)"),
        (b'{"inputs": [["a"]]}', {"content-type": "application/json"}, 400, "nested lists of numbers"),
        (in_json("1e400"), {"content-type": "application/json"}, 400, "must be finite"),
        (in_json("9" * 400), {"content-type": "application/json"}, 400, "nested lists of numbers"),
        (in_json("[1]"), {"content-type": "application/json"}, 400, "nested lists of numbers"),
        (in_json('"a"'), {"content-type": "application/json"}, 400, "nested lists of numbers"),
        (
            in_json(" " * 2**20 + "1"),
            {"content-type": "application/json"},
            413,
            "1048576 bytes of JSON at most; send more as",
        ),
        (b"\xff\xfe\x00", {"content-type": "application/json"}, 400, "not JSON"),
    ],
)
def test_bodies_that_are_refused(client, content, headers, status, words):
    found = client.post("/v1/tenants/bad/predict", content=content, headers=RAW | headers)
    assert (found.status_code, list(found.json())) == (status, ["error"])
    assert words in found.json()["error"]
    assert client.get("/v1/tenants/bad/health").status_code == 404


def test_a_body_without_a_length_is_limited_too(client):
    pieces = (b"x" * 2**16 for _ in range(40))
    found = client.post("/v1/tenants/a/predict", content=pieces, headers=RAW)
    assert found.status_code == 413


@pytest.mark.parametrize("name", ["..", "..%2f..%2fetc", "%00", "a%0ab", "%C3%BC", "a" * 129, ".x", "a%20b", "%2e%2e"])
def test_names_that_are_refused(client, name):
    for found in (post(client, name, X[0]), client.get(f"/v1/tenants/{name}/health")):
        assert found.status_code in (400, 404)
        assert list(found.json()) == ["error"]


def test_too_many_tenants_are_told_to_come_back(client):
    found = [post(client, f"many-{i}", X[0]) for i in range(25)]
    assert found[-1].status_code == 429
    assert found[-1].headers["retry-after"]
    for i in range(25):
        client.delete(f"/v1/tenants/many-{i}")


def test_metrics_can_be_read_by_prometheus(client):
    for i in range(6):
        post(client, f"metric-{i}", X[0])
    text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    tenants = {sample.labels["tenant"] for sample in families["come_serve_tenant_requests"].samples}
    assert len(tenants) == 4
    assert "(other)" in tenants
    assert "come_serve_tenant_agreement" in families
    buckets = [one.value for one in families["come_serve_answer_seconds"].samples if one.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] >= 6
    assert client.get("/healthz").json() == {"alive": True}
    assert client.get("/readyz").json() == {"ready": True}
    assert client.get("/docs").status_code == 404


def test_a_query_that_is_refused(client):
    found = post(client, "a", X[0], params={"logits": "perhaps"})
    assert (found.status_code, list(found.json())) == (400, ["error"])


def test_images_as_bytes():
    service = Service(MODEL, shape=(3, 8, 8), dtype="uint8", preprocess=lambda x: x.float() / 255)
    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    with TestClient(create(service)) as client:
        raw = client.post("/v1/tenants/a/predict", content=body(x), headers=RAW | {"x-dtype": "uint8"})
        written = client.post("/v1/tenants/b/predict", json={"inputs": x.tolist()})
        assert raw.json() == written.json()
        for wrong in ("300", "-1", "0.5", "true"):
            found = client.post(
                "/v1/tenants/a/predict", content=in_json(wrong), headers={"content-type": "application/json"}
            )
            assert "0 to 255" in found.json()["error"]


def test_json_is_limited_far_below_raw_bytes_and_parsed_one_at_a_time(monkeypatch):
    """A body that is parsed holds up every tenant, and takes many times its size."""
    real, now, most = http._from_json, [], []

    def parse(body, behind):
        now.append(1)
        most.append(len(now))
        time.sleep(0.01)
        now.pop()
        return real(body, behind)

    monkeypatch.setattr(http, "_from_json", parse)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, 4), torch.nn.LayerNorm(4))
    with TestClient(create(Service(model, shape=(3, 64, 64)))) as client, ThreadPoolExecutor(4) as pool:
        x = torch.rand(40, 3, 64, 64)
        assert post(client, "raw", x).status_code == 200
        content = f'{{"inputs": {x.int().tolist()}}}'
        found = client.post("/v1/tenants/a/predict", content=content, headers={"content-type": "application/json"})
        assert (found.status_code, most) == (413, [])
        small = {"inputs": x[:1].int().tolist()}
        sent = [pool.submit(client.post, f"/v1/tenants/{i}/predict", json=small) for i in range(4)]
        assert [one.result().status_code for one in sent] == [200] * 4
    assert most == [1] * 4


def test_a_full_disk_is_told_to_come_back(tmp_path, monkeypatch):
    def full(states, name, data):
        raise come.StateError("no space left")

    monkeypatch.setattr(States, "write", full)
    service = Service(MODEL, shape=(3, 8, 8), lr=0.01, state=tmp_path, write_every=0)
    with TestClient(create(service)) as client:
        found = post(client, "a", X[0])
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert client.get("/v1/tenants/a/health").status_code == 404


# ---- a server of its own ----


class Server:
    """A process that serves, and a client for it."""

    def __init__(self, *command):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        command = [one.replace("PORT", self.port) for one in command]
        self.process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)
        end = time.monotonic() + 60
        while True:
            try:
                self.client.get("/readyz")
                return
            except httpx.HTTPError:
                assert self.process.poll() is None, self.process.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self.client.close()


def saved(folder, name):
    """An adapter that goes on from the file of a tenant."""
    adapter = come.adapt(MODEL, "tent", lr=0.01)
    adapter.load(folder / f"{key_of(name)}.safetensors")
    return adapter


def after(count):
    """An adapter that has seen so many of the batches."""
    adapter = come.adapt(MODEL, "tent", lr=0.01)
    for x in X[:count]:
        adapter.step(x)
    return adapter


def same(a, b):
    torch.testing.assert_close(a.predict(X[-1]), b.predict(X[-1]), rtol=1e-4, atol=1e-4)


def test_a_killed_server_loses_what_was_not_written_and_a_terminated_one_nothing(tmp_path):
    names = [f"t{i}" for i in range(6)]

    def stream(name, begin, end):
        answered = begin
        for x in X[begin:end]:
            try:
                assert post(server.client, name, x).status_code == 200
            except httpx.HTTPError:  # killed
                break
            answered += 1
        return answered

    def run(begin, end, stop=None):
        with ThreadPoolExecutor(len(names)) as pool:
            answers = [pool.submit(stream, name, begin, end) for name in names]
            if stop is not None:
                time.sleep(0.2)
                server.process.send_signal(stop)
            return [answer.result() for answer in answers]

    command = (str(ROOT / "tests" / "harness" / "serving.py"), "PORT", str(tmp_path))
    with Server(*command, "0.3") as server:
        assert run(0, 3) == [3] * 6
        end = time.monotonic() + 10
        while any(server.client.get(f"/v1/tenants/{name}/health").json()["unwritten_steps"] for name in names):
            assert time.monotonic() < end
            time.sleep(0.02)
        answered = run(3, 20, signal.SIGKILL)
        server.process.wait()
    written = [saved(tmp_path, name).count for name in names]
    for name, count, most in zip(names, written, answered, strict=True):
        assert 3 <= count <= most + 1  # one may have been written whose answer was cut off
        same(saved(tmp_path, name), after(count))
    with Server(*command, "1000") as server:
        for name, count in zip(names, written, strict=True):
            assert stream(name, count, count + 2) == count + 2
        server.process.send_signal(signal.SIGTERM)
        _, said = server.process.communicate(timeout=30)
        assert "Traceback" not in said
    for name, count in zip(names, written, strict=True):
        assert saved(tmp_path, name).count == count + 2
        same(saved(tmp_path, name), after(count + 2))


def test_the_command_serves_the_examples_of_the_page(tmp_path):
    """All curl commands of docs/serving.md, one after the other."""
    text = (ROOT / "docs" / "serving.md").read_text()
    shell = [block for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL) if "curl" in block]
    make = re.search(r"```python\n(# images.*?)```", text, flags=re.DOTALL)
    assert make
    assert len(shell) >= 2
    (tmp_path / "states").mkdir()
    command = ("-m", "come", "serve", "--port", "PORT", "--state", str(tmp_path / "states"))
    command += ("--calibrate", "fashion:200", "--coverage", "0.9")
    with Server(*command) as server:
        subprocess.run([sys.executable, "-c", make[1]], cwd=tmp_path, check=True)
        for block in shell:
            block = "set -e\n" + block.replace("localhost:8000", f"127.0.0.1:{server.port}").replace(
                "curl", "curl -sSf"
            )
            done = subprocess.run(["bash", "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_a_missing_extra_is_named(monkeypatch, capsys):
    for module, command, extra in (("fastapi", [], "serve"), ("ray.serve", ["--replicas", "2"], "serve-ray")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            patch.setattr(sys, "argv", ["come", "serve", *command])
            with pytest.raises(SystemExit) as stopped:
                cli.main()
        assert stopped.value.code == 2
        assert capsys.readouterr().err.rstrip().endswith(f"install it with: {pip_install(extra)}")
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("come.serve")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "filelock", None)
        patch.delattr(come, "serve")
        with pytest.raises(ModuleNotFoundError, match=r'install it with: pip install -e "\.\[serve\]"'):
            _ = come.serve


@pytest.fixture
def serves(monkeypatch, capsys):
    """The service that the command would run, and what it says on the way."""

    def run(*command):
        made = []
        monkeypatch.setattr(cli.serve, "_run_here", lambda service, *_: made.append(service))
        code, out, err = call(monkeypatch, capsys, "serve", *command)
        assert code == 0, err
        with made[0] as service:
            return service, out + err

    return run


def test_the_command_takes_the_preprocessing_of_come_bench(serves):
    pixels = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    given = {"image_size": 48, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    model = ("--model", "fashion-resnet-gn")
    service, _ = serves(*model, "--image-size", "48", "--mean", "0.1,0.2,0.3", "--std", "0.4,0.5,0.6")
    assert service.shape == (3, 48, 48)
    expected = models.load("fashion-resnet-gn", **given).preprocess
    assert torch.equal(service._preprocess(pixels), expected(pixels))
    service, _ = serves(*model, "--normalization", "half")
    assert service._preprocess.normalization == ((0.5,) * 3, (0.5,) * 3)
    unused = ("--resize", "40", "--interpolation", "bicubic", "--mean=0,0,0", "--std=1,1,1")
    service, said = serves(*model, "--dtype", "float32", *unused)
    assert "no effect without --calibrate: --mean, --std, --resize, --interpolation; clients send" in said


def test_both_commands_have_one_definition_of_the_preprocessing(monkeypatch, capsys):
    panels = []
    for command in ("bench", "serve"):
        _, out, _ = call(monkeypatch, capsys, command, "--help")
        panels.append(out.partition("─ Preprocessing ─")[2].partition("╰")[0])
        assert max(map(len, out.splitlines())) <= 80
    assert panels[0] == panels[1]
    assert all(f"--{name.replace('_', '-')} " in panels[0] for name in models.PREPROCESSING)


def test_the_command_calibrates_on_pictures_that_are_prepared_as_it_was_told(serves, tmp_path):
    for name in "abcdefgh":
        save_pictures(tmp_path, [f"{name}/{i}.png" for i in range(3)])
    common = ("--model", "fashion-resnet-gn", "--calibrate", f"folder:{tmp_path}", "--coverage", "0.5")
    thresholds = {
        serves(*common, *more)[0]._fleet.promise.threshold
        for more in ([], ["--image-size", "40"], ["--resize", "64"], ["--mean=0,0,0", "--std=1,1,1"])
    }
    assert len(thresholds) == 4


def test_the_command_adapts_as_come_adapt_does_by_default(serves):
    service, _ = serves()
    ours, theirs = service._fleet._engine.method, come.adapt(MODEL).method
    assert (type(ours), ours.objective) == (type(theirs), theirs.objective)
    assert ours.name == DEFAULT
    assert serves("--method", "tent")[0]._fleet._engine.method.objective == come.adapt(MODEL, "tent").method.objective
    assert serves("--objective", "em")[0]._fleet._engine.method.objective == come.objectives.get("em")


def test_the_command_refuses_what_it_cannot_serve(monkeypatch, capsys, tmp_path):
    for command, words in (
        (["--model", "fashion-vti"], "did you mean 'fashion-vit'"),
        (["--adapt", "sometimes"], "adapt must be inline"),
        (["--state", str(tmp_path / "no")], "does not exist"),
        (["--device", "no"], "no device 'no'"),
        (["--method", "memo"], "cannot differ by stream"),
        (["--risk", "0.05"], "--risk and --coverage need --calibrate DATA"),
        (["--image-size", "0"], "image-size must be greater than or equal to 1, got 0"),
        (["--mean", "0,0"], "mean must be three numbers, of red, green and blue"),
        (["--mean", "0,0,0"], "mean and std must be given together"),
        (["--normalization", "imagnet"], "normalization must be 'model', 'imagenet', 'half', 'caffe' or 'lite'"),
        (["--interpolation", "cubic"], "interpolation must be 'nearest', "),
        (["--calibrate", "fashion:200"], "either risk (needs labels) or coverage, got neither"),
        (["--calibrate", "fashion:30", "--risk", "0.05"], "needs at least 59 labelled calibration samples"),
        (["--calibrate", "fashion-outliers:far", "--coverage", "0.9"], "has 0 classes and fashion-resnet-bn 8"),
    ):
        monkeypatch.setattr(sys, "argv", ["come", "serve", *command])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err

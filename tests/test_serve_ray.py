"""The service on a real Ray Serve, started here: tenants keep to their replica, and one that is killed goes on from disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

import come
from come.serve.tenants import key_of, part_of
from come.testing import NORMS, TinyClassifier, batches

if any(importlib.util.find_spec(name) is None for name in ("ray", "aiohttp", "watchfiles")):  # what ray[serve] brings
    pytest.skip("needs ray[serve]", allow_module_level=True)
SCRIPT = Path(__file__).parent / "harness" / "serving_on_ray.py"
X = batches(8, size=2, seed=5)
NAMES = [f"t{i}" for i in range(6)]


def post(client, name, x):
    headers = {"content-type": "application/octet-stream", "x-shape": "2,3,8,8", "x-dtype": "float32"}
    body = bytes(x.contiguous().view(torch.uint8).flatten().tolist())
    return client.post(f"/v1/tenants/{name}/predict", content=body, headers=headers, params={"logits": True})


def test_a_killed_replica_comes_back_with_its_tenants(tmp_path):
    """It is a process of its own, so that Ray's threads, signals and warnings stay out of this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    states = tmp_path / "states"
    states.mkdir()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_DEDUP_LOGS": "0"}
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(port), str(states)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    )
    try:
        said = next((line for line in server.stdout if line.startswith(("pid ", "missing"))), "missing pid")
        if said == "missing\n":
            pytest.skip("needs ray[serve]")
        victim = int(said.split()[1])
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        adapter = come.adapt(TinyClassifier(NORMS["group"]), "tent", lr=0.01)
        assert {part_of(name, 2) for name in NAMES} == {0, 1}
        for count, x in enumerate(X[:4], 1):
            if count == 3:
                os.kill(victim, signal.SIGKILL)
            expected = adapter(x)
            for name in NAMES:
                end = time.monotonic() + 60
                while (found := post(client, name, x)).status_code == 503:  # its replica is starting again
                    assert time.monotonic() < end
                    time.sleep(0.2)
                assert found.status_code == 200, found.text
                torch.testing.assert_close(torch.tensor(found.json()["logits"]), expected, rtol=1e-4, atol=1e-4)
                assert found.json()["confidence"] == pytest.approx(adapter.confidence(expected).tolist(), abs=1e-3)
        assert client.get("/readyz").json() == {"ready": True}
        assert client.get("/v1/tenants/..%2fx/health").status_code == 404
        assert post(client, "ü", X[0]).status_code == 400
        assert client.delete("/v1/tenants/t0").status_code == 204
        text = client.get("/metrics").text
        assert 'come_serve_tenants{part="0"}' in text
        assert 'come_serve_tenants{part="1"}' in text
        client.close()
        server.communicate("end\n", timeout=60)
        assert server.returncode == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)
        server.wait(30)
    for name in NAMES[1:]:
        adapter.load(states / f"{key_of(name)}.safetensors")
        assert adapter.count == 4
    assert not (states / f"{key_of('t0')}.safetensors").exists()

"""The demo: its stream without a browser, its command, and the page in a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import islice

import httpx
import pytest
import torch
from browsing import PHONE, asked, visit
from calling import call
from fastapi.testclient import TestClient
from starlette.requests import Request
from starlette.responses import JSONResponse

import come
from come.bench.demo import stream
from come.bench.demo.stream import Choice, Lane, watch

SMALL = {"BATCH": 8, "RISK": 0.4}
"""Few images to calibrate on, and a promise that these can keep."""


def numbers(scene):
    return [(lane.title, lane.accuracy, lane.confidence, lane.answered, lane.wrong) for lane in scene.lanes]


def last(scenes, count=2):
    """The last of the first few."""
    return list(islice(scenes, count))[-1]


def test_two_streams_at_once_do_not_disturb_each_other(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(stream, name, value)
    one, other = Choice(method="deyo", rate=10.0), Choice(corruption="none", method="eata", guard=False)
    scene, clean = last(zip(watch(one), watch(other), strict=True))
    alone = last(watch(one))
    assert numbers(scene) == numbers(alone)
    assert [lane.title for lane in scene.lanes] == ["No Adapt", "DeYO + EM", "DeYO + COME", "Steady"]
    assert [lane.title for lane in clean.lanes] == ["No Adapt", "EATA + EM", "EATA + COME", "Steady"]
    assert clean.lanes[0].accuracy > scene.lanes[0].accuracy + 0.2
    assert clean.lanes[0].rate is None
    assert scene.lanes[3].rate == pytest.approx(10 * clean.lanes[3].rate)


def test_a_lane_says_what_it_knows():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    lane = Lane("Tent", come.adapt(model, "tent"))
    assert (lane.state, lane.alarm, lane.said, lane.collapses) == ("not checked yet", False, "", 0)
    lane.events += [
        come.Event("collapse", 6, "collapse: agreement 0.05", {}),
        come.Event("recovered", 6, "the source weights restored", {}),
    ]
    assert (lane.state, lane.alarm, lane.collapses) == ("recovered", True, 1)
    assert lane.said == "Batch 7: agreement 0.05; the source weights restored."
    lane.events.append(come.Event("healthy", 12, "healthy: agreement 0.97", {}))
    assert (lane.state, lane.alarm, lane.said) == ("healthy", False, "Batch 13: agreement 0.97.")
    assert Lane("No Adapt", come.adapt(model, "source")).state == "does not adapt"
    lane.rows = {"abstain": torch.tensor([True, True])}
    assert (lane.answered, lane.wrong) == (0, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"corruption": "fgo"}, "no corruption 'fgo'; did you mean 'fog'"),
        ({"severity": 0}, "severity must be greater than or equal to 1, got 0"),
        ({"rate": 0.0}, "rate must be one of 0.1, 0.3, 1, 3, 10, 30, 100, got 0.0"),
        ({"method": "steady"}, "method must be 'tent', 'eata', 'sar' or 'deyo', got 'steady'"),
        ({"model": "timm:x"}, "model must be 'fashion-resnet-bn', 'fashion-resnet-gn' or 'fashion-vit', got 'timm:x'"),
    ],
)
def test_a_wrong_choice_is_refused(given, message):
    with pytest.raises(come.ConfigError, match=message):
        Choice(**given)


# ---- the command ----


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_command_refuses_where_it_cannot_listen(monkeypatch, capsys, taken):
    for arguments, message in (
        (("--port", "0"), "error: --port must be from 1 to 65535, got 0\n"),
        (("--port", "65536"), "error: --port must be from 1 to 65535, got 65536\n"),
        (
            ("--port", str(taken)),
            f"cannot listen on 127.0.0.1:{taken}: another program listens there; give another --port",
        ),
        (("--host", "nowhere.invalid"), "cannot listen on nowhere.invalid:7860: "),
    ):
        code, _, said = call(monkeypatch, capsys, "demo", *arguments)
        assert code == 2
        assert message in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["demo", "serve"])
def test_the_help_names_the_extra(monkeypatch, capsys, command):
    assert f'pip install -e ".[{command}]"' in call(monkeypatch, capsys, command, "--help")[1]


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "come.bench.demo.page", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    code, _, said = call(monkeypatch, capsys, "demo", "--port", port)
    assert (code, said) == (
        2,
        'error: come demo needs gradio, which is missing; install it with: pip install -e ".[demo]" (in your clone of come)\n',
    )


# ---- the page ----


@pytest.fixture
def client():
    """Of an app that answers with what it was sent, behind the door."""
    from come.bench.demo.closed import Closed

    async def echo(scope, receive, send):
        await JSONResponse(await Request(scope, receive).json() if scope["method"] == "POST" else {})(
            scope, receive, send
        )

    return TestClient(Closed(echo))


def data(*values, **more):
    return {"json": {"data": list(values), "fn_index": 0, "session_hash": "x"} | more}


FILE = {"path": "http://127.0.0.1:9/x.png", "meta": {"_type": "gradio.FileData"}}


@pytest.mark.parametrize(
    ("method", "route", "sent", "status"),
    [
        ("POST", "upload", {"files": {"files": ("a.bin", b"x" * 1000)}}, 404),
        ("POST", "upload/", {"files": {"files": ("a.bin", b"x" * 1000)}}, 404),
        ("POST", "process_recording", {"files": {"files": ("a.bin", b"x" * 1000)}}, 404),
        ("POST", "component_server", data(), 404),
        ("POST", "vibe-edit", {"json": {"prompt": "x"}}, 404),
        ("GET", "deep_link?session_hash=x", {}, 404),
        ("GET", "file=/etc/hostname", {}, 404),
        ("GET", "proxy=http://127.0.0.1:9/", {}, 404),
        ("GET", "queue/join", {}, 404),
        ("PUT", "queue/join", {}, 404),
        *(
            ("POST", route, sent, status)
            for route in ("queue/join", "run/predict")
            for sent, status in (
                (data(FILE), 400),
                (data([FILE]), 400),
                (data(event_data=FILE), 400),
                ({"content": b"[" * 3000}, 400),
                ({"content": b"[1]"}, 400),
                (data("x" * 5000), 413),
                (data() | {"headers": {"sec-fetch-site": "cross-site"}}, 403),
                (data() | {"headers": {"sec-fetch-site": "same-site"}}, 403),
            )
        ),
    ],
)
def test_what_the_page_does_not_need_is_closed(client, method, route, sent, status):
    found = client.request(method, f"/gradio_api/{route}", **sent)
    assert (found.status_code, found.headers["content-type"]) == (status, "text/plain; charset=utf-8")


def test_what_the_page_needs_is_passed_on(client):
    for path in ("/", "/assets/index.js", "/gradio_api/queue/data?session_hash=x"):
        assert client.get(path).json() == {}
    assert client.post("/gradio_api/queue/join", **data("fog", 3, 1.0, True, None)).json()["data"][0] == "fog"
    twice = f'{{"data": [{json.dumps(FILE)}], "data": [1]}}'  # checked is the second, so the first must not be read
    assert client.post("/gradio_api/run/predict", content=twice).text == '{"data":[1]}'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Where `come demo` listens; there is no way out of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    smaller = "; ".join(f"stream.{name} = {value}" for name, value in SMALL.items())
    code = f"from come.bench.demo import stream; {smaller}; from come.__main__ import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "demo", "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | dict.fromkeys(["http_proxy", "https_proxy"], "http://127.0.0.1:9")
        | {"GRADIO_TEMP_DIR": str(tmp_path_factory.mktemp("gradio"))},
    )
    with process:
        assert process.stdout.readline() == f"come demo on http://127.0.0.1:{port}; Ctrl-C ends it\n"
        yield f"http://127.0.0.1:{port}/"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_nothing_can_be_uploaded(server, tmp_path_factory):
    found = httpx.post(f"{server}gradio_api/upload", files={"files": ("a.bin", b"x" * 1000)}, timeout=60)
    sent = {"data": [FILE] * 6, "fn_index": 0, "session_hash": "x"}
    fetched = httpx.post(f"{server}gradio_api/queue/join", json=sent, timeout=60)
    assert (found.status_code, fetched.status_code, httpx.get(server, timeout=60).status_code) == (404, 400, 200)
    assert list(tmp_path_factory.getbasetemp().glob("gradio*/**/a.bin")) == []


def until(found, seconds=60):
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.1)
    return value


def at(browser):
    """The number of the batch that is shown; 0 before the first."""
    return int(browser.execute_script("return document.querySelector('.scene .number')?.textContent ?? 0"))


def press(browser, name):
    until(lambda: browser.execute_script(f"return document.querySelector('#{name}')?.disabled === false"))
    browser.find_element("id", name).click()


def test_numbers_move_and_two_tabs_are_apart(browser, server):
    visit(browser, f"{server}?corruption=fog&severity=2&rate=10&method=sar&guard=false")
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    visit(browser, f"{server}?severity=nonsense", PHONE, "dark")
    press(browser, "start")
    second = browser.current_window_handle
    browser.switch_to.window(first)
    press(browser, "start")
    until(lambda: at(browser) > 1)
    press(browser, "stop")
    until(lambda: browser.execute_script("return document.querySelector('#stop').disabled"))
    stopped = at(browser)

    browser.switch_to.window(second)
    before = at(browser)
    until(lambda: at(browser) > before)
    press(browser, "stop")
    assert "snow, severity 3" in browser.find_element("css selector", ".about").text
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE
    assert browser.get_log("browser") == []

    browser.switch_to.window(first)
    assert at(browser) == stopped
    assert (
        "fog, severity 2, fashion-resnet-bn, learning rates x 10" in browser.find_element("css selector", ".about").text
    )
    assert [one.text for one in browser.find_elements("css selector", ".card h3")][1] == "SAR + EM"
    for name in ("accuracy", "confidence", "abstains"):
        texts = [one.text for one in browser.find_elements("css selector", f".card .{name}")]
        assert len(texts) == 4
        assert all(text.endswith("%") for text in texts)
    images = "return [...document.querySelectorAll('.scene img')].map((image) => image.naturalWidth)"
    assert browser.execute_script(images) == [32] * stream.EXAMPLES
    press(browser, "start")
    until(lambda: at(browser) == 0)
    until(lambda: at(browser) > 0)
    press(browser, "stop")
    assert browser.get_log("browser") == []
    assert [url for url in asked(browser) if not url.startswith(server)] == []

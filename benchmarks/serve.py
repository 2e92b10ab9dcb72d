"""Load test of `come serve` on the loopback: latency by mode of adaptation, and what a kill loses.

    python benchmarks/serve.py [--what latency,kill,ray]

A few hundred tenants of the embedded ViT. Requests arrive at random (a Poisson process) at a fixed rate, whatever the server
does; so a server that falls behind shows it. The servers of all modes get short turns, and each is compared with "never" of the
same run.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from come.bench.data import opening
from come.serve.tenants import key_of, part_of
from come.state import saving

SIDE = 32


def images(count: int) -> list[bytes]:
    loaded = opening.open_source("fashion").load(range(count))
    return [image.numpy().tobytes() for image in loaded.images]


class Client:
    """HTTP/1.1 with a few kept connections: the load must cost less than the server."""

    def __init__(self, port: int) -> None:
        self.port, self.free = port, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()

    async def ask(self, method: str, path: str, body: bytes = b"", head: str = "") -> tuple[int, bytes]:
        kept = bool(self.free)
        reader, writer = self.free.pop() if kept else await asyncio.open_connection("127.0.0.1", self.port)
        try:
            sent = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(body)}\r\n\r\n"
            writer.write(sent.encode() + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            status, text = int(lines[0].split()[1]), b""
            for line in lines:
                if line.startswith("content-length"):
                    text = await reader.readexactly(int(line.split(":")[1]))
            while "transfer-encoding: chunked" in lines:
                size = int(await reader.readline(), 16)
                text += (await reader.readexactly(size + 2))[:-2]
                if not size:
                    break
            found = status, text
        except (OSError, asyncio.IncompleteReadError):
            writer.close()
            if kept:  # the server has closed it meanwhile
                self.free.clear()
                return await self.ask(method, path, body, head)
            raise
        self.free.append((reader, writer))
        return found

    async def predict(self, name: str, image: bytes, samples: int) -> int:
        head = f"Content-Type: application/octet-stream\r\nX-Dtype: uint8\r\nX-Shape: {samples},3,{SIDE},{SIDE}\r\n"
        return (await self.ask("POST", f"/v1/tenants/{name}/predict", image, head))[0]


class Server:
    def __init__(self, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "come", "serve", "--port", str(self.port), *options]
        env = os.environ | {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def ready(self, client: Client) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                if (await client.ask("GET", "/readyz"))[0] == 200:
                    return
            except (OSError, asyncio.IncompleteReadError):
                pass
            await asyncio.sleep(0.1)
        raise SystemExit("the server does not start")

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait()


async def load(
    client: Client, names: list[str], pool: list[bytes], rate: float, seconds: float, samples: int, seed: int = 0
):
    """Requests at a rate; the time and status of each, by when it was sent, and the answered ones by tenant."""
    draw, begin, tasks = random.Random(seed), time.monotonic(), []
    rows: list[tuple[float, float, int]] = []
    answered: collections.Counter[str] = collections.Counter()

    async def one(name: str, image: bytes, at: float) -> None:
        try:
            status = await client.predict(name, image, samples)
        except (OSError, asyncio.IncompleteReadError):
            status = 0
        rows.append((at - begin, time.monotonic() - at, status))
        answered[name] += status == 200

    at = begin
    while (at := at + draw.expovariate(rate)) < begin + seconds:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        image = b"".join(draw.choices(pool, k=samples))
        tasks.append(asyncio.create_task(one(draw.choice(names), image, at)))
    await asyncio.gather(*tasks)
    return sorted(rows), answered


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def latencies(modes: list[str], given: argparse.Namespace, pool: list[bytes]) -> dict[str, list[float]]:
    """Milliseconds to each answer, by mode. All servers are up; they get short turns, so that all see the same machine."""
    names = [f"tenant-{i}" for i in range(given.tenants)]
    took: dict[str, list[float]] = {mode: [] for mode in modes}
    with contextlib.ExitStack() as stack:
        servers = {}
        for mode in modes:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = Server("--state", folder, "--adapt", mode, "--write-every", "5", "--method", "tent:lr=1e-4")
            stack.callback(server.stop)
            servers[mode] = Client(server.port)
            await server.ready(servers[mode])
            for name in names:  # open all tenants first: that is not what is measured
                await servers[mode].predict(name, pool[0] * given.samples, given.samples)
        for turn in range(given.turns):
            for mode, client in servers.items():
                rows, _ = await load(client, names, pool, given.rate, given.seconds / given.turns, given.samples, turn)
                assert all(status == 200 for *_, status in rows), rows
                took[mode] += [seconds * 1000 for _, seconds, _ in rows]
    return took


def steps_on_disk(folder: str, names: list[str]) -> dict[str, int]:
    files = {name: Path(folder) / f"{key_of(name)}.safetensors" for name in names}
    return {name: int(saving.read(file, "tent")["count"]) if file.exists() else 0 for name, file in files.items()}


async def killed(given: argparse.Namespace, pool: list[bytes], write_every: float) -> dict[str, float]:
    """A server that is killed under load, and another one that takes over."""
    names = [f"tenant-{i}" for i in range(given.tenants)]
    with tempfile.TemporaryDirectory() as folder:
        options = ("--state", folder, "--write-every", str(write_every), "--method", "tent:lr=1e-4")
        server = Server(*options)
        client = Client(server.port)
        await server.ready(client)
        running = asyncio.create_task(load(client, names, pool, given.rate, given.seconds, given.samples))
        await asyncio.sleep(given.seconds * 0.8)
        server.stop(signal.SIGKILL)
        at = time.monotonic()
        _, answered = await running
        disk = steps_on_disk(folder, names)
        lost = {name: max(0, answered[name] - disk[name]) for name in names}
        server = Server(*options)
        client = Client(server.port)
        await server.ready(client)
        back = time.monotonic() - at
        statuses = [await client.predict(name, pool[0] * given.samples, given.samples) for name in names]
        server.stop()
        again = steps_on_disk(folder, names)
    assert statuses == [200] * len(names)
    assert all(again[name] == disk[name] + 1 for name in names), "a restored tenant did not go on from its file"
    lost_of = [count for count in lost.values() if count]
    return {
        **{"answered": sum(answered.values()), "written": sum(disk.values()), "lost": sum(lost.values())},
        **{"tenants that lost": len(lost_of), "most by one": max(lost_of, default=0), "seconds away": back},
    }


async def replica_killed(given: argparse.Namespace, pool: list[bytes], write_every: float) -> dict[str, float]:
    """One of two replicas on Ray Serve is killed under load."""
    import psutil

    names = [f"tenant-{i}" for i in range(given.tenants)]
    with tempfile.TemporaryDirectory() as folder:
        options = ("--state", folder, "--write-every", str(write_every), "--method", "tent:lr=1e-4")
        server = Server(*options, "--replicas", "2")
        client = Client(server.port)
        await server.ready(client)
        below = psutil.Process(server.process.pid).children(recursive=True)
        victims = [process for process in below if "part-0" in " ".join(process.cmdline())]
        assert len(victims) == 1, victims
        begin = time.monotonic()
        running = asyncio.create_task(load(client, names, pool, given.rate, 3 * given.seconds, given.samples))
        await asyncio.sleep(given.seconds)
        before = steps_on_disk(folder, names)
        victims[0].send_signal(signal.SIGKILL)
        at = time.monotonic() - begin
        rows, answered = await running
        server.stop()
        disk = steps_on_disk(folder, names)
    lost = {name: max(0, answered[name] - disk[name]) for name in names}
    other = sum(count for name, count in lost.items() if part_of(name, 2) == 1)
    slow = [row[0] + row[1] - at for row in rows if row[0] + row[1] > at and row[1] > 1.0]
    return {
        **{
            "answered": sum(answered.values()),
            "failed": sum(row[2] != 200 for row in rows),
            "lost": sum(lost.values()),
        },
        **{"lost by tenants of the other replica": other, "most by one": max(lost.values())},
        **{"seconds until all are answered again": max(slow, default=0.0), "written before": sum(before.values())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=300)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--samples", type=int, default=2, help="of a request")
    parser.add_argument("--modes", default="never,inline,after,every:4,shift")
    parser.add_argument("--turns", type=int, default=10, help="of each mode")
    parser.add_argument("--what", default="latency,kill", help="of latency, kill, ray (one of two replicas killed)")
    given = parser.parse_args()
    pool = images(256)
    print(f"{given.tenants} tenants, {given.rate:g} requests/s of {given.samples} images, {given.seconds:g} s of each")
    if "latency" in given.what:
        show(asyncio.run(latencies(given.modes.split(","), given, pool)))
    for write_every in (5.0, 1.0, 0.0) if "kill" in given.what else ():
        print(
            f"\nkilled, --write-every {write_every:g}:",
            json.dumps(asyncio.run(killed(given, pool, write_every))),
            flush=True,
        )
    if "ray" in given.what:
        print("\nreplica killed, --write-every 1:", json.dumps(asyncio.run(replica_killed(given, pool, 1.0))))


def show(took: dict[str, list[float]]) -> None:
    print("\n| adapt | p50 ms | p95 ms | p99 ms | p50 / never | p95 / never | p99 / never |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    shares = (0.5, 0.95, 0.99)
    base = [percentile(took["never"], share) for share in shares]
    for mode, values in took.items():
        mine = [percentile(values, share) for share in shares]
        cells = [f"{value:.0f}" for value in mine] + [f"{a / b:.2f}" for a, b in zip(mine, base, strict=True)]
        print(f"| {mode} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

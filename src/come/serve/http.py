"""The service over HTTP, as a FastAPI app. Who may call it as which tenant is the host's business."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from come.errors import ComeError
from come.serve.errors import RequestError
from come.serve.metrics import BUCKETS, Metrics
from come.serve.service import DTYPES, Answer, Service

LEAST_BODY = 2**20
"""Bytes that raw samples may always have; more if `max_samples` samples take more."""
LARGEST_JSON = 2**20
"""Bytes of a JSON body: parsing holds up everything else in the process, and takes 50 times the memory."""
PATIENCE = 30.0
"""Seconds for a body to arrive, and for an answer to be found."""


class Backend:
    """A `Service` of this process, for an event loop; `come.serve.ray_serve` has one for replicas elsewhere."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.shape, self.dtype, self.max_samples = service.shape, service.dtype, service.max_samples

    async def ask(self, what: str, *arguments: Any) -> Any:
        """As `Service.ask`; of "metrics" a list, one for each service."""
        found = await asyncio.wrap_future(self._service.ask(what, *arguments))
        return [found] if what == "metrics" else found

    async def ready(self) -> bool:
        """Whether requests are answered now."""
        return self._service.ready

    def close(self) -> None:
        """Called when the app ends."""
        self._service.close()


def create(backend: Service | Backend) -> FastAPI:
    """The app: predict, health, reset and delete of tenants, metrics, liveness and readiness.

    When the app shuts down, the service is closed: waiting requests are answered and all states written.

    Example:
        >>> from fastapi.testclient import TestClient
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        >>> with TestClient(create(Service(model, shape=(4,)))) as client:
        ...     answer = client.post("/v1/tenants/north/predict", json={"inputs": [[0.1, 0.2, 0.3, 0.4]]})
        ...     sorted(answer.json())
        ['abstain', 'adapted', 'confidence', 'labels', 'uncertainty', 'valid']
    """
    behind = Backend(backend) if isinstance(backend, Service) else backend
    parsing = asyncio.Lock()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(behind.close)

    app = FastAPI(title="come", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ComeError)
    async def refused(_: Request, error: ComeError) -> JSONResponse:
        status = error.status if isinstance(error, RequestError) else 400
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return JSONResponse({"error": str(error)}, status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": "logits must be true or false"}, 400)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.post("/v1/tenants/{name}/predict")
    async def predict(name: str, request: Request, logits: bool = False) -> Response:
        x = await _samples(request, behind, parsing)
        answer: Answer = await _patiently(behind.ask("predict", name, x))
        found = {key: value for key, value in answer._asdict().items() if key != "logits"}
        found |= {name: [round(value, 6) for value in found[name]] for name in ("uncertainty", "confidence")}
        if logits:
            found["logits"] = [[z if math.isfinite(z) else None for z in row] for row in answer.logits.tolist()]
        return JSONResponse(found)

    @app.get("/v1/tenants/{name}/health")
    async def health(name: str) -> Response:
        found = await _patiently(behind.ask("health", name))
        numbers = {key: v if not isinstance(v, float) or math.isfinite(v) else None for key, v in found.items()}
        return JSONResponse(numbers)

    @app.post("/v1/tenants/{name}/reset")
    async def reset(name: str) -> Response:
        await _patiently(behind.ask("reset", name))
        return Response(status_code=204)

    @app.delete("/v1/tenants/{name}")
    async def delete(name: str) -> Response:
        await _patiently(behind.ask("delete", name))
        return Response(status_code=204)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(await _patiently(behind.ask("metrics"))), media_type="text/plain; version=0.0.4")

    @app.get("/healthz")
    async def alive() -> Response:
        return JSONResponse({"alive": True})

    @app.get("/readyz")
    async def ready() -> Response:
        yes = await _patiently(behind.ready())
        return JSONResponse({"ready": yes}, 200 if yes else 503)

    return app


async def _patiently(waiting: Any) -> Any:
    try:
        return await asyncio.wait_for(waiting, PATIENCE)
    except (asyncio.TimeoutError, TimeoutError):
        raise RequestError(f"no answer within {PATIENCE:g} seconds; try again later", 503) from None


async def _samples(request: Request, behind: Backend, parsing: asyncio.Lock) -> Tensor:
    """The samples in the body of a request, (n, ...), not checked further."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        body = await _patiently(_body(request, LARGEST_JSON, " of JSON at most; send more as application/octet-stream"))
        async with parsing:
            return await run_in_threadpool(_from_json, body, behind)
    if kind != "application/octet-stream":
        raise RequestError("the content type must be application/octet-stream or application/json", 415)
    largest = max(LEAST_BODY, behind.max_samples * math.prod(behind.shape) * DTYPES[behind.dtype].itemsize)
    body = await _patiently(_body(request, largest, " at most"))
    return _from_bytes(body, request.headers.get("x-shape", ""), request.headers.get("x-dtype", ""), behind.dtype)


async def _body(request: Request, largest: int, limit: str) -> bytearray:
    body, too_large = bytearray(), RequestError(f"a body may have {largest} bytes{limit}", 413)
    try:
        if int(request.headers.get("content-length", 0)) > largest:
            raise too_large
        async for chunk in request.stream():
            body += chunk
            if len(body) > largest:
                raise too_large
    except ValueError:
        raise RequestError("the content length must be a number") from None
    except ClientDisconnect:
        raise RequestError("the body ended early") from None
    return body


def _from_bytes(body: bytearray, shape: str, dtype: str, expected: str) -> Tensor:
    """Little-endian values, the last dimension first."""
    if dtype != expected:
        raise RequestError(f"the header X-Dtype must be {expected}, got {repr(dtype[:20]) if dtype else 'none'}")
    try:
        sides = [int(side) for side in shape[:200].split(",")]
    except ValueError:
        raise RequestError("the header X-Shape must list the shape of the samples, such as 8,3,32,32") from None
    each = DTYPES[expected].itemsize
    if min(sides) < 1 or math.prod(sides) * each != len(body):
        raise RequestError(f"the body must have {each} bytes for each value of X-Shape, got {len(body)} bytes")
    return torch.frombuffer(body, dtype=DTYPES[expected]).reshape(sides)


def _from_json(body: bytearray, behind: Backend) -> Tensor:
    sides, least = ", ".join(map(str, behind.shape)), sum(math.prod(behind.shape[:i]) for i in range(len(behind.shape)))
    if body.count(b"[") + body.count(b"{") > 2 + behind.max_samples * least:  # a million empty lists take seconds
        raise RequestError(f"the body has more lists than {behind.max_samples} samples of shape ({sides}) take", 413)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    rows = found.get("inputs") if isinstance(found, dict) else None
    if not isinstance(rows, list):
        raise RequestError('the body must be {"inputs": [...]}, nested lists of numbers')
    shape, misshapen = (len(rows), *behind.shape), f"inputs must be nested lists of numbers of shape (n, {sides})"
    for side in behind.shape:
        if not all(isinstance(row, list) and len(row) == side for row in rows):
            raise RequestError(misshapen)
        rows = [value for row in rows for value in row]
    if behind.dtype == "uint8" and not all(type(value) is int and 0 <= value <= 255 for value in rows):
        raise RequestError("inputs must be whole numbers from 0 to 255")
    try:
        return torch.tensor(rows, dtype=DTYPES[behind.dtype]).reshape(shape)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise RequestError(misshapen) from None


def exposition(found: Sequence[Metrics]) -> bytes:
    """Metrics of one or more services in Prometheus' text format."""
    families: dict[str, Family] = {}
    for one in (metric for part in found for metric in part.values):
        family = families.setdefault(one.name, Family(one.name, one.help, one.kind))
        family.add_sample(one.name + ("_total" if one.kind == "counter" else ""), one.labels, one.value)
    name = "come_serve_answer_seconds"
    seconds = families[name] = Family(name, "Seconds from a request to its answer", "histogram")
    total = 0
    for bound, *counts in zip((*BUCKETS, "+Inf"), *(part.answered for part in found), strict=True):
        total += sum(counts)
        seconds.add_sample(f"{name}_bucket", {"le": str(bound)}, total)
    seconds.add_sample(f"{name}_count", {}, total)
    seconds.add_sample(f"{name}_sum", {}, sum(part.seconds for part in found))
    return generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=families.values)))

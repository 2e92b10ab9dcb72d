"""The service as a Ray Serve application: a router, and one deployment of a single replica for each part of the tenants.

A tenant belongs to part sha256(name) mod `replicas`, so all of its requests go to one replica. When a replica dies, Ray starts
it again, perhaps on another machine; it takes the lock of its part of the state folder and restores tenants as they come.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import ray.serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message

from come.errors import ConfigError, require_int
from come.serve.errors import RequestError, check_name
from come.serve.http import Backend, create
from come.serve.service import Service
from come.serve.tenants import part_of

serve: Any = ray.serve
Handle = Any
"""A `ray.serve.handle.DeploymentHandle`."""
Make = Callable[[int, int], Service]
"""Makes the service of a part: `make(part, parts)`."""
UNREACHABLE = (RayError, RayServeException)
ONGOING = 10_000
"""Requests at once to a replica; the service itself limits them."""
AWAY = "the replica of this tenant is starting again; try again later"


class Replica:
    """A service, called through Ray."""

    def __init__(self, make: Make, part: int, parts: int) -> None:
        self._service = make(part, parts)

    async def ask(self, what: str, *arguments: Any) -> tuple[Any, tuple[str, int] | None]:
        """The result of `Service.ask`, or message and status of its error: Ray would wrap an exception in one of its own."""
        try:
            return await asyncio.wrap_future(self._service.ask(what, *arguments)), None
        except RequestError as error:
            return None, (str(error), error.status)

    async def about(self) -> dict[str, Any]:
        """The samples that the service takes, and its process."""
        one = self._service
        return {"shape": one.shape, "dtype": one.dtype, "max_samples": one.max_samples, "pid": os.getpid()}

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if not self._service.alive:
            raise RuntimeError("the thread of the service has ended")

    def __del__(self) -> None:  # called by Ray when the replica ends
        if hasattr(self, "_service"):
            self._service.close()


class _Replicas(Backend):
    """All replicas, behind one app."""

    def __init__(self, handles: Sequence[Handle], about: dict[str, Any]) -> None:
        self._handles = handles
        self.shape, self.dtype, self.max_samples = about["shape"], about["dtype"], about["max_samples"]

    async def ask(self, what: str, *arguments: Any) -> Any:
        if what == "metrics":
            return await asyncio.gather(*(self._ask(handle, what) for handle in self._handles))
        check_name(arguments[0])
        return await self._ask(self._handles[part_of(arguments[0], len(self._handles))], what, *arguments)

    async def _ask(self, handle: Handle, what: str, *arguments: Any) -> Any:
        try:
            found, refused = await handle.ask.remote(what, *arguments)
        except UNREACHABLE as error:
            raise RequestError(AWAY, 503) from error
        if refused is not None:
            raise RequestError(*refused)
        return found

    async def ready(self) -> bool:
        try:
            await asyncio.gather(*(handle.about.remote() for handle in self._handles))
        except UNREACHABLE:
            return False
        return True

    def close(self) -> None:
        """Ray ends the replicas."""


class Router:
    """Takes HTTP requests and sends each to its tenant's replica."""

    def __init__(self, *handles: Handle) -> None:
        self._handles = handles
        self._app: Any = None

    async def __call__(self, request: Request) -> Response:
        """Answer a request as the app of `come.serve.http` does."""
        try:
            self._app = self._app or create(_Replicas(self._handles, await self._handles[0].about.remote()))
        except UNREACHABLE:
            return JSONResponse({"error": AWAY}, 503, {"Retry-After": "1"})
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app({**request.scope, "root_path": ""}, request.receive, send)
        start, *rest = sent
        found = Response(b"".join(part.get("body", b"") for part in rest), start["status"])
        found.raw_headers = start["headers"]
        return found


def check_room(replicas: int, kind: str) -> None:
    """Raise if Ray has fewer than `replicas` of "CPU" or "GPU": it would wait for them forever."""
    resources: Callable[[], dict[str, float]] = ray.cluster_resources
    if (there := int(resources().get(kind, 0))) < replicas:
        raise ConfigError(f"{replicas} replicas need a {kind} each, and Ray has {there}; give fewer replicas")


def application(make: Make, replicas: int = 2, **options: Any) -> Any:
    """The application: `serve.run(application(make, replicas=4))`.

    Args:
        make: makes the service of a part, `make(part, parts) -> Service`; give both to `Service`, and a state folder that all
            machines see. It is run in each replica.
        replicas: how many; fixed while the application runs.
        **options: of a replica's deployment, such as `ray_actor_options={"num_gpus": 1}`.
    """
    require_int("replicas", replicas, 1)
    own = {"max_ongoing_requests": ONGOING, "graceful_shutdown_timeout_s": 60.0, "health_check_period_s": 2.0} | options
    parts = [
        serve.deployment(Replica, name=f"part-{part}", num_replicas=1, **own).bind(make, part, replicas)
        for part in range(replicas)
    ]
    light = {"num_cpus": 0}
    return serve.deployment(Router, name="router", max_ongoing_requests=ONGOING, ray_actor_options=light).bind(*parts)

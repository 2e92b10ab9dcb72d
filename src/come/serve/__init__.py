"""Serve one model to many tenants, each of which adapts by itself: an engine, a FastAPI app, a Ray Serve application.

`Service` needs torch and filelock; `come.serve.http` and `come.serve.ray_serve` are imported when they are asked for. Install
all of it with `pip install -e ".[serve]"`, and for Ray Serve with `pip install -e ".[serve-ray]"`.
"""

from come.serve.errors import RequestError
from come.serve.modes import Mode
from come.serve.service import Answer, Service

__all__ = ["Answer", "Mode", "RequestError", "Service"]

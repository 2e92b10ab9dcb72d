"""Pages that need nothing else: a template with the style and the script of reports inside."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def rendered(template: str, **values: Any) -> str:
    """A page from a template of this folder; all text in `values` is escaped."""
    texts = files("come.bench.report")
    style, script = (texts.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=PackageLoader("come.bench.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(style=style, script=script, digest=digest, **values)

"""The page of the demo, made with Gradio: controls and the HTML of each scene. The stream is `come.bench.demo.stream`."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.resources import files
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
import gradio as gr
from fastapi import FastAPI
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from PIL import Image
from torch import Tensor

from come import corruptions
from come.bench.demo.closed import Closed
from come.bench.demo.stream import CLEAN, METHODS, RATES, RECENT, RISK, Choice, Scene, watch
from come.bench.models import EMBEDDED
from come.errors import ComeError

VISITORS = 8  # streams that run at once; up to `WAITING` others wait in a queue
WAITING = 100

WORDS = """# Test-time adaptation, side by side

A model was trained on clean photographs of clothes and meets corrupted ones, without labels. Four copies see the same stream:
**No Adapt** stays as it is, **EM** minimizes entropy, **COME** minimizes the entropy of an opinion that can say "I do not
know", and **Steady** is what we recommend. Each abstains where it must to keep wrong answers below {risk:.0%} *on clean
images*; under corruption that is no promise. Confidence is the largest softmax probability. All of it runs on the machine
that serves this page.
"""
# The address bar keeps what was chosen, as a link to send.
REMEMBER = """(...chosen) => {
  const names = %s;
  const link = new URLSearchParams(names.map((name, i) => [name, chosen[i]]));
  history.replaceState(null, "", "?" + link);
  return chosen;
}"""


def shown(scene: Scene) -> str:
    """A scene as HTML, with its images inside."""
    return _template().render(scene=scene, pictures=[_png(image) for image in scene.images], recent=RECENT, clean=CLEAN)


@lru_cache
def _template() -> Template:
    loader = PackageLoader("come.bench", "demo")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("scene.html.jinja")


def _png(image: Tensor) -> str:
    """An image (3, H, W) uint8 as a data URL."""
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _linked(request: gr.Request) -> list[Any]:
    """The choice in the address, or the defaults if it is not valid; the button that starts a stream becomes active."""
    asked = dict(request.query_params)
    read: dict[str, Callable[[str], Any]] = {"severity": int, "rate": float, "guard": lambda text: text == "true"}
    try:
        choice = Choice(**{name: read.get(name, str)(asked[name]) for name in Choice.model_fields if name in asked})
    except (ComeError, ValueError):
        choice = Choice()
    return [*choice.model_dump().values(), gr.Button(interactive=True)]


def _run(*values: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The scenes of the stream that the controls choose, with the two buttons."""
    busy = gr.Button(interactive=False), gr.Button(interactive=True)
    try:
        given = dict(zip(Choice.model_fields, values, strict=True))
        choice = Choice(**given | {"severity": int(given["severity"]), "rate": float(given["rate"])})
        yield "<p>Calibrating on clean images ...</p>", *busy
        for scene in watch(choice):
            yield shown(scene), *busy
    except ComeError as error:
        raise gr.Error(str(error), print_exception=False) from error


def _idle() -> tuple[Any, Any]:
    return gr.Button(interactive=True), gr.Button(interactive=False)


def build() -> gr.Blocks:
    """The page; each visitor has a stream of their own."""
    first = Choice()
    names = [CLEAN, *corruptions.names()]
    with gr.Blocks(title="COME: test-time adaptation, side by side", analytics_enabled=False) as page:
        gr.Markdown(WORDS.format(risk=RISK))
        with gr.Row():
            controls: list[Any] = [
                gr.Dropdown([(n.replace("_", " "), n) for n in names], value=first.corruption, label="Corruption"),
                gr.Slider(1, 5, value=first.severity, step=1, label="Severity"),
                gr.Dropdown([(f"x {r:g}", r) for r in RATES], value=first.rate, label="Learning rates"),
                gr.Dropdown(list(METHODS), value=first.method, label="Method of EM and COME"),
                gr.Dropdown(list(EMBEDDED), value=first.model, label="Model"),
                gr.Checkbox(first.guard, label="The guard undoes a collapse"),
            ]
        with gr.Row():
            start = gr.Button("Start", variant="primary", interactive=False, elem_id="start")
            stop = gr.Button("Stop", interactive=False, elem_id="stop")
        scene = gr.HTML("<p>Press Start.</p>", elem_id="scene")
        going = start.click(
            _run,
            controls,
            [scene, start, stop],
            js=REMEMBER % list(Choice.model_fields),
            show_progress="hidden",
            concurrency_limit=VISITORS,
        )
        quiet: dict[str, Any] = {"show_progress": "hidden", "queue": False}
        going.then(_idle, None, [start, stop], **quiet)
        stop.click(_idle, None, [start, stop], cancels=[going], **quiet)
        page.load(_linked, None, [*controls, start], **quiet)
    page.queue(max_size=WAITING)
    return page


def create() -> FastAPI:
    """The application that a server runs; it makes no requests to other hosts."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Closed)
    gr.mount_gradio_app(
        app,
        build(),
        path="/",
        footer_links=[],
        ssr_mode=False,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css=(files("come.bench.demo") / "page.css").read_text(),
    )
    return app

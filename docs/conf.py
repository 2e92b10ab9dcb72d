"""The site: `sphinx-build -W -n --keep-going docs build/site`, offline; `tests/test_site.py` builds it so.

Pages are plain Markdown that reads well in the repository too. Notebooks are Python files that run when the site is built.
"""

import os
import re
from itertools import groupby
from pathlib import Path

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.ext.napoleon import Config, GoogleDocstring

import come
import come.serve.http  # here, because autodoc imports with typing.TYPE_CHECKING on, and FastAPI does not survive that

project = "come"
author = "The COME developers"
project_copyright = author
version = release = come.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["conf.py", "gallery/*.py"]
myst_heading_anchors = 3  # as GitHub's

nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm, in the kernels

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "model_config"}
autodoc_typehints_format = "short"
default_role = "code"
highlight_language = "none"
# Types in signatures are of torch, of Python, or of modules that no page shows. Names that a docstring refers to are checked.
nitpick_ignore_regex = [("py:(class|exc|obj)", ".*")]

html_theme = "furo"
html_math_renderer = "mathml"
html_title = f"come {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = ">>> |\\.\\.\\. "
copybutton_prompt_is_regexp = True

DOCS = Path(__file__).parent
REPLACED = {
    "results": "results/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
}
"""Pages that only link to a file elsewhere in the repository; on the site they are that file."""


def write_methods(app):
    """A page of the reference for each method, made from its module; the repository does not hold them."""
    pages = DOCS / "reference" / "methods"
    pages.mkdir(parents=True, exist_ok=True)
    for name in come.methods.names():
        method = come.methods.get(name)
        shown = f"automodule:: {method.__module__}", f"autoclass:: come.methods.{method.__name__}"
        directives = "\n\n".join(f".. {one}\n   :no-members:" for one in shown)
        text = f"# {name}\n\n```{{eval-rst}}\n{directives}\n```\n"
        page = pages / f"{name}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:  # or it would be built again
            page.write_text(text, encoding="utf-8")


def read(app, page, content):
    """Links out of docs/, which are right in the repository, lead to the page that shows the file, or to a copy of it."""
    home = DOCS / page
    if page in REPLACED:
        home = DOCS.parent / REPLACED[page]
        content[0] = home.read_text(encoding="utf-8")

    def there(found):
        picture, text, path = found.groups()
        file = Path(os.path.normpath(home.parent / path))
        if picture:
            return f"![{text}]({os.path.relpath(file, (DOCS / page).parent)})"
        file = file / "README.md" if file.is_dir() else file
        shown = next((name for name, other in REPLACED.items() if file == DOCS.parent / other), None)
        if shown is None and (not file.is_relative_to(DOCS) or file.parent == DOCS / "gallery"):  # no page
            return f"{{download}}`{text.strip('`')} <{os.path.relpath(file, (DOCS / page).parent)}>`"
        return f"[{text}]({os.path.relpath(DOCS / f'{shown}.md' if shown else file, (DOCS / page).parent)})"

    content[0] = re.sub(r"(!?)\[([^]]*)\]\(([\w./-]+)\)", there, content[0])


def docstring(app, what, name, obj, options, lines):
    """Docstrings are Google style. An indented part of the text is an equation or code: it is shown as it is written."""
    text = []
    for indented, part in groupby(lines, lambda line: line.startswith("    ") or (not line and None)):
        starts = indented and text and not text[-1] and not (len(text) > 1 and text[-2].startswith((".. ", "    ")))
        text += [*(("::", "") if starts else ()), *part]
    for field, about in getattr(obj, "model_fields", {}).items():  # a typed record: its fields are its arguments
        words = re.sub(r"\[/?\w*\]", "`", about.description or "")
        text += [f"* `{field} = {about.get_default(call_default_factory=True)!r}`: {words}"] if words else []
    kind = "object" if what in ("attribute", "property", "data") else what  # their "text: text" is no type
    lines[:] = GoogleDocstring(text, Config(), app, kind, name, obj, options).lines()


def signature(app, what, name, obj, options, arguments, returns):
    """Typed records have too many arguments for a line; `docstring` lists them."""
    return ("", None) if what == "class" and hasattr(obj, "model_fields") else None


def formula(block):
    """Formulas as MathML, which browsers show by themselves: no script is loaded from elsewhere."""

    def visit(writer, node):
        writer.body.append(tex2mathml(node.astext(), as_block=block))
        raise SkipNode

    return visit, None


def setup(app):
    """Sphinx calls this."""
    app.add_html_math_renderer("mathml", formula(block=False), formula(block=True))
    app.connect("builder-inited", write_methods)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)

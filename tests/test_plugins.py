"""Methods, objectives, data and settings of other packages: found by entry point; a broken one is a warning and no more."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import come
from come.registry import Registry, summary

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "plugin"
(PYTHON,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text(), flags=re.DOTALL)


def install(folder, files, entry_points, name="acme-tta", metadata=True):
    """What `pip install` leaves behind: files, and a dist-info folder with the entry points."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    if metadata:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def python(folder, *arguments, warnings="default"):
    """Run Python where that folder is among the installed packages."""
    return subprocess.run(
        [sys.executable, "-W", warnings, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "COLUMNS": "200"},
    )


# Names all that there are, and what was said meanwhile.
ASK = """
import json, warnings
import come
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    names = {"methods": come.methods.names(), "objectives": come.objectives.names()}
    again = come.methods.names(), come.objectives.names()
print(json.dumps({**names, "warnings": [str(w.message) for w in seen]}))
"""

GOOD = '''
"""Methods of ours."""
import come
come.methods.names()  # while the plugins are being looked for

class Fine(come.Method):
    """Fine: as it should be."""
    name = "fine"
    def adapt(self, ctx, x):
        return come.Step(ctx.forward(x), used=ctx.valid)

class Odd(Fine):
    """Odd: known by another name."""
    name = "even"

class Double(Fine):
    """Double: of a name that is taken."""
    name = "tent"

class Unwritten(come.Method):
    """Unwritten: no adapt."""
    name = "unwritten"

class Mass(come.Objective):
    """A mass."""
    def log_mass(self, logits):
        return logits.float().log_softmax(dim=-1)

mass = Mass()
number = 3
big = list(range(100_000))
'''
SILENT = """
from dataclasses import dataclass
import come

@dataclass(kw_only=True, eq=False)
class Silent(come.Method):
    name = "silent"
    share: float = 0.5
    def adapt(self, ctx, x):
        return come.Step(ctx.forward(x), used=ctx.valid)

class Mute(come.Objective):
    def log_mass(self, logits):
        return logits.float().log_softmax(dim=-1)

mute = Mute()
"""
FILES = {
    "acme/__init__.py": "",
    "acme/good.py": GOOD,
    "acme/silent.py": SILENT,
    "acme/raises.py": "raise RuntimeError('no licence\\x1b[31m found')",
    "acme/registers.py": GOOD.replace('"fine"', '"half"')
    + "\nfrom come.methods import register\nregister(Fine)\nraise KeyError('x')",
    "acme/exits.py": "import sys; sys.exit(3)",
    "acme/syntax.py": "def",
    "acme/kinds.py": """
from come.bench.data.opening import Kind
other, opens = (Kind(usage, "a kind", lambda *_: 3) for usage in ("another:PATH", "opens[:SIZE]"))
""",
}
# entry point -> what the warning about it says
METHODS = {
    "silent = acme.silent:Silent": "has no docstring; write one",
    "raises = acme.raises:X": r"importing it ends with RuntimeError: no licence\x1b[31m found; repair or uninstall",
    "half = acme.registers:Fine": "importing it ends with KeyError: 'x'; repair or uninstall that package",
    "exits = acme.exits:X": "importing it ends with SystemExit: 3; repair or uninstall that package",
    "syntax = acme.syntax:X": "importing it ends with SyntaxError",
    "absent = acme.absent:X": "importing it ends with ModuleNotFoundError: No module named 'acme.absent'",
    "gone = acme.good:Gone": "importing it ends with AttributeError",
    "number = acme.good:number": "method 'number' must be a subclass of come.Method, got 3",
    "big = acme.good:big": "method 'big' must be a subclass of come.Method, got [0, 1, 2, 3, 4, 5, ...]",
    "objective = acme.good:mass": "method 'objective' must be a subclass of come.Method, got <acme.good.Mass",
    "odd = acme.good:Odd": "must be registered under its own name, Odd.name, which is 'even'",
    "tent = acme.good:Double": "method 'tent' is taken by the class Tent; choose another name",
    "unwritten = acme.good:Unwritten": "Unwritten does not write adapt",
    "a:b = acme.good:Fine": "must be a word without : , = and spaces, got 'a:b'",
}
OBJECTIVES = {
    "mute = acme.silent:mute": "has no docstring; write one",
    "class = acme.good:Mass": "must be an instance of come.Objective, got the class Mass; make one: mass = Mass()",
    "method = acme.good:Fine": "must be an instance of come.Objective, got the class Fine",
    "exits = acme.exits:X": "importing it ends with SystemExit: 3",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    methods = ["[come.methods]", "fine = acme.good:Fine", *METHODS]
    objectives = ["[come.objectives]", "mass = acme.good:mass", *OBJECTIVES]
    settings = ["[come.settings]", "exits = acme.exits:X", "number = acme.good:number"]
    data = ["[come.data]", "number = acme.good:number", "named = acme.kinds:other", "opens = acme.kinds:opens"]
    points = "\n".join([*methods, *objectives, *settings, *data])
    install(folder, FILES, points)
    return folder


def test_a_broken_plugin_is_one_warning_and_everything_else_works(broken):
    done = python(broken, "-c", ASK)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["methods"] == sorted([*come.methods.names(), "fine", "silent"])
    assert found["objectives"] == [*come.objectives.names(), "mass", "mute"]
    for kind, expected in (("method", METHODS), ("objective", OBJECTIVES)):
        for point, message in expected.items():
            name, value = point.split(" = ")
            about = [
                w for w in found["warnings"] if w.startswith(f"{kind} '{name}' of the package acme-tta ('{value}')")
            ]
            assert len(about) == 1, (point, found["warnings"])
            assert message in about[0]
            assert "\n" not in about[0]
    assert len(found["warnings"]) == len(METHODS) + len(OBJECTIVES)


def registry(folder, monkeypatch, text):
    """A registry of methods that finds these entry points."""
    install(folder, {"acme_good.py": GOOD, "acme_raises.py": "raise OSError"}, text, metadata=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "acme_good", None)
    del sys.modules["acme_good"]
    return Registry("method", entry_points="come.methods", check=come.methods._check)


def test_warnings_that_are_errors_hide_no_plugin(tmp_path, monkeypatch):
    found = registry(
        tmp_path, monkeypatch, "[come.methods]\na = acme_raises:X\nb = acme_raises:X\nfine = acme_good:Fine\n"
    )
    with pytest.raises(UserWarning, match="method 'a' of the package"):
        found.names()
    assert found.names() == ["fine"]


def test_a_package_without_metadata_is_named_by_its_module(tmp_path, monkeypatch):
    found = registry(tmp_path, monkeypatch, "[come.methods]\nx = acme_raises:X\n")
    with pytest.warns(UserWarning, match="method 'x' of the package acme_raises .*ends with OSError; repair"):
        assert found.names() == []


LIST = """
from come.bench.cli.lists import list_
for kind in ("methods", "objectives", "settings", "data"):
    list_(kind)
"""
OPEN = """
from come.bench.data import open_source
try:
    open_source("opens")
except ValueError as error:
    print(error)
"""


def test_the_command_lists_what_there_is(broken):
    done = python(broken, "-c", LIST + OPEN)
    assert done.returncode == 0, done.stderr
    shown = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert {"tent", "fine", "silent", "come", "mass", "mute", "standard", "fashion[:SIZE]", "opens[:SIZE]"} <= shown
    for said in (
        "data 'number' must be a come.bench.data.opening.Kind, got 3",
        "data 'named' must have a usage that begins with its name, got 'another:PATH'",
    ):
        assert done.stderr.count(said) == 1, done.stderr
    assert "data 'opens' must open as a come.bench.data.Source, got 3; repair its package" in done.stdout


# ---- the example ----


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """`examples/plugin` as pip installs it, without a network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("example")
    package = shutil.copytree(EXAMPLE, folder / "package")  # what a build leaves behind is left there
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    pip = [sys.executable, "-m", "pip", "install", *offline, "--target", str(folder / "target"), str(package)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "target"


def test_the_example_passes_its_tests_and_so_does_the_page(example):
    """`come list` and a small `come bench` among them."""
    (example / "test_page.py").write_text("def test_page():\n" + textwrap.indent(PYTHON, "    "))
    tests = str(EXAMPLE / "tests"), str(example / "test_page.py")
    done = python(example, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, *tests)
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout


# ---- the registry itself ----


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a,b", "a=b", "a\n", 3, None])
def test_a_name_is_a_word(name):
    with pytest.raises(come.ConfigError, match=r"the name of a colour must be a word without"):
        Registry("colour").add(name, 1)


def test_the_check_is_asked():
    colours = Registry("colour", check=lambda name, thing: "" if thing == 1 else "must be 1")
    colours.add("red", 1)
    with pytest.raises(come.ConfigError, match="colour 'blue' must be 1"):
        colours.add("blue", 2)
    assert colours.names() == ["red"]


@pytest.mark.parametrize("name", come.methods.names())
def test_every_method_says_what_it_does(name):
    assert summary(come.methods.get(name))


def test_what_has_no_docstring_has_no_summary():
    assert summary(type("Plain", (), {})) == summary(type("Plain", (), {})()) == ""

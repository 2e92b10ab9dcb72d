"""The package as a whole: what it exports, what it imports, and that what its pages say is true."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import come

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "come"


def run(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)


def test_public_names():
    assert come.__all__ == [
        "Adapter", "ClosedError", "CollapseError", "ComeError", "ConfigError", "Event", "Fleet", "Guard", "InputError",
        "Invariant", "Method", "MissingError", "ModelError", "Objective", "Opinion", "RankError", "Softmax", "StateError",
        "Step", "__version__", "adapt", "callbacks", "methods", "objectives", "optim", "select", "theory",
    ]  # fmt: skip
    assert all(getattr(come, name).__doc__ for name in come.__all__)
    assert come.__version__ == version("come-tta")


def test_core_dependencies():
    core = [r for r in requires("come-tta") if "extra ==" not in r]
    assert sorted(re.split(r"[<>=\[]", r)[0] for r in core) == ["safetensors", "torch"]


def test_importing_come_imports_no_more_than_it_needs():
    """The other modules are imported when they are asked for."""
    done = run(
        "import sys, come\n"
        "for name in ('testing', 'corruptions', 'episodic', 'zero_shot', 'bench'):\n"
        "    assert f'come.{name}' not in sys.modules and name in dir(come), name\n"
        "    assert getattr(come, name) is sys.modules[f'come.{name}'], name\n"
        "    if name == 'testing':\n"
        "        heavy = {'timm', 'torchvision', 'matplotlib', 'typer', 'transformers', 'rich', 'PIL', 'pydantic'}\n"
        "        assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr


def test_what_is_not_on_pypi_is_not_installed_from_there():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    assert not [
        str(page) for page in pages if re.search(r"pip install [^\n]*come-tta", page.read_text(encoding="utf-8"))
    ]


def test_a_missing_extra_is_named():
    done = run("import sys; sys.modules |= dict.fromkeys(['pydantic', 'PIL', 'typer']); import come; come.bench")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        'is missing; install it with: pip install -e ".[bench]" (in your clone of come)'
    )


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="module 'come' has no attribute 'benhc'"):
        _ = come.benhc
    assert set(come.__all__) < set(dir(come))


# What each module may import of `come`: the arrows of docs/architecture.md. The core stands above `bench`.
ROOMS = {"images", "model", "state", "step", "streams"}  # folders whose modules have a place each
LAYERS = [
    ["errors", "seeds", "state.trees", "streams.rendezvous", "model.locks", "version"],
    ["images.augment", "images.geometry", "images.normalization", "model.heads", "model.inputs", "model.interface"],
    ["optim", "zero_shot"],
    ["corruptions", "model.positions", "registry", "select", "state.files", "state.hub", "theory"],
    ["model.batchnorm", "model.parameters", "objectives", "streams.names"],
    ["abstain_by_image", "guard", "metrics", "model.ranks", "streams.norms"],
    ["abstain", "model.copies"],
    ["model.functional"],
    ["method"],
    ["callbacks", "methods", "step.transition"],
    ["export", "state.saving", "step.compiled", "streams.transition"],
    ["step.engine"],
    ["step.lifecycle", "streams.groups", "streams.store"],
    ["adapter", "fleet"],
    ["episodic", "integrations", "serve", "testing"],
    ["bench"],
    ["__main__"],
]
# Other packages than torch and safetensors that a module of the core asks for in the function that needs them.
OPTIONAL = {
    "methods/foa.py": {"cma", "numpy"},
    "corruptions/jpeg.py": {"numpy", "PIL"},
    "state/hub.py": {"huggingface_hub"},
}


def test_imports_point_one_way():
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    for file in SRC.rglob("*.py"):
        name = _place(file.relative_to(SRC).with_suffix("").parts)
        if file.name == "__init__.py" and name not in level:  # of a room, or of the package
            continue
        assert name in level, f"{name} has no place in LAYERS"
        for module in _imported(file):
            imported = _place(module.split(".")[1:]) if module.startswith("come.") else name
            if imported != name and imported not in ROOMS:
                assert level[imported] < level[name], f"{file.name} imports {imported}, which does not stand below it"


def _place(parts):
    return ".".join(parts[:2]) if parts[0] in ROOMS else parts[0]


def test_the_core_needs_torch_and_safetensors_only():
    ours = {*sys.stdlib_module_names, "come", "torch", "safetensors"}
    for file in SRC.rglob("*.py"):
        path = file.relative_to(SRC)
        if path.parts[0] not in ("bench", "integrations", "serve"):
            others = {module.partition(".")[0] for module in _imported(file)} - ours
            assert others <= OPTIONAL.get(path.as_posix(), set()), f"{path} imports {others}"


def _imported(file):
    """Full names of the modules that a file imports when it runs, also inside of functions."""
    tree = ast.parse(file.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    package = ("come", *file.relative_to(SRC).parts[:-1])
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            begin = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (begin, node.module) if part)
            yield from (f"come.{alias.name}" for alias in node.names) if module == "come" else [module]


README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(README)))
def test_the_examples_of_the_readme_run(number, tmp_path):
    (tmp_path / "example.py").write_text(README[number])
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_the_examples_run(example):
    runpy.run_path(str(example), run_name="__main__")


def test_ci_runs_the_test_command_of_the_readme():
    command = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.endswith("-m pytest"))
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_changelog_has_this_version():
    assert f"[{come.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_has_this_version():
    cited = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {come.__version__}" in cited
    assert sum(line.strip().startswith("- family-names:") for line in cited) == 5


def test_pre_commit_runs_the_linters_of_this_environment():
    """And downloads nothing."""
    lines = (ROOT / ".pre-commit-config.yaml").read_text().splitlines()
    assert [line.split()[-1] for line in lines if "repo:" in line] == ["local"]
    assert {line.split()[1] for line in lines if "entry:" in line} == {"ruff", "mypy"}
    assert {line.split()[-1] for line in lines if "language:" in line} == {"system"}


def test_the_lock_file_is_up_to_date_and_names_no_other_host():
    """Else run `uv lock` where no mirror is set."""
    text = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r"\w+://[^/\"]*", text)) == {"https://pypi.org", "https://files.pythonhosted.org"}
    (ours,) = (one for one in tomllib.loads(text)["package"] if one["name"] == "come-tta")
    assert ours["source"] == {"editable": "."}
    locked = {(one["name"], one.get("specifier", "")) for one in ours["metadata"]["requires-dist"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(ours["metadata"]["provides-extras"]) == set(extras)
    wanted = map(Requirement, [*project["dependencies"], *(one for extra in extras.values() for one in extra)])
    assert locked == {(one.name.replace("_", "-"), str(one.specifier)) for one in wanted} - {("come-tta", "")}


def test_the_wheel_and_the_source_distribution(tmp_path):
    """Built without a network: the wheel holds the package with all that it reads, the other one the repository."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        files = set(file.namelist())
    ours = {path.relative_to(SRC.parent).as_posix() for path in SRC.rglob("*") if path.is_file()}
    ours = {path for path in ours if "__pycache__" not in path}
    assert {"come/py.typed", "come/bench/embedded/fashion_vit.safetensors", "come/bench/report/page.html.jinja"} <= ours
    assert {path for path in files if not path.startswith(f"come_tta-{come.__version__}.dist-info/")} == ours
    with tarfile.open(source) as archive:
        files = {path.partition("/")[2] for path in archive.getnames()}
    assert {"LICENSE", "CITATION.cff", "pyproject.toml", "tests/test_package.py", "docs/architecture.md"} <= files
    assert {f"src/{path}" for path in ours} <= files


def test_the_architecture_names_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for folder in (path.parent for path in SRC.rglob("__init__.py") if path.parent != SRC):
        assert f"{folder.name}/" in text, f"docs/architecture.md does not mention {folder.relative_to(SRC)}/"

"""The package as a whole: what it exports, what it imports, and that what its pages say is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

import come

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "come"


def run(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)


def test_public_names():
    assert come.__all__ == [
        "Adapter", "ClosedError", "CollapseError", "ComeError", "ConfigError", "Event", "Guard", "InputError", "Method",
        "ModelError", "Objective", "Opinion", "Softmax", "StateError", "Step", "__version__", "adapt", "callbacks", "methods",
        "objectives", "optim", "select", "theory",
    ]  # fmt: skip
    assert all(getattr(come, name).__doc__ for name in come.__all__)
    assert come.__version__ == version("come-tta")


def test_core_dependencies():
    core = [r for r in requires("come-tta") if "extra ==" not in r]
    assert sorted(re.split(r"[<>=\[]", r)[0] for r in core) == ["safetensors", "torch"]


def test_importing_come_imports_no_more_than_it_needs():
    done = run(
        "import sys, come, come.testing\n"
        "heavy = {'timm', 'torchvision', 'matplotlib', 'typer', 'transformers', 'rich', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert done.returncode == 0, done.stderr


# What each module may import of `come`: the arrows of docs/architecture.md.
LAYERS = [
    ["errors", "files", "locks", "version"],
    ["registry", "inputs", "theory", "select", "optim", "heads", "images", "augment", "metrics"],
    ["objectives", "batchnorm", "corruptions", "paper"],
    ["borrowed", "guard"],
    ["method"],
    ["methods", "saving"],
    ["adapter"],
    ["callbacks", "testing"],
    ["data", "models"],
    ["settings"],
    ["bench"],
    ["report", "compare", "reproduce"],
    ["cli"],
    ["__main__"],
]


def test_imports_point_one_way():
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    for file in SRC.rglob("*.py"):
        name = file.relative_to(SRC).with_suffix("").parts[0]
        if name == "__init__":
            continue
        assert name in level, f"{name} has no place in LAYERS"
        for imported in _runtime_imports(ast.parse(file.read_text())):
            if imported != name:
                assert level[imported] < level[name], f"{file.name} imports {imported}, which does not stand below it"


def _runtime_imports(tree):
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden or not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("come"):
            continue
        parts = node.module.split(".")
        yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]


def test_the_examples_of_the_readme_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        done = run(block)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_the_examples_run():
    for example in sorted((ROOT / "examples").glob("*.py")):
        done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{example.name}\n{done.stderr}"


def test_ci_runs_the_test_command_of_the_readme():
    command = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.endswith("-m pytest"))
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_changelog_has_this_version():
    assert f"[{come.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_architecture_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for file in SRC.rglob("*.py"):
        if file.name != "__init__.py":
            assert file.name in text, f"docs/architecture.md does not mention {file.name}"

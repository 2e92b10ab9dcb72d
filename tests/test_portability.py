"""Where it runs: nothing that only Unix has is needed to import it, and its pages name the versions that it asks for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Imports everything twice. The first time, on this system as it is, loads what others wrote: they may use what it has. The
# second time, `come` alone is loaded, on a system that lacks what Windows lacks.
ELSEWHERE = """
import builtins, importlib, os, pathlib, signal, sys, time

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "curses", "readline", "syslog"}
LACKING = {
    os: ["fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getloadavg", "sched_getaffinity", "uname", "killpg",
         "setsid", "mkfifo", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"],
    signal: ["SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGWINCH", "alarm", "setitimer", "pthread_sigmask"],
    time: ["tzset"],
}


def ours(name):
    return name == "come" or name.startswith("come.")


def load():
    import come

    root = pathlib.Path(come.__file__).parent
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[-1] == "ray_serve":  # needs an extra of its own
            continue
        try:
            importlib.import_module(".".join(["come", *parts]).removesuffix(".__init__"))
        except come.MissingError:  # an integration whose package is not installed, both times
            continue
    return {name for name in sys.modules if ours(name)}


def only_elsewhere(name, globals=None, *more, **named):
    if ours((globals or {}).get("__name__", "")) and name.partition(".")[0] in MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return everywhere(name, globals, *more, **named)


before = load()
for name in before:
    del sys.modules[name]
for module, names in LACKING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
everywhere, builtins.__import__ = builtins.__import__, only_elsewhere
for line in ("import fcntl", "from os import fork"):  # this test sees what it looks for
    try:
        exec(line, {"__name__": "come.new"})
    except ImportError:
        continue
    raise AssertionError(line)
assert load() == before
"""

# A stream, a saved state and its way back, in the same process.
USED = """
import tempfile, come, torch

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
adapter = come.adapt(model, "tent")
assert adapter(torch.randn(6, 4)).isfinite().all()
with tempfile.TemporaryDirectory() as folder:
    adapter.save(folder + "/state.safetensors")
    adapter.load(folder + "/state.safetensors")
"""


def test_nothing_that_only_unix_has_is_needed():
    done = subprocess.run([sys.executable, "-c", ELSEWHERE + USED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_readme_names_the_oldest_versions():
    project, readme = (ROOT / "pyproject.toml").read_text(), (ROOT / "README.md").read_text()
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    (torch,) = re.findall(r'"torch>=([\d.]+)"', project)
    for what in (f"Python {python} or newer", f"torch {torch} or newer"):
        assert what in readme, f"README.md does not say {what!r}"

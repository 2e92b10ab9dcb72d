"""`come` and `python -m come`."""

import sys

from come.errors import pip_install


def main() -> None:
    """Run the command line, or name the missing package."""
    try:
        from come.bench.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"error: come needs {error.name}, which is missing; install it with: {pip_install('bench')}")
    run()


if __name__ == "__main__":
    main()

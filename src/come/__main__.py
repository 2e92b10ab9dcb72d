"""`come` and `python -m come`."""

import sys


def main() -> None:
    """Start the command line, or say what to install."""
    try:
        from come.bench.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f'error: {error.name} is missing; install the benchmark with: pip install "come-tta[bench]"')
    run()


if __name__ == "__main__":
    main()

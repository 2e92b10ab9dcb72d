"""Thousands of random models, batches and values through every method; counts what came of them.

    python tests/harness/fuzz.py [CASES]

A case is answered (finite logits and weights), refused (a documented, typed error), or something else: the last must be 0.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter

import torch
from fuzz_cases import Case, cases
from hypothesis import HealthCheck, Phase, given, settings


def main() -> None:
    """Run, and print a line for each method."""
    torch.set_num_threads(1)
    logging.disable()
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    counts: dict[str, Counter[str]] = {}
    for part in range(-(-wanted // 500)):  # hypothesis slows down with the number of examples it remembers

        @settings(
            max_examples=500,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(cases())
        def run(case: Case) -> None:
            try:
                found = case.run()
            except Exception as error:
                found = "something else"
                print(f"{type(error).__name__}: {error}\n  {case}", flush=True)
            counts.setdefault(case.method, Counter())[found] += 1

        run()
        print(f"{(part + 1) * 500} cases", file=sys.stderr, flush=True)
    print("| method | answered | refused | something else |\n|---|---:|---:|---:|")
    for method, found in sorted(counts.items()):
        print(f"| {method} | {found['answered']} | {found['refused']} | {found['something else']} |")
    total = sum(counts.values(), Counter())
    print(f"| all | {total['answered']} | {total['refused']} | {total['something else']} |")


if __name__ == "__main__":
    main()

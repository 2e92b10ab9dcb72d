"""Any model, any batch, any values: a typed error or a finite answer, and never a weight that is not finite."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parent / "harness"))
from fuzz_cases import cases


@settings(max_examples=200, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_nothing_but_typed_errors_and_finite_answers(case):
    assert case.run() in ("answered", "refused")

"""Calls a check with what it asks for."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from parity_tests.oracles import Call
from parity_tests.runs.fake_runs import place as place
from parity_tests.weights.exporters import kept_exporter as kept_exporter


@pytest.fixture
def call(place: Path, capsys: pytest.CaptureFixture[str], kept_exporter: None) -> Call:
    """Calls a check; it may ask for a `folder` with a text and the fake twin, or for `capsys`."""
    known = {"folder": place, "capsys": capsys}

    def run(check: Call, *given: Any) -> None:
        asked = inspect.signature(check).parameters
        check(*given, **{name: value for name, value in known.items() if name in asked})

    return run

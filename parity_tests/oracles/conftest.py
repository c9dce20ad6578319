"""Fixtures of the oracles."""

from pathlib import Path

import pytest

from parity_tests.runs.fake_runs import place as place
from parity_tests.weights.exporters import kept_exporter as kept_exporter


@pytest.fixture
def folder(place: Path) -> Path:
    """The working directory, with a text; "fake" is a framework."""
    return place

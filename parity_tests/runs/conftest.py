"""Fixtures of several files of this room."""

from parity_tests.runs.fake_runs import place as place
from parity_tests.runs.fake_runs import process as process

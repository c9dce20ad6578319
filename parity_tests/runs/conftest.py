"""Fixtures of several files of this room."""

from parity_tests.runs.fake_runs import place as place
from parity_tests.runs.fake_runs import process as process
from parity_tests.runs.small_disk import small_disk as small_disk

"""A process that we have started and that has ended: it is named, with what it said last."""

import subprocess
import sys
from subprocess import PIPE

import pytest

from lockstep import process
from lockstep.exits import STOPPED


@pytest.mark.parametrize(("printed", "line"), [
    ("", ""), (" \n\n", ""), ("a\nb: c\n", "b: c"), ("a\n  b\r\n \n", "b"),
])  # fmt: skip
def test_the_last_line_says_why(printed: str, line: str) -> None:
    assert process.last_line(printed) == line


PIPE_BREAKS = """
import os, sys
from lockstep.exits import exit_status
def command():
    if sys.argv[1] == "own":
        os.write(sys.stdout.fileno(), b"begun\\n")
        ours, other = os.pipe()
        os.close(ours)
        os.write(other, b"x")
    while True:
        print("line", flush=True)
sys.exit(exit_status(command))
"""


@pytest.mark.parametrize(("whose", "status"), [("stdout's", STOPPED), ("own", 1)])
def test_only_a_reader_that_has_seen_enough_ends_in_silence(whose: str, status: int) -> None:
    """A pipe that our own process breaks is a bug, and shows where."""
    words = [sys.executable, "-c", PIPE_BREAKS, whose]
    with subprocess.Popen(words, stdout=PIPE, stderr=PIPE, text=True) as child:
        assert child.stdout and child.stderr
        child.stdout.readline()
        if whose != "own":
            child.stdout.close()
        assert child.wait(60) == status
        assert ("Traceback" in child.stderr.read()) is (whose == "own")

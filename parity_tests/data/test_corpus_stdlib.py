"""The standard library as a corpus: the same tokens on every machine with this Python."""

import math
import re
from pathlib import Path

import pytest

from lockstep.data import corpus
from parity_tests.data.corpora import error, same, write

pytestmark = pytest.mark.usefixtures("cache")


def test_the_real_library_is_megabytes_of_python_from_no_particular_machine() -> None:
    loaded = corpus.load("stdlib")
    total = len(loaded.train) + len(loaded.val)
    assert 5e6 < total < 3e7
    assert 0.02 < len(loaded.val) / total < 0.1
    assert re.match(r"standard library of Python 3\.\d+\.\d+", loaded.source)
    text = loaded.train.tobytes() + loaded.val.tobytes()
    assert b"build_time_vars = {" not in text  # _sysconfigdata's dictionary
    uniform = math.log(256)
    unigram, bigram = corpus.unigram_entropy(loaded), corpus.bigram_entropy(loaded)
    assert unigram is not None and bigram is not None
    assert 1.5 < bigram < unigram - 0.5 < uniform - 1.5


def test_modules_come_in_posix_order_and_are_held_out_whole(library: Path) -> None:
    loaded = corpus.load("stdlib")
    assert loaded.train.tobytes() == b"# b.py\n# b/c.py\n# m0.py\n# m1.py\n"
    assert loaded.val.tobytes() == b"# m30.py\n"


@pytest.mark.parametrize(
    "name",
    [
        "site-packages/x.py",
        "dist-packages/x.py",
        "test/x.py",
        "b/tests/x.py",
        "b/idle_test/x.py",
        "b/__pycache__/x.py",
        "config-3.11-x86_64/x.py",
        "_sysconfigdata__linux.py",
        "sitecustomize.py",
        "x.pyi",
    ],
)
def test_tests_and_what_differs_by_machine_are_left_out(library: Path, name: str) -> None:
    before = corpus.load("stdlib").sha256
    write(library / name, b"# left out\n")
    assert corpus.load("stdlib").sha256 == before
    write(library / "x.py", b"# taken in\n")
    assert corpus.load("stdlib").sha256 != before


def test_a_module_that_vanishes_is_skipped(library: Path) -> None:
    before = corpus.load("stdlib")
    (library / "gone.py").symlink_to(library / "nowhere")
    assert same(corpus.load("stdlib"), before)


def test_a_python_without_its_source_is_told(library: Path) -> None:
    (library / "m30.py").unlink()
    assert error("stdlib") == (
        "--data stdlib: this Python has no library source; use a .txt file or a folder"
    )

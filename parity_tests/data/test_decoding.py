"""By which tokenizer the tokens of a run are shown: bytes, the one it keeps, or none."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lockstep.config import DataConfig
from lockstep.data import corpus, decoding, tokenizer
from lockstep.errors import UserError
from parity_tests.data.corpora import write

TEXT = b"a dog barks. " * 9


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer."""
    here = tmp_path_factory.mktemp("place")
    made = Tokenizer(models.WordLevel({"a": 0, "dog": 1, "barks": 2}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    (here / "kept").mkdir()
    made.save(str(here / "kept" / "tokenizer.json"))
    return here


# --data, whether the run was given --tokenizer, and what decodes its tokens
@pytest.mark.parametrize(("data", "named", "expected"), [
    ("stdlib", False, "bytes"), ("text.txt", False, "bytes"), ("TEXT.TXT", False, "bytes"),
    ("gone.jsonl", False, "bytes"), ("text.txt", True, "kept"), ("gone", True, "kept"),
    ("tokens", True, "kept"), ("tokens", False, "kept"),
])  # fmt: skip
def test_what_decodes_the_tokens_of_a_run(
    data: str, named: bool, expected: str, place: Path
) -> None:
    found = decoding.of_run(DataConfig(data=data, tokenizer="kept" * named), place / "kept")
    assert isinstance(found, tokenizer.Bytes if expected == "bytes" else tokenizer.FromFile)


@pytest.mark.parametrize("data", ["tokens", "my-stdlib", "gone", "x" * 300])
def test_nobody_knows_the_tokenizer_of_a_run_that_keeps_none(data: str, place: Path) -> None:
    """A file whose name ends as `stdlib` does is not that."""
    assert decoding.of_run(DataConfig(data=data), place / "none") is None


def test_a_vocabulary_with_holes_goes_to_its_largest_token(tmp_path: Path) -> None:
    """Or tokens beyond two bytes would be others."""
    made = Tokenizer(models.WordLevel({"a": 0, "dog": 65_537, "barks": 70_000}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "a.txt", TEXT)
    loaded = corpus.load(str(tmp_path / "a.txt"), tokenizer=str(tmp_path))
    assert loaded.train[:3].tolist() == [0, 65_537, 70_000]
    assert loaded.vocab == 70_001


def test_tokenizer_for_bytes_is_refused(place: Path) -> None:
    with pytest.raises(UserError, match="is not that of the run's tokens, which are bytes"):
        decoding.of_run(DataConfig(data="text.txt"), place / "none", str(place / "kept"))
    assert decoding.of_run(DataConfig(data="tokens"), place / "none", str(place / "kept"))

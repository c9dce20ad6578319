"""By which tokenizer the tokens of a run are shown: bytes, the one it keeps, or none."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lockstep.config import DataConfig
from lockstep.data import corpus, decoding, prepare, tokenizer
from lockstep.errors import UserError
from parity_tests.data.corpora import write

TEXT = b"a dog barks. " * 9


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of each kind, and two tokenizers."""
    here = tmp_path_factory.mktemp("place")
    for name, words in (("kept", ["a", "dog", "barks"]), ("other", ["a", "cat"])):
        made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="a"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        (here / name).mkdir()
        made.save(str(here / name / "tokenizer.json"))
    for name in ("text.txt", "TEXT.TXT", "texts/a.txt", "tokens/train.bin", "my-stdlib"):
        write(here / name, TEXT)
    write(here / "damaged.tokens" / "data.json", b"{")
    for name in ("", "kept", "other"):
        out, folder = here / f"{name or 'bytes'}.tokens", str(here / name) if name else ""
        prepare.prepare("text.txt", [here / "text.txt"], folder, out)
    return here


# --data, whether the run was given --tokenizer, and what decodes its tokens
@pytest.mark.parametrize(("data", "named", "expected"), [
    ("stdlib", False, "bytes"), ("text.txt", False, "bytes"), ("TEXT.TXT", False, "bytes"),
    ("gone.jsonl", False, "bytes"), ("texts", False, "bytes"), ("bytes.tokens", False, "bytes"),
    ("bytes.tokens", True, "bytes"), ("text.txt", True, "kept"), ("gone", True, "kept"),
    ("kept.tokens", True, "kept"), ("kept.tokens", False, "kept"), ("tokens", False, "kept"),
    ("damaged.tokens", True, "kept"), ("other.tokens", False, None),
])  # fmt: skip
def test_what_decodes_the_tokens_of_a_run(
    data: str, named: bool, expected: str | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    found = decoding.of_run(DataConfig(data=data, tokenizer="kept" * named), place / "kept")
    if expected is None:
        assert found is None
    else:
        assert found and found.name == tokenizer.load(expected if expected == "kept" else "").name


@pytest.mark.parametrize("data", ["tokens", "my-stdlib", "gone", "kept.tokens", "x" * 300])
def test_nobody_knows_the_tokenizer_of_a_run_that_keeps_none(
    data: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose name ends as `stdlib` does is not that."""
    monkeypatch.chdir(place)
    assert decoding.of_run(DataConfig(data=data), place / "none") is None


def test_a_vocabulary_with_holes_goes_to_its_largest_token(tmp_path: Path, cache: Path) -> None:
    """Or tokens beyond two bytes would be others, and those beyond their number never written."""
    made = Tokenizer(models.WordLevel({"a": 0, "dog": 65_537, "barks": 70_000}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "a.txt", TEXT)
    loaded = corpus.load(str(tmp_path / "a.txt"), tokenizer=str(tmp_path))
    assert loaded.train[:3].tolist() == [0, 65_537, 70_000]
    assert loaded.vocab == 70_001
    # What was written by their number, before, is another's and is made again.
    assert tokenizer.load(str(tmp_path)).name.endswith("-70001")


def test_another_than_that_of_the_tokens_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for data in ("text.txt", "bytes.tokens", "other.tokens"):
        with pytest.raises(UserError, match="--tokenizer kept: is not that of the run's tokens"):
            decoding.of_run(DataConfig(data=data), place / "none", "kept")
    for data in ("tokens", "kept.tokens"):
        assert decoding.of_run(DataConfig(data=data), place / "none", "kept")

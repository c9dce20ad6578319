"""Find the tokenizer that decodes the tokens of a run."""

from pathlib import Path

from lockstep.config import DataConfig
from lockstep.data.records import kind_of
from lockstep.data.tokenizer import Bytes, FromFile, Tokenizer, load
from lockstep.errors import require


def of_run(data: DataConfig, kept: Path, folder: str = "") -> Tokenizer | None:
    """Load the tokenizer of a run's tokens; None if it is not known.

    Args:
        kept: where the run has the files of --tokenizer or, without that, of --init's.
        folder: with the tokenizer.json that the user names instead.

    Raises:
        UserError: its files cannot be read, or the run's tokens are bytes.
    """
    is_text = data.data == "stdlib" or kind_of(data.data) in (".txt", ".jsonl")
    are_bytes = is_text and not data.tokenizer
    if folder:
        remedy = "is not that of the run's tokens, which are bytes; name none"
        require(not are_bytes, "--tokenizer", folder, remedy)
        return load(folder)
    if are_bytes:
        return Bytes()
    return FromFile(kept, links=False) if (kept / "tokenizer.json").exists() else None

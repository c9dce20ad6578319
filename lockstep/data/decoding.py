"""Find the tokenizer that decodes the tokens of a run."""

from pathlib import Path

from lockstep.config import DataConfig
from lockstep.data import prepare, prepared, records
from lockstep.data.tokenizer import Bytes, FromFile, Tokenizer, load
from lockstep.errors import UserError, require

UNKNOWN = ""


def of_run(data: DataConfig, kept: Path, folder: str = "") -> Tokenizer | None:
    """Load the tokenizer of a run's tokens; None if it is not known.

    Args:
        kept: where the run has the files of --tokenizer or, without that, of --init's.
        folder: with the tokenizer.json that the user names instead.

    Raises:
        UserError: its files cannot be read, or the user names another.
    """
    name = _name(data)
    if folder:
        words = load(folder)
        fits = name in (UNKNOWN, words.name)
        require(fits, "--tokenizer", folder, "is not that of the run's tokens; name it, or none")
        return words
    if name == Bytes.name:
        return Bytes()
    if not (kept / "tokenizer.json").exists():
        return None
    words = FromFile(kept, links=False)
    return words if data.tokenizer or name in (UNKNOWN, words.name) else None


def _name(data: DataConfig) -> str:
    """Find the name of the tokenizer; the data of a run may be gone."""
    path = Path(data.data)
    try:
        if (path / "data.json").exists():
            return prepared.read_manifest(path).tokenizer
        text = records.kind_of(path) in records.KINDS or data.data == "stdlib"
        if path.is_dir():
            text = not prepare.has_tokens(path)
    except (OSError, UserError):  # no possible name, none that may be looked at, or damaged
        return UNKNOWN
    return Bytes.name if text and not data.tokenizer else UNKNOWN

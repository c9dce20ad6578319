"""The small files beside weights, which a run keeps and an export copies."""

import shutil
from pathlib import Path

from lockstep.config import Config
from lockstep.errors import UserError, why
from lockstep.files.untrusted import Refused, open_regular

FOLDER = "init"  # of a run
LARGEST = 2**28  # bytes of one; a tokenizer has some 10 million
CONFIG = "config.json"
MODEL = (CONFIG, "generation_config.json")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def keep(config: Config, run: Path) -> None:
    """Keep the model's files from `--init`, and the tokenizer's from one folder, to match."""
    init, tokenizer = config.run.init, config.data.tokenizer or config.run.init
    for names, folder in ((MODEL, init), (TOKENIZER, tokenizer)):
        if folder:
            copy(names, Path(folder), run / FOLDER, links=True)


def copy(names: tuple[str, ...], source: Path, target: Path, *, links: bool) -> None:
    """Copy files that are there, and not yet in the target.

    Args:
        links: whether they may be symbolic links: what the user named, not what a run holds.

    Raises:
        UserError: one cannot be read or written.
    """
    for name in names:
        if (target / name).exists() or not (source / name).is_file():
            continue
        try:
            target.mkdir(exist_ok=True)
            with (
                open_regular(source / name, limit=LARGEST, links=links) as stream,
                (target / name).open("xb") as file,
            ):
                shutil.copyfileobj(stream, file)
        except (OSError, Refused) as error:
            raise UserError(f"{source / name}: not copied ({why(error)}); restore it") from None

"""Flags for watching a run; they change no number of it, so config.json does not have them."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import Config
from lockstep.data import corpus
from lockstep.errors import UserError, require, require_range
from lockstep.flags import add_optional
from lockstep.train import track

FLAGS = ("norms", "eval_data", "track")
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


@dataclass(frozen=True, kw_only=True)
class Watching:
    norms: int = 0  # steps between two rows of the gradient's norms by module; 0: none
    files: Mapping[str, str] = field(default_factory=dict)  # evaluation sets, as --data names them
    track: tuple[str, ...] = ()  # trackers
    sets: Mapping[str, Any] = field(default_factory=dict)  # their tokens, once they are loaded

    def load(self, config: Config, *, resume: bool) -> "Watching":
        """Load the evaluation sets, tokenized as --data is.

        A run goes on without its tokenizer's folder.

        Raises:
            UserError: one cannot be read, or does not fit the model.
        """
        sets = {}
        for name, file in self.files.items():
            try:
                data = corpus.load(file, config.data.tokenizer, config.data.rows)
                corpus.require_tokenizer(file, "" if resume else config.data.tokenizer)
                corpus.check(data, config.model.vocab, config.model.context)
            except UserError as error:  # it is about a file, and names the flag of the other
                line = str(error).replace(f"--data {file}", f"--eval-data {name}={file}", 1)
                raise UserError(line) from None
            sets[name] = data.val
        return dataclasses.replace(self, sets=sets)


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group("watching, of which config.json holds nothing")
    about = "log the gradient's norm by module every N steps (default: 0, never)"
    add_optional(group, "--norms", "N", about, int)
    about = "evaluate on the held-out part of this too, and log its loss as val_loss.NAME; may be "
    about += "repeated (default: none)"
    add_optional(group, "--eval-data", "NAME=FILE", about, action="append")
    about = "give the log's numbers to this tracker too; may be repeated (default: none)"
    add_optional(group, "--track", "|".join(track.TOOLS), about, action="append")


def take(given: dict[str, Any]) -> Watching:
    """Takes the flags out of `given`.

    Raises:
        UserError: a value is none that can be.
    """
    norms, sets, trackers = (given.pop(name, None) for name in FLAGS)
    require_range("--norms", norms or 0, 0)
    files: dict[str, str] = {}
    for text in sets or []:
        name, _, file = text.partition("=")
        known = bool(NAME.fullmatch(name) and file)
        require(known, "--eval-data", text, "write NAME=FILE, NAME of letters, digits, _ and -")
        require(name not in files, "--eval-data", text, f"there is a set {name} already; rename it")
        files[name] = file
    names = tuple(dict.fromkeys(trackers or []))
    for name in names:
        track.require_installed(name)
    return Watching(norms=norms or 0, files=files, track=names)

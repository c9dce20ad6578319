"""Text -> tokens: its bytes, or by a tokenizer.json, which the package `tokenizers` reads."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data import chat
from lockstep.errors import UserError
from lockstep.extras import import_package, require_package
from lockstep.files.untrusted import Refused, open_regular, read_json

LARGEST = 1 << 28  # bytes of a tokenizer.json


class Encoded(NamedTuple):
    """The tokens of a text.

    Args:
        tokens: uint32 (n,).
        starts: (n,), where each begins in the text, in characters.
        stops: (n,), where each ends.
    """

    tokens: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Bytes:
    """UTF-8. A document ends with byte 0, which text has no use for.

    Args:
        vocab: the largest token + 1.
        end: the tokens that end a document.
    """

    vocab = 256
    end = [0]  # noqa: RUF012
    render = staticmethod(chat.render_chatml)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts; raise ValueError if one cannot be encoded."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Encoded:
        tokens = np.frombuffer(text.encode(), np.uint8)
        begins = (tokens & 0xC0) != 0x80  # the other bytes of a character go on with it
        places = np.cumsum(begins) - 1
        return Encoded(tokens.astype(np.uint32), places, places + 1)

    def decode(self, tokens: np.ndarray) -> str:
        return bytes(tokens.astype(np.uint8)).decode("utf-8", "replace")


class FromFile:
    """A tokenizer from a folder's tokenizer.json; its fields are those of `Bytes`.

    The folder's tokenizer_config.json names the end of a document and the chat template.
    """

    def __init__(self, folder: Path, *, links: bool = True) -> None:
        """Read the folder.

        Args:
            links: whether files may be symbolic links: what the user named, not what a run holds.

        Raises:
            UserError: a file cannot be read, or a package is missing.
        """
        tokenizers = import_package("--tokenizer", "tokenizers", "data")
        try:
            with open_regular(folder / "tokenizer.json", limit=LARGEST, links=links) as file:
                content = file.read()
            config, about = folder / "tokenizer_config.json", dict[str, Any]()
            if config.exists():
                about = read_json(config, limit=LARGEST, links=links, finite=False)
            template = chat.read_template(folder, about, links)
            special = dict(_special_tokens(about))
            self.inner = _ask(tokenizers.Tokenizer.from_str, content.decode())
            _ask(self.inner.no_truncation)
            _ask(self.inner.no_padding)
            ids = _ask(self.inner.get_vocab, with_added_tokens=True).values()
            self.vocab = max(ids, default=-1) + 1
            number = _ask(self.inner.token_to_id, special.get("eos_token", ""))
        except OSError as error:
            raise _problem(folder, f"cannot be read ({error.strerror})") from None
        except Refused as why:
            raise _problem(folder, f"is {why}") from None
        except ValueError as why:
            raise _problem(folder, f"is none: {str(why)[:200]}") from None
        self.end = [] if number is None else [number]
        self.render: chat.Render = chat.render_chatml
        if template:
            require_package("--tokenizer", "jinja2", "data")
            self.render = chat.compile_template(template, special)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        encoded = _ask(self.inner.encode_batch, list(texts), add_special_tokens=False)
        found = []
        for each in encoded:
            offsets = np.array(each.offsets, np.int64).reshape(-1, 2)
            found.append(Encoded(np.array(each.ids, np.uint32), offsets[:, 0], offsets[:, 1]))
        return found

    def decode(self, tokens: np.ndarray) -> str:
        try:
            return _ask(self.inner.decode, tokens.tolist(), skip_special_tokens=False)
        except ValueError as why:
            raise UserError(f"tokenizer.json: cannot decode ({why}); use that of the run") from None


def _ask(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a function of `tokenizers`, which raises plain Exceptions and panics on odd files.

    Raises:
        ValueError: whatever it raised.
    """
    try:
        return function(*args, **named)
    except BaseException as why:
        if isinstance(why, Exception) or type(why).__name__ == "PanicException":
            raise ValueError(str(why)) from None
        raise


Tokenizer = Bytes | FromFile


def load(folder: str) -> Tokenizer:
    """Load a folder's tokenizer; bytes where none is named.

    Raises:
        UserError: there is no tokenizer.json in it that can be read.
    """
    return FromFile(Path(folder)) if folder else Bytes()


def _special_tokens(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Find eos_token and its like: a text, or an object that has it."""
    for name, value in sorted(about.items()):
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            yield name, text


def _problem(folder: Path, why: str) -> UserError:
    remedy = "name a folder with a tokenizer.json"
    return UserError(f"--tokenizer {folder}: tokenizer.json {why}; {remedy}")

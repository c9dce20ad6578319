"""`lockstep sample`: write text with a run's checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import twin
from lockstep.config import Config
from lockstep.config.kinds import CHOICES
from lockstep.data import decoding, tokenizer
from lockstep.errors import UserError, require, require_range
from lockstep.exits import DONE
from lockstep.flags import add_command, add_number, add_optional, add_text
from lockstep.run import directory
from lockstep.train import sampling, trainer
from lockstep.weights import about


def add(commands: Any) -> None:
    """Add the subcommand."""
    sub = add_command(commands, "sample", _sample, "Writes text with a run's checkpoint.")
    sub.add_argument("run", metavar="RUN", help="the run's directory")
    add_optional(sub, "--prompt", "TEXT", "text to continue (default: 'def ')", default="def ")
    add_number(sub, "--length", 300, "tokens to write, bytes without a tokenizer")
    add_number(sub, "--temperature", 0.8, "0 takes the likeliest token each time")
    add_number(sub, "--top-k", 40, "choose among the N likeliest; 0 among all")
    add_number(sub, "--seed", 0, "seed of the choices")
    add_optional(sub, "--step", "N", "the checkpoint of this step (default: the newest)", int)
    about = "which twin computes (default: the run's own)"
    add_text(sub, "--framework", "|".join(twin.MODULES), about)
    add_text(sub, "--device", "|".join(CHOICES), "where to run", "auto")


def _sample(given: argparse.Namespace) -> int:
    run = Path(given.run)
    record = directory.read_record(run)
    config, framework = record.config, given.framework or record.framework
    require(len(given.prompt) > 0, "--prompt", "''", "is empty; give at least one character")
    require_range("--length", given.length, 1)
    require_range("--temperature", given.temperature, 0)
    require_range("--top-k", given.top_k, 0)
    require_range("--seed", given.seed, 0, 2**63 - 1)
    words = _tokenizer(config, run)
    try:
        prompt = words.encode([given.prompt])[0].tokens.tolist()
    except ValueError:
        require(False, "--prompt", repr(given.prompt), "is no valid Unicode; use other characters")
    vocab = min(words.vocab, config.model.vocab)
    require(len(prompt) > 0, "--prompt", repr(given.prompt), "is no token; use other characters")
    remedy = f"has tokens beyond the run's --vocab {config.model.vocab}; use other characters"
    require(max(prompt) < vocab, "--prompt", repr(given.prompt), remedy)
    config = config.replace(device=given.device, mesh="data=1")
    notices: list[str] = []
    state = trainer.restore(config, run, notices.append, step=given.step)
    for notice in notices:
        print(notice, file=sys.stderr)
    chosen = twin.load(framework, config)
    chosen.load(state)
    written = sampling.sample(
        chosen, prompt, length=given.length, context=config.model.context, vocab=vocab,
        end=words.end if isinstance(words, tokenizer.FromFile) else (),
        temperature=given.temperature, top_k=given.top_k, seed=given.seed,
    )  # fmt: skip
    text = words.decode(np.array([*prompt, *written], np.uint32))
    print(sampling.to_terminal(text))
    return DONE


def _tokenizer(config: Config, run: Path) -> tokenizer.Tokenizer:
    """Load the tokenizer of the run's tokens, or raise UserError if it is not known."""
    words = decoding.of_run(config.data, run / about.FOLDER)
    if words is None:
        remedy = "restore that, or name a run on text or with --tokenizer"
        data = config.data.data
        raise UserError(f"RUN {run}: nothing says how tokens of --data {data} decode; {remedy}")
    return words

"""`lockstep sample`: text from a run's checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import Any

from lockstep import twin
from lockstep.data import records
from lockstep.errors import require, require_range
from lockstep.exits import DONE
from lockstep.flags import add_number, reader
from lockstep.run import directory
from lockstep.train import sampling, trainer


def add(commands: Any) -> None:
    """The subcommand."""
    sub = commands.add_parser("sample", description="Writes text with a run's checkpoint.")
    sub.add_argument("run", metavar="RUN", help="the run's directory")
    sub.add_argument("--prompt", default="def ", metavar="TEXT",
                     help="text to continue (default: 'def ')")  # fmt: skip
    add_number(sub, "--length", 300, "bytes to write")
    add_number(sub, "--temperature", 0.8, "0 takes the likeliest byte each time")
    add_number(sub, "--top-k", 40, "choose among the N likeliest; 0 among all")
    add_number(sub, "--seed", 0, "seed of the choices")
    sub.add_argument("--step", type=reader(int), metavar="N",
                     help="that of this step (default: the newest)")  # fmt: skip
    sub.add_argument("--framework", metavar="|".join(twin.MODULES),
                     help="which twin computes (default: the run's own)")  # fmt: skip
    sub.add_argument("--device", default="auto", metavar="auto|cpu|cuda",
                     help="where to run (default: auto)")  # fmt: skip
    sub.set_defaults(command=_sample)


def _sample(given: argparse.Namespace) -> int:
    run = Path(given.run)
    record = directory.read_record(run)
    config, framework = record.config, given.framework or record.framework
    prompt = given.prompt.encode("utf-8", "surrogateescape")
    require(len(prompt) > 0, "--prompt", "''", "is empty; give at least one character")
    require_range("--length", given.length, 1)
    require_range("--temperature", given.temperature, 0)
    require_range("--top-k", given.top_k, 0)
    require_range("--seed", given.seed, 0, 2**63 - 1)
    texts = (*records.KINDS, "stdlib")
    bytewise = config.data.data.lower().endswith(texts) and not config.data.tokenizer
    remedy = "was trained on token files, which this cannot decode; name a run on text"
    require(bytewise, "RUN", given.run, remedy)
    fits = max(prompt) < config.model.vocab
    remedy = f"has bytes beyond the run's --vocab {config.model.vocab}; use other characters"
    require(fits, "--prompt", repr(given.prompt), remedy)
    config = config.replace(device=given.device, mesh="data=1")
    notices: list[str] = []
    state = trainer.restore(config, run, notices.append, step=given.step)
    for notice in notices:
        print(notice, file=sys.stderr)
    chosen = twin.load(framework, config)
    chosen.load(state)
    text = sampling.sample(
        chosen, prompt, length=given.length, context=config.model.context,
        temperature=given.temperature, top_k=given.top_k, seed=given.seed,
    )  # fmt: skip
    print(sampling.to_terminal(prompt + text))
    return DONE

"""`lockstep report`: runs side by side, as one HTML file."""

import argparse
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.exits import DONE
from lockstep.extras import require_package
from lockstep.files import durable
from lockstep.flags import add_command, add_text
from lockstep.monitor import gaps, history
from lockstep.monitor.page import page
from lockstep.run import directory


def add(commands: Any) -> None:
    """Adds the subcommand."""
    sub = add_command(
        commands, "report", _report,
        "Writes one self-contained HTML file: curves, gaps, loss scale, throughput,\n"
        "memory, differences of the configurations, samples.",
        "lockstep report runs/jax-tiny-bf16 runs/torch-tiny-bf16",
    )  # fmt: skip
    about = "a run's directory, or what `lockstep curves` wrote, for its noise envelope"
    sub.add_argument("runs", metavar="RUN", nargs="+", help=about)
    add_text(sub, "--out", "FILE", "what to write", "report.html")


def _report(given: argparse.Namespace) -> int:
    out = Path(given.out)
    directory.require_writable_file(out)
    require_package("lockstep report", "matplotlib", "plot")
    paths = list(map(Path, dict.fromkeys(given.runs)))
    measured = [path for path in paths if (path / gaps.FILE).exists()]
    envelopes = [gaps.read(path) for path in measured]
    histories = [history.read(path) for path in paths if path not in measured]
    if not histories:
        raise UserError(f"RUN {measured[0]}: no run, but curves of two; name runs beside it")
    text = page(histories, gaps.of_runs(histories, envelopes))
    with durable.writing(f"--out {out}"):
        durable.replace(out, text)
    print(f"written: {out}, runs: {len(histories)}")
    return DONE

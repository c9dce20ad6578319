"""`python -m benchmarks.claims`: each claim beside its measured figure, from the results' JSONs."""

import sys
from pathlib import Path

from benchmarks.claims.claim import markdown
from benchmarks.claims.listed import CLAIMS
from benchmarks.claims.results import Results
from benchmarks.process import shown
from lockstep.cli.flags import Parser
from lockstep.errors import UserError, require


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    usual = Results()
    parser = Parser(prog="python -m benchmarks.claims", description=__doc__)
    parser.add_argument("--suite", metavar="DIR", type=Path, default=usual.suite,
                        help=f"results of a suite (default: {shown(usual.suite)})")  # fmt: skip
    parser.add_argument("--experiments", metavar="DIR", type=Path, default=usual.experiments,
                        help=f"experiments' (default: {shown(usual.experiments)})")  # fmt: skip
    try:
        given = parser.parse_args(argv)
        for name in ("suite", "experiments"):
            folder = getattr(given, name)
            require(folder.is_dir(), f"--{name}", folder, "no such folder; name one with results")
        print(markdown(CLAIMS, Results(given.suite, given.experiments)))
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

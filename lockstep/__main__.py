"""`python -m lockstep`: the `lockstep` command, from a bare checkout."""

import sys

from lockstep.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())

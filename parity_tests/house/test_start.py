"""Commands import little before their work: modules are checked, not seconds."""

import subprocess
import sys

from lockstep.process import ROOT

HELP = """
from lockstep.cli.commands import main
try:
    main(["--help"])
except SystemExit:
    pass
"""


def modules_after(code: str) -> set[str]:
    """Lists the modules that a fresh process has after code, without those that it began with."""
    code = f"import sys\nbefore = {{*sys.modules}}\n{code}\nprint(*{{*sys.modules}} - before)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def beyond_python(modules: set[str]) -> set[str]:
    """The rooms of ours and the packages of others."""
    others = {name for name in modules if name.split(".")[0] not in sys.stdlib_module_names}
    return {".".join(name.split(".")[:2]) for name in others} - {"lockstep"}


def test_a_list_of_the_commands_needs_none_of_them() -> None:
    assert beyond_python(modules_after(HELP)) == {
        f"lockstep.{name}" for name in ("cli", "config", "errors", "exits", "flags", "formats")
    }

"""Chat templates, in a process of their own: a template is a program out of a file that nobody
vouches for, and could ask for any time and memory.

    python -m lockstep.data.template SECONDS      a line of JSON in, a line of JSON out
"""

import atexit
import json
import math
import resource
import subprocess
import sys
import time
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from lockstep.errors import UserError
from lockstep.process import ask, start_module

SECONDS = 10  # of CPU time, for one text
MEMORY = 2 << 30  # bytes

_process: subprocess.Popen[str] | None = None


def render_template(template: str, given: dict[str, Any]) -> tuple[str, str]:
    """The text, and the problem if there is none.

    Raises:
        UserError: it takes too long, or too much memory.
    """
    line = ask(_start(), json.dumps([template, given]))
    if not line:
        close()
        problem = f"takes more than {SECONDS} seconds or {MEMORY >> 30} GiB for one chat"
        raise UserError(f"the chat template {problem}; mend it, or name another --tokenizer")
    text, problem = json.loads(line)
    return text, problem


def _start() -> subprocess.Popen[str]:
    global _process
    if _process is None:
        _process = start_module(
            "lockstep.data.template", str(SECONDS), text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return _process


@atexit.register
def close() -> None:
    """Ends the process; the next text starts another."""
    global _process
    if _process:
        with _process, suppress(BrokenPipeError):  # its pipes are closed, and it is waited for
            _process.kill()
        _process = None


def main(seconds: str) -> None:
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY)
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + int(seconds))
        template, given = json.loads(line)
        try:
            answer = _compile(template).render(given), ""
        except MemoryError:
            return
        except Exception as why:  # whatever the template does
            answer = "", str(why) or type(why).__name__
        print(json.dumps(answer), flush=True)


def _limit(what: int, most: int) -> None:
    with suppress(ValueError):  # a system that has no such limit, or a lower one
        resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


@lru_cache(10)
def _compile(template: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise ValueError(message)

    extensions = ["jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's is for HTML
    made.globals["raise_exception"] = refuse
    return made.from_string(template)


if __name__ == "__main__":
    main(*sys.argv[1:])

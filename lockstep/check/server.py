"""`lockstep mcp`: check, record and explain as tools of the Model Context Protocol.

Each call runs the command of its name in a process of its own, whose progress is the call's.
"""

import difflib
import json
import subprocess
import sys
from typing import Any

import anyio
from anyio.streams.text import TextReceiveStream
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from lockstep import __version__
from lockstep.check.causes.catalogue import CATALOGUE

SERVER = MCPServer(
    "lockstep",
    version=__version__,
    instructions="Says if a port between PyTorch and JAX computes what its reference does, and if "
    "not, where and why. check: mend the roots from the top and call it again. Paths are relative "
    "to the folder in which the server was started.",
)


@SERVER.tool()
async def check(
    reference: str, port: str, ctx: Context, options: list[str] | None = None
) -> dict[str, Any]:
    """Compares a reference and its port, each a .py file with build(seed), loss(model, batch) and,
    on one side, batch(step).

    Args:
        reference: the reference's file, or a trace that `record` wrote.
        port: the port's file.
        options: flags of `lockstep check`, such as ["--steps", "5", "--accept", "h.0.ln=1e-6"];
            ["--help"] is answered by all of them.

    Returns:
        The report: `verdict`, and in `roots` each place with its `lines`, its `cause`, the cause's
        stable name `entry`, and what to `try`.
    """
    return json.loads(await _run(ctx, "check", reference, port, *(options or ()), "--json", "-"))


@SERVER.tool()
async def record(program: str, ctx: Context, options: list[str] | None = None) -> str:
    """Runs a reference and writes what it computes to a folder, which `check` takes in its place.

    Args:
        program: the reference's .py file.
        options: flags of `lockstep record`, such as ["-o", "ref.trace"]; ["--help"] is answered by
            all of them.

    Returns:
        The folder, and what was recorded.
    """
    return (await _run(ctx, "record", program, *(options or ()))).strip()


@SERVER.tool()
def explain(cause: str) -> dict[str, str]:
    """Says what a cause is and what mends it.

    Args:
        cause: its stable name, a root's `entry` in the report of `check`.
    """
    if cause not in CATALOGUE:
        close = difflib.get_close_matches(cause, CATALOGUE, n=1, cutoff=0)
        raise ToolError(f"cause {cause!r}: unknown; did you mean {close[0]!r}?")
    return {"cause": cause, **CATALOGUE[cause]._asdict()}


async def _run(ctx: Context, *words: str) -> str:
    """Returns what a command prints.

    Raises:
        ToolError: it prints nothing; with what it says of its progress and of the mistake.
    """
    said: list[str] = []
    command = [sys.executable, "-m", "lockstep", *words]
    async with (
        await anyio.open_process(command, stdin=subprocess.DEVNULL) as process,
        anyio.create_task_group() as tasks,
    ):
        assert process.stdout and process.stderr
        tasks.start_soon(_tell, ctx, TextReceiveStream(process.stderr), said)
        printed = "".join([text async for text in TextReceiveStream(process.stdout)])
    if "--help" in words or not printed:
        raise ToolError(printed or "".join(said).strip())
    return printed


async def _tell(ctx: Context, stream: TextReceiveStream, said: list[str]) -> None:
    """Sends what a command says as the progress of its call."""
    async for text in stream:
        said.append(text)
        await ctx.report_progress(len(said), message=text.strip())

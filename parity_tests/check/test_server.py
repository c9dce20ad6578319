"""`lockstep mcp`: its tools, asked by the SDK's client through a server's own process."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from lockstep.check.causes.catalogue import CATALOGUE
from lockstep.cli import commands
from lockstep.exits import FAILED, MISTAKE
from lockstep.process import ROOT
from parity_tests.check.small_program import small

HARD = "def build(seed):\n    torch.manual_seed(seed)\n    return nn.Sequential(" \
       "nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))"  # fmt: skip
STEPS = ["--steps", "3"]


def ask(folder: Path, talk: Callable[[Client], Any]) -> Any:
    """Returns what a client has from a server that is started in a folder."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "lockstep", "mcp"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    async def run() -> Any:
        async with Client(stdio_client(server)) as client:
            return await talk(client)

    return anyio.run(run)


def test_without_the_sdk_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert commands.main(["mcp"]) == MISTAKE
    assert "lockstep mcp: needs the package mcp; pip install" in capsys.readouterr().err


def test_an_agent_checks_mends_and_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON is that of the command, and a mistake is an answer with the command's words."""
    small(tmp_path, "ref.py")
    small(tmp_path, "port.py", new=HARD)
    told: list[str] = []

    async def tell(progress: float, total: float | None, message: str | None) -> None:
        told.append(message or "")

    async def talk(client: Client) -> dict[str, Any]:
        call = client.call_tool
        return {
            "tools": [tool.name for tool in (await client.list_tools()).tools],
            "trace": await call("record", {"program": "ref.py", "options": STEPS}),
            "check": await call("check", {"reference": "ref.trace", "port": "port.py"},
                                progress_callback=tell),
            "accepted": await call("check", {"reference": "ref.trace", "port": "port.py",
                                             "options": ["--accept", "1=activation"]}),
            "mistake": await call("check", {"reference": "ref.py", "port": "none.py"}),
            "explain": await call("explain", {"cause": "activation"}),
            "unknown": await call("explain", {"cause": "activations"}),
        }  # fmt: skip

    found = ask(tmp_path, talk)
    said = {name: x.content[0].text for name, x in found.items() if name != "tools"}
    assert found["tools"] == ["check", "record", "explain"]
    assert said["trace"] == "ref.trace: ref.py, torch on cpu"
    report = found["check"].structured_content
    assert report["roots"][0]["entry"] == "activation" and told
    assert found["accepted"].structured_content["verdict"] == "equal"
    assert found["explain"].structured_content == {
        "cause": "activation", **CATALOGUE["activation"]._asdict()}  # fmt: skip
    assert found["unknown"].is_error and "did you mean 'activation'?" in said["unknown"]

    monkeypatch.chdir(tmp_path)
    assert commands.main(["check", "ref.trace", "port.py", "--json", "-"]) == FAILED
    assert json.loads(capsys.readouterr().out) == report
    assert commands.main(["check", "ref.py", "none.py"]) == MISTAKE
    assert found["mistake"].is_error
    assert capsys.readouterr().err.strip() in said["mistake"]

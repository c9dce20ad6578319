"""One process for all exports of a pytest worker: to begin one takes longer than to export.

The fixture is `kept_exporter`; `export_by` is what its process answers.
"""

import atexit
import importlib
from functools import partial
from typing import Any

import pytest

from lockstep import worker
from lockstep.weights import forward

EXPORTS = worker.Worker("", partial(worker.start_service, __name__), worker.silent)
atexit.register(EXPORTS.close)


class Exporter:
    """In place of the exporter's own `Worker`."""

    def __init__(self, _: str, connect: Any, __: Any) -> None:
        (self.service,) = connect.args

    def ask(self, question: str, **given: Any) -> None:
        EXPORTS.ask("export_by", service=self.service, asked=question, given=given)

    def close(self) -> None: ...


@pytest.fixture
def kept_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "Worker", Exporter)


def export_by(service: str, asked: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(service), asked)(**given)

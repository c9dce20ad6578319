"""A chat template that asks for all time or memory is one line, and the next one is rendered."""

from collections.abc import Iterator

import pytest

from lockstep.data import template
from lockstep.data.chat import by_template
from lockstep.errors import UserError
from parity_tests.tiers import tier


@pytest.fixture(autouse=True)
def _of_a_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(template, "SECONDS", 1)
    template.close()  # the process knows how long it may
    yield
    template.close()


@tier("rest", guard="limits on what is read, by each reader")
@pytest.mark.parametrize(
    "body",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set x = namespace(s='ab') %}"
        "{% for i in range(50) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
    ],
    ids=["a loop", "one operation", "memory"],
)
def test_a_template_without_an_end_is_one_line(
    body: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 600 if "memory" in request.node.name else 1  # each limit alone
    monkeypatch.setattr(template, "SECONDS", seconds)
    with pytest.raises(UserError, match=f"takes more than {seconds} seconds or 2 GiB for one chat"):
        by_template(body, {}, [], True)
    assert by_template("{{ bos_token }}!", {"bos_token": "<s>"}, [], True) == "<s>!"

"""The page in a real browser: both colour schemes, no request, no complaint, by keyboard."""

import re
from pathlib import Path

import pytest

from lockstep.check import page
from lockstep.check.trace import Trace
from parity_tests.browser import Browser
from parity_tests.browser import tab as tab
from parity_tests.check.inside import check_inside
from parity_tests.check.mutants import BY_NAME, changed


@pytest.fixture(scope="module")
def file(jax_reference: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    mutant = BY_NAME["gelu-erf"]
    result = check_inside(jax_reference, changed(mutant, folder))
    path = folder / "page.html"
    path.write_text(page.page(result, "lockstep check a.py b.py"))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_and_asks_for_nothing(scheme: str, tab: Browser, file: Path) -> None:
    tab.require_readable(file, scheme)
    assert tab.evaluate("document.querySelectorAll('circle').length") > 10


def test_it_is_used_by_keyboard(tab: Browser, file: Path) -> None:
    tab.open(file)
    is_open = "[...document.querySelectorAll('details')].map(d => d.open)"
    assert tab.evaluate(is_open) == [False, True, False]
    for _ in range(4):
        tab.press("Tab", 9)
    assert tab.evaluate("document.activeElement.innerText").startswith("Mapping")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter", 13, "\r")
    assert tab.evaluate(is_open) == [False, True, True]


def test_what_is_put_into_it_neither_runs_nor_loads(tab: Browser, file: Path) -> None:
    tab.require_inert(file)


def test_grey_on_white_is_seen(tab: Browser, file: Path) -> None:
    grey = file.with_name("grey.html")
    grey.write_text(re.sub("<meta http-equiv.*?>", "", file.read_text()).replace("#1b1b1b", "#bbb"))
    with pytest.raises(AssertionError):
        tab.require_readable(grey, "light")

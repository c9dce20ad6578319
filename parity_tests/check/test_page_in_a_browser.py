"""The page in a real browser: both colour schemes, no request, no complaint, by keyboard."""

import re
from pathlib import Path

import pytest

from lockstep.check import page
from lockstep.check.check import Result
from parity_tests.browser import Browser
from parity_tests.browser import tab as tab


def test_the_page(tab: Browser, gelu: Result, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page.page(gelu, "lockstep check a.py b.py"))
    for scheme in ("light", "dark"):
        tab.require_readable(file, scheme)
    is_open = "[...document.querySelectorAll('details')].map(d => d.open)"
    assert tab.evaluate(is_open) == [True, False]
    tab.open(file)
    for _ in range(3):
        tab.press("Tab", 9)
    assert tab.evaluate("document.activeElement.innerText").startswith("Mapping")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter", 13, "\r")
    assert tab.evaluate(is_open) == [True, True]
    tab.require_inert(file)
    grey = re.sub("<meta http-equiv.*?>", "", file.read_text()).replace("#1b1b1b", "#bbb")
    file.write_text(grey)
    with pytest.raises(AssertionError):
        tab.require_readable(file, "light")

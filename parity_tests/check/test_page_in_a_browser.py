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


def test_the_page(tab: Browser, jax_reference: Trace, tmp_path: Path) -> None:
    result = check_inside(jax_reference, changed(BY_NAME["gelu-erf"], tmp_path))
    file = tmp_path / "page.html"
    file.write_text(page.page(result, "lockstep check a.py b.py"))
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

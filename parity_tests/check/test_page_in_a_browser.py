"""The page in a real browser: both colour schemes, no request, no complaint, by keyboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.check import page
from lockstep.check.trace import Trace
from parity_tests.check import browser
from parity_tests.check.browser import Browser
from parity_tests.check.inside import check_inside
from parity_tests.check.mutants import BY_NAME, changed

# The least contrast of a text to what is behind it; that of WCAG's level AA is 4.5.
CONTRAST = """
(() => {
  const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = rgb => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1])
    + 0.0722 * channel(rgb[2]);
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const rgba = numbers(getComputedStyle(e).backgroundColor);
      if (rgba.length < 4 || rgba[3] > 0) return luminance(rgba);
    }
    return 1;
  };
  let least = 99;
  for (const e of document.body.querySelectorAll('*')) {
    if (![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())) continue;
    const style = getComputedStyle(e), inside = e.namespaceURI.endsWith('svg');
    const [a, b] = [luminance(numbers(inside ? style.fill : style.color)), behind(e)];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return least;
})()
"""
SPOILT = "<img src='http://127.0.0.1:9/x.png'><script>console.error('seen')</script>"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not browser.find():
        pytest.skip(f"none of {', '.join(browser.NAMES)} is installed")
    with browser.running(tmp_path_factory.mktemp("profile")) as running:
        yield running


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
    tab.open(file, scheme)
    assert (tab.requests, tab.complaints) == ([file.as_uri()], [])
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is (scheme == "light")
    assert tab.evaluate(CONTRAST) >= 4.5
    assert tab.evaluate("document.querySelectorAll('circle').length") > 10
    narrow = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    tab.ask("Emulation.setDeviceMetricsOverride", **narrow)
    try:
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    finally:
        tab.ask("Emulation.clearDeviceMetricsOverride")


def test_it_is_used_by_keyboard(tab: Browser, file: Path) -> None:
    tab.open(file)
    is_open = "[...document.querySelectorAll('details')].map(d => d.open)"
    assert tab.evaluate(is_open) == [True, False]
    for _ in range(2):
        tab.press("Tab", 9)
    assert tab.evaluate("document.activeElement.innerText").startswith("Mapping")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter", 13, "\r")
    assert tab.evaluate(is_open) == [True, True]


def test_what_is_put_into_it_neither_runs_nor_loads(tab: Browser, file: Path) -> None:
    """The policy stops it; without the policy the browser tells what this suite looks for."""
    text = file.read_text()
    path = file.with_name("spoilt.html")
    path.write_text(text.replace("</main>", SPOILT + "</main>"))
    tab.open(path)
    assert not any("seen" in each for each in tab.complaints if "Content Security" not in each)
    assert len(tab.complaints) == 2 and all("Content Security" in each for each in tab.complaints)
    path.write_text(text.replace(page.POLICY, "").replace("</main>", SPOILT + "</main>"))
    tab.open(path)
    assert "http://127.0.0.1:9/x.png" in tab.requests
    assert any("seen" in each for each in tab.complaints)
    grey = text.replace("--text: #1b1b1b", "--text: #bbb").replace(page.POLICY, "")
    path.write_text(grey)
    tab.open(path)
    assert tab.evaluate(CONTRAST) < 4.5

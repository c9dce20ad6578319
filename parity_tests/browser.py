"""A real browser without a window, driven through a pipe: its DevTools protocol."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
         "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"]  # fmt: skip
# What the browser may say of a page, and what a page may ask for.
COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")

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


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `complaints` and `requests` are of the page that was opened last."""

    def __init__(self, to: int, back: int) -> None:
        self.to, self.back, self.session = to, os.fdopen(back, "rb"), ""
        self.number, self.complaints, self.requests = 0, list[str](), list[str]()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        asked: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            asked["sessionId"] = self.session
        os.write(self.to, json.dumps(asked).encode() + b"\0")
        while (answer := self._receive()).get("id") != self.number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self.back.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message = json.loads(text)
        method = message.get("method")
        if method in COMPLAINTS:
            self.complaints.append(json.dumps(message["params"]))
        elif method == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            self.requests += [] if url.startswith("data:") else [url]
        return message

    def open(self, path: Path, scheme: str = "light") -> None:
        self.complaints, self.requests = [], []
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        self.ask("Page.navigate", url=path.as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        result = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def require_readable(self, path: Path, scheme: str) -> None:
        """Asks for nothing, has no complaint, is in the scheme, has contrast, fits a phone."""
        self.open(path, scheme)
        assert (self.requests, self.complaints) == ([path.as_uri()], [])
        background = self.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") is (scheme == "light")
        assert self.evaluate(CONTRAST) >= 4.5
        narrow = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
        self.ask("Emulation.setDeviceMetricsOverride", **narrow)
        try:
            assert self.evaluate("document.documentElement.scrollWidth") <= 360
        finally:
            self.ask("Emulation.clearDeviceMetricsOverride")

    def require_names(self) -> set[str]:
        """Requires that a screen reader is told names or heads of pictures, tables, controls.

        Returns the roles that it is told of.
        """
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        told = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]
        named = {"image", "img", "heading", "radio", "button", "columnheader", "DisclosureTriangle"}
        assert [role for role, name in told if role in named and not name.strip()] == []
        return {role for role, _ in told}

    def require_inert(self, path: Path) -> None:
        """Requires that what is put into a page neither runs nor loads.

        The policy stops it; without the policy the browser tells what is looked for here.
        """
        text = path.read_text()
        spoilt = path.with_name("spoilt.html")
        spoilt.write_text(text.replace("</main>", SPOILT + "</main>"))
        self.open(spoilt)
        refused = ["Content Security" in each for each in self.complaints]
        assert refused == [True, True], self.complaints
        spoilt.write_text(re.sub("<meta http-equiv.*?>", "", text).replace("</main>", SPOILT))
        self.open(spoilt)
        assert "http://127.0.0.1:9/x.png" in self.requests
        assert any("seen" in each for each in self.complaints)

    def press(self, key: str, code: int, text: str = "") -> None:
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.ask(
            "Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {})
        )
        self.ask("Input.dispatchKeyEvent", type="keyUp", **about)


@contextmanager
def running(folder: Path) -> Iterator[Browser]:
    """Its profile is in the folder; it reads file descriptor 3 and writes 4."""
    (theirs_in, to), (back, theirs_out) = os.pipe(), os.pipe()
    command = [find() or "", *FLAGS, f"--user-data-dir={folder}"]
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command]
    process = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        browser = Browser(to, back)
        yield browser
        with suppress(AssertionError):
            browser.session = ""
            browser.ask("Browser.close")
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        os.close(to)
        browser.back.close()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not find():
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with running(tmp_path_factory.mktemp("profile")) as browser:
        yield browser

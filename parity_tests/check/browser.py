"""A real browser without a window, driven through a pipe: its DevTools protocol."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
         "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"]  # fmt: skip
# What the browser may say of a page, and what a page may ask for.
COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


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
            self.requests.append(message["params"]["request"]["url"])
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

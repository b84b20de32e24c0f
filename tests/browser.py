"""A real browser without a screen, driven over the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE = 60.0  # seconds, of a loaded machine

KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9)}


class Browser:
    """One page of a headless Chromium. A context."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.mkdtemp()
        options = ["--headless=new", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu"]
        options += [f"--user-data-dir={self._folder}", "--disable-dev-shm-usage"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium has none for root
        self._process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._ids = itertools.count(1)
        self._leave = contextlib.ExitStack()
        self._socket = self._leave.enter_context(connect(self._page(), max_size=None))
        self.errors: list[str] = []  # of scripts and of what was refused to them
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._leave.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _page(self) -> str:
        """The address of its page."""
        port = Path(self._folder, "DevToolsActivePort")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            assert self._process.poll() is None, "the browser ended"
            if port.exists() and (number := port.read_text().split("\n")[0]):
                url = f"http://127.0.0.1:{number}/json/list"
                with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                    pages = [t for t in json.load(answer) if t["type"] == "page"]
                if pages:
                    return pages[0]["webSocketDebuggerUrl"]
            time.sleep(0.05)
        raise TimeoutError("the browser did not start")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result. Errors of the page that come meanwhile are noted."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        """What an expression is, as JSON."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := self.value(f"(x => x instanceof Node || x)({script})"):
                return found
            time.sleep(0.05)
        raise TimeoutError(f"{script}: {self.value(script)!r}, {self.errors}, page: {self.text()}")

    def text(self) -> str:
        """What the page shows."""
        return self.value("document.body.innerText")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        text, code = KEYS[key]
        params = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **params)
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def size(self, width: int, height: int) -> None:
        """Of the window, in CSS pixels; narrow ones are phones."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

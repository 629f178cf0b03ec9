"""Chromium without a window, driven by its own protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import websocket

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page of a Chromium of its own.

    Parameters
    ----------
    directory : Path
        For its profile.
    """

    def __init__(self, directory: Path):
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--no-first-run", "--disable-background-networking", "--hide-scrollbars"]
        options += ["--remote-debugging-port=0", f"--user-data-dir={directory}"]
        options += ["--remote-allow-origins=*", "--force-device-scale-factor=1", "about:blank"]
        self._process = subprocess.Popen(
            [CHROMIUM, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._numbers = itertools.count(1)
        #: What the page said to its console, and errors that nobody caught.
        self.said: list[str] = []
        self._loaded = False
        try:
            port = self._port(directory / "DevToolsActivePort")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            self._socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=60)
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _port(self, path: Path) -> str:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            # It is written after it listens, by one write of two lines.
            if path.exists() and "\n" in (text := path.read_text()):
                return text.splitlines()[0]
            assert self._process.poll() is None, "Chromium has ended"
            time.sleep(0.02)
        raise TimeoutError("Chromium does not listen")

    def call(self, method: str, **params):
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = self._received()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _received(self):
        message = json.loads(self._socket.recv())
        method, params = message.get("method"), message.get("params")
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(params["args"]))
        return message

    def run(self, script: str):
        """Return what a script comes to, a promise's result where it is one."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, condition: str):
        """Wait until a condition of the page's holds, and return what it came to."""
        script = (
            "new Promise((done, no) => { const look = () => { const found = (() => "
            f"{condition})(); if (found) done(found); else setTimeout(look, 20); }}; look(); "
            f"setTimeout(() => no(new Error({json.dumps(condition)})), 30000); }})"
        )
        return self.run(script)

    def look(self, width: int, height: int, scheme: str) -> None:
        """Show pages in this size, light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Show a page, and wait until it has shown its figures."""
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._received()
        self.until("document.body && document.body.dataset.ready")

    def screenshot(self, path: Path) -> None:
        """Keep what the whole page looks like."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.terminate()
        self._process.wait()

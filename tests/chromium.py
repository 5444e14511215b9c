"""A browser for tests: headless Chromium over the DevTools protocol, by a pipe, with nothing installed.

The protocol's messages are JSON, each ended by a zero byte, on file descriptors 3 and 4
(``--remote-debugging-pipe``): neither a port nor a WebSocket library is needed.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE_S = 60


def executable() -> str | None:
    """Chromium's path, from the environment variable CHROMIUM or PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One running Chromium with one page.

    Attributes:
        events: every protocol event received, in order.
    """

    def __init__(self, profile: Path):
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()

        def take_descriptors() -> None:
            # Far above 4 and whatever is open first, so that neither copy overwrites the other's source.
            high_source, high_target = (fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in (read_end, write_end))
            os.dup2(high_source, 3)
            os.dup2(high_target, 4)

        command = [executable(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            preexec_fn=take_descriptors,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result.

        Raises:
            AssertionError: the browser refused it, or did not answer in time.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, address: str) -> None:
        """Load a page, and wait until it has loaded."""
        before = len(self.events)
        self.send("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events[before:]):
            self.events.append(self._read())

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str, code: int = 0, text: str = "", modifiers: int = 0) -> None:
        """A key, down and up. ``modifiers``: 8 is shift."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def window(self, width: int, height: int, mobile: bool = False, scale: float = 1) -> None:
        """Size of the page in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )

    def prefer(self, **features: str) -> None:
        """Media features, such as ``prefers_color_scheme="dark"``."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", features=named)

    def screenshot(self, path: str | Path, whole: bool = False) -> None:
        """Save what is shown, or the whole page, as PNG."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Console messages, exceptions, and log entries such as a blocked style."""
        self.run("0")  # so that what was sent before has arrived
        found = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(parameters)[:500])
        return found

    def requests(self) -> list[str]:
        """Addresses that pages asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.send("Browser.close")
        for descriptor in (self._to, self._from):
            os.close(descriptor)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer within {_PATIENCE_S} s"
            piece = os.read(self._from, 1 << 16)
            assert piece, "Chromium has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A fresh browser with an empty profile."""
    with tempfile.TemporaryDirectory(prefix="kvacc-chromium-", ignore_cleanup_errors=True) as profile:
        running = Browser(Path(profile))
        try:
            yield running
        finally:
            running.close()

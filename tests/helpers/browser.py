"""A headless Chromium, driven by ChromeDriver's HTTP interface (W3C WebDriver), without additional packages."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# No network access; for root, Chromium must run without its sandbox.
FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
FLAGS += ("disable-component-update", "disable-sync", "hide-scrollbars", "disable-dev-shm-usage")


def programs() -> tuple[str, str] | None:
    """Chromium and its driver, or None if one of them is missing."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    return found if all(found) else None


class Browser:
    """One window."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _call(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self._url}{path}", content, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:2000]) from error

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's DevTools protocol."""
        return self._call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def set_viewport(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the page in CSS pixels and the preferred colour scheme."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, page: Path) -> None:
        """Load a file."""
        self._call("/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Run a JavaScript function body and return its result."""
        return self._call("/execute/sync", {"script": script, "args": []})

    def messages(self) -> list[dict[str, Any]]:
        """Console messages since the last call."""
        return self._call("/se/log", {"type": "browser"})


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A window, closed with its processes at the end; ``profile`` is an empty folder."""
    chromium, driver = programs()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([driver, f"--port={port}"], **quiet) as process:
        base = Browser(f"http://127.0.0.1:{port}")
        try:
            _wait(base)
            flags = [f"--{flag}" for flag in (*FLAGS, f"user-data-dir={profile}")]
            wanted = {
                "goog:chromeOptions": {"binary": chromium, "args": flags},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            opened = base._call("/session", {"capabilities": {"alwaysMatch": wanted}})
            window = Browser(f"{base._url}/session/{opened['sessionId']}")
            try:
                yield window
            finally:
                window._call("", method="DELETE")
        finally:
            process.terminate()


def _wait(base: Browser, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not _answers(base):
        if time.monotonic() > end:
            raise TimeoutError(f"chromedriver does not answer within {seconds:g} s")
        time.sleep(0.1)


def _answers(base: Browser) -> bool:
    try:
        base._call("/status")
    except OSError:
        return False
    return True

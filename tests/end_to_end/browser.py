"""Open a page in a headless browser (Chromium or Chrome) and take screenshots.

    python tests/end_to_end/browser.py <page.html> <folder> light|dark

The program writes top.png and a screenshot of each section, <id>.png, to the folder. It controls the browser
with the DevTools protocol over two pipes. Each message is JSON followed by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # required for root in a container; the page is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",  # /dev/shm is small in containers
    "--hide-scrollbars",
)
HEIGHT = 1100
TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of a page in the browser."""

    console: list[str]  # lines of the console, including exceptions
    asked: list[str]  # URLs of all requests
    value: Any  # value of the JavaScript expression after the last screenshot


def find() -> str | None:
    """Return the path of the first browser on PATH, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Tab:
    """A tab of a browser: file descriptors of the two pipes, and the events received."""

    requests: int
    answers: int
    session: str | None = None
    calls: int = 0
    unread: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self.calls += 1
        message: dict[str, Any] = {"id": self.calls, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.requests, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.calls:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def wait(self, method: str) -> None:
        """Read messages until an event of this method has arrived."""
        while all(event.get("method") != method for event in self.events):
            self.events.append(self.read())

    def read(self) -> dict[str, Any]:
        """Return the next message of the browser."""
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self.unread:
            left = max(0.0, end - time.monotonic())
            assert select.select([self.answers], [], [], left)[0], (
                f"the browser sent no message for {TIMEOUT_S} s"
            )
            part = os.read(self.answers, 1 << 16)
            assert part, "the browser has ended"
            self.unread += part
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def of(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of the received events of a method."""
        return [event["params"] for event in self.events if event.get("method") == method]


def look(
    browser: str, page: Path, folder: Path, scheme: str, width: int = 1200, expression: str = "null"
) -> Seen:
    """Open `page` in a colour scheme (light or dark), save screenshots to `folder`, return observations."""
    to_browser, requests = os.pipe()
    answers, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # the browser reads messages from file descriptor 3 and writes messages to 4
        shell = f'exec "$@" 3</dev/fd/{to_browser} 4>/dev/fd/{from_browser}'
        process = subprocess.Popen(
            ["sh", "-c", shell, "sh", *command],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            tab = Tab(requests, answers)
            seen = visit(tab, page, folder, scheme, width, expression)
            tab.session = None
            tab.call("Browser.close")
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            os.close(requests)
            os.close(answers)
    return seen


def visit(tab: Tab, page: Path, folder: Path, scheme: str, width: int, expression: str) -> Seen:
    """Open a page in a tab of a running browser; see `look`."""
    target = tab.call("Target.createTarget", url="about:blank")["targetId"]
    tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
        tab.call(f"{domain}.enable")
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    tab.call("Emulation.setDeviceMetricsOverride", **size)
    tab.events.clear()  # drop the events of the empty page
    opened = tab.call("Page.navigate", url=page.resolve().as_uri())
    assert "errorText" not in opened, f"{page}: {opened['errorText']}"
    tab.wait("Page.loadEventFired")
    for name in ["top", *tab.evaluate("[...document.querySelectorAll('section')].map((s) => s.id)")]:
        if name != "top":
            tab.evaluate(f"document.getElementById({name!r}).scrollIntoView()")
        picture = tab.call("Page.captureScreenshot", format="png")["data"]
        (folder / f"{name}.png").write_bytes(base64.b64decode(picture))
    value = tab.evaluate(expression)
    console = [json.dumps(event["args"]) for event in tab.of("Runtime.consoleAPICalled")]
    console += [json.dumps(event["exceptionDetails"]) for event in tab.of("Runtime.exceptionThrown")]
    console += [f"{e['entry']['level']}: {e['entry']['text']}" for e in tab.of("Log.entryAdded")]
    asked = [event["request"]["url"] for event in tab.of("Network.requestWillBeSent")]
    return Seen(console, asked, value)


if __name__ == "__main__":
    found = find()
    assert found is not None, f"no browser on PATH: {', '.join(NAMES)}"
    print(look(found, Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))

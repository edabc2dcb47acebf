"""Look at a page in a real browser engine (Chromium, as QtWebEngine has it), without a display.

    python tests/integration/browser.py <page.html> <folder> light|dark <width> [<expression>]

Writes a picture of each section to the folder, <id>.png and top.png, and prints JSON: the lines of the
console, every address that was asked for, and what the JavaScript expression is at the end. It is a process
of its own, as Qt wants the main thread.
"""

import json
import os
import sys
from pathlib import Path

page_file, folder, scheme, width, expression = [*sys.argv[1:], "null"][:5]
os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = (
    "--no-sandbox --disable-gpu "  # a page of our own, as root in a container too
    f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
)

from PySide6.QtCore import QTimer, QUrl  # noqa: E402
from PySide6.QtWebEngineCore import (  # noqa: E402
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineUrlRequestInterceptor,
)
from PySide6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PySide6.QtWidgets import QApplication  # noqa: E402

SETTLE_MS = 400  # until what was scrolled to is painted
HEIGHT = 1100

addresses: list[str] = []
console: list[str] = []


class Asked(QWebEngineUrlRequestInterceptor):
    """Notes the address of every request."""

    def interceptRequest(self, info) -> None:
        addresses.append(info.requestUrl().toString())


class Page(QWebEnginePage):
    """Notes what the console shows."""

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        console.append(f"{level.name} line {line}: {message}")


app = QApplication(["browser"])
profile, asked = QWebEngineProfile(), Asked()
profile.setUrlRequestInterceptor(asked)
page, view = Page(profile), QWebEngineView()
view.setPage(page)
view.resize(int(width), HEIGHT)


def loaded(fine: bool) -> None:
    assert fine, f"{page_file} could not be opened"
    page.runJavaScript("JSON.stringify([...document.querySelectorAll('section')].map((s) => s.id))", look)


def look(found: str) -> None:
    left = ["top", *json.loads(found)]

    def scroll() -> None:
        if not left:
            page.runJavaScript(f"JSON.stringify({expression})", end)
            return
        name = left.pop(0)
        to = (
            "window.scrollTo(0, 0)"
            if name == "top"
            else f"document.getElementById({name!r}).scrollIntoView()"
        )
        page.runJavaScript(f"{to}; 0", lambda _: QTimer.singleShot(SETTLE_MS, lambda: shoot(name)))

    def shoot(name: str) -> None:
        assert view.grab().save(str(Path(folder) / f"{name}.png"))
        scroll()

    scroll()


def end(value: str) -> None:
    print(json.dumps({"console": console, "asked": addresses, "value": json.loads(value)}), flush=True)
    os._exit(0)  # without the order in which Python would let go of profile and page


page.loadFinished.connect(loaded)
view.load(QUrl.fromLocalFile(str(Path(page_file).resolve())))
view.show()
app.exec()

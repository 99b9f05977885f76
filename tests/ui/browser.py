"""Debian's Chromium over the DevTools protocol: open a page, press keys, move the pointer, evaluate, take pictures."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
_OPTIONS += ("--no-first-run", "--disable-background-networking", "--disable-sync", "--remote-debugging-port=0")
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "ArrowLeft": 37, "End": 35, "ArrowDown": 40}


class Tab:
    """A page; everything that it writes to the console is in `console`."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number = connection, 0
        self.console: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(message["params"]["exceptionDetails"])[:500])
            case "Log.entryAdded":
                self.console.append(f"{message['params']['entry']['text']} {message['params']['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled":
                self.console.append(str(message["params"]["args"]))

    def open(self, url: str) -> None:
        """Go to a URL."""
        self.send("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 60) -> Any:
        """Wait until an expression is true; return its value."""
        ends_at = time.monotonic() + timeout_s
        tried = (
            f"(() => {{ try {{ const found = {expression}; return found instanceof Node || found }} catch {{}} }})()"
        )
        while not (value := self.js(tried)):
            assert time.monotonic() < ends_at, f"{expression} stayed {value}: {self.js('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            given = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=_KEYS.get(key, 0), **given)

    def type(self, text: str) -> None:
        """Type where the focus is."""
        self.send("Input.insertText", text=text)

    def place(self, selector: str) -> dict[str, float]:
        """The box of an element, scrolled into view."""
        box = f"document.querySelector({json.dumps(selector)})"
        found: dict[str, float] = self.js(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f"return {{x: b.left, y: b.top, width: b.width, height: b.height}}; }})({box})"
        )
        return found

    def move(self, selector: str, across: float = 0.5, *, click: bool = False) -> None:
        """Move the pointer over an element, and click."""
        box = self.place(selector)
        at = {"x": box["x"] + across * box["width"], "y": box["y"] + box["height"] / 2}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def show(self, width: int = 1400, height: int = 1000, *, dark: bool = False, still: bool = False) -> None:
        """The size of the window, and what the reader prefers."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A screenshot."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A new browser with one page."""
    command = [str(CHROMIUM), *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening on" in line)
            url = line.rpartition(" ")[2].strip()
            with connect(url, max_size=None) as control:
                control.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
                targets = json.loads(control.recv(timeout=60))["result"]["targetInfos"]
            page = next(each["targetId"] for each in targets if each["type"] == "page")
            with connect(f"{url.partition('/devtools')[0]}/devtools/page/{page}", max_size=None) as connection:
                yield Tab(connection)
        finally:
            process.kill()

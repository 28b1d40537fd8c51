"""The server's page in a real Chromium that nobody sees."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from served import Served, wait_for

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDTH, HEIGHT = 1280, 800
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-extensions",
             "--no-first-run", "--disable-background-networking", "--disable-component-update")  # fmt: skip


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """Have a browser for a block, which keeps what it knows in `folder`: what selenium drives it by."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for argument in (*ARGUMENTS, f"--user-data-dir={folder}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, server: Served, path: str = "/") -> None:
        """Open the page as nobody did before, and wait until it knows the server."""
        self.driver.get(f"{server.url}/health")
        self.errors()  # of a page before
        self.js("localStorage.clear(); sessionStorage.clear()")
        self.look(WIDTH, HEIGHT)
        self.driver.get(server.url + path)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Show it on a screen of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def js(self, script: str, *arguments: object) -> Any:
        """Return what a script returns."""
        return self.driver.execute_script(script, *arguments)

    def one(self, selector: str) -> Any:
        """Return the element, which must be there."""
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """Return what is seen of the last such element; empty where there is none."""
        return self.js("return [...document.querySelectorAll(arguments[0])].at(-1)?.innerText ?? ''", selector)

    def until(self, script: str, *arguments: object) -> str:
        """Wait until an expression is true."""
        return wait_for(lambda: str(self.js(f"return {script}", *arguments) or ""))

    def sees(self, selector: str, part: str) -> None:
        """Wait until the last such element has this in it."""
        wait_for(lambda: part if part in self.text(selector) else "")

    def say(self, text: str) -> None:
        """Write a message and press Enter."""
        self.until("document.getElementById('send').disabled === false && !document.getElementById('send').hidden")
        self.js("document.getElementById('text').value = arguments[0]", text)
        self.one("#text").send_keys("\ue007")

    def finished(self) -> None:
        """Wait until the answer is finished."""
        self.until(
            "document.querySelector('article:last-child footer:not([hidden])') && "
            "document.getElementById('stop').hidden"
        )

    def errors(self) -> list[str]:
        """Return what the console has as errors since it was asked last."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextlib.contextmanager
def other_tab(page: Page, server: Served) -> Iterator[None]:
    """Have the page in another tab of the same browser for a block."""
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.driver.get(server.url)
    try:
        yield
    finally:
        page.driver.close()
        page.driver.switch_to.window(first)

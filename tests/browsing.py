"""Headless Chromium for the tests of pages, without a network.

Needs selenium, chromium and chromedriver; without them the tests are skipped, but fail where CI is set.
"""

import importlib.util
import json
import os
import shutil
from contextlib import contextmanager

import pytest

NEEDED = {
    "selenium": importlib.util.find_spec("selenium"),
    "chromium": shutil.which("chromium") or shutil.which("google-chrome"),
    "chromedriver": shutil.which("chromedriver"),
}
LACKING = [name for name, found in NEEDED.items() if not found]
PHONE, DESK = 390, 1280


@contextmanager
def chromium():
    """A driver of it."""
    if LACKING:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{', '.join(LACKING)} not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--force-prefers-reduced-motion"):
        options.add_argument(argument)
    options.binary_location = NEEDED["chromium"]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(NEEDED["chromedriver"]))
    try:
        yield driver
    finally:
        driver.quit()


def visit(browser, url, width=DESK, theme="light"):
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(url)


def asked(browser):
    """What the browser has asked for since the visit, in order."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith("data:")]

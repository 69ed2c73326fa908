"""Headless Chromium, for the tests that open pages as a reader does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service


@contextmanager
def chromium(profile: Path, **capabilities: Any) -> Iterator[webdriver.Chrome]:
    """A browser that asks its makers for nothing. Skips the test where Chromium or its driver is not installed.

    Args:
        profile: an empty directory.
        capabilities: which logs to keep, beside the console's; see `goog:loggingPrefs`.
    """
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Chromium and its driver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-quic", "no-first-run"),
        *("disable-background-networking", "disable-component-update", "disable-sync"),
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", **capabilities})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()

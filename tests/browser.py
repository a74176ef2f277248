"""Access to a real browser: Playwright (extra `browser`), with a Chromium from PATH or PEERLOOM_CHROMIUM. If
one is missing, the tests that need it are skipped with a reason.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def find() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    named = os.environ.get("PEERLOOM_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def require() -> str:
    """Return the path of a Chromium. Skip the test if Chromium or Playwright is missing."""
    pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install '.[browser]'")
    path = find()
    if path is None:
        pytest.skip("no Chromium on this machine: set PEERLOOM_CHROMIUM to the path of one")
    return path


@contextmanager
def opened(**context: Any) -> Iterator[Any]:
    """Yield a browser page whose errors are collected in `complaints`. Skip the test if there is no
    browser."""
    path = require()
    from playwright.sync_api import sync_playwright  # an extra that may be missing

    with sync_playwright() as driver:
        flags = [*FLAGS, *os.environ.get("PEERLOOM_CHROMIUM_FLAGS", "").split()]
        browser = driver.chromium.launch(executable_path=path, args=flags)
        try:
            page: Any = browser.new_page(locale="en-US", bypass_csp=True, **context)
            page.complaints = []
            page.on("pageerror", lambda error: page.complaints.append(str(error)))
            page.on(
                "console",
                lambda said: page.complaints.append(said.text) if said.type == "error" else None,
            )
            yield page
        finally:
            browser.close()

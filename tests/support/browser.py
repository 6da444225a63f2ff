"""A page in a real browser: Debian's chromium, or another one of the same family."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needed = pytest.mark.skipif(BROWSER is None, reason=f"needs one of {', '.join(BROWSERS)}")


def run(folder: Path, page: str, *options: str):
    """Open a page in the browser and return what its scripts have written into #report."""
    path = folder / "page.html"
    path.write_text(page, "utf-8")
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        profile,
        *options,
    ]
    command += ["--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r'<pre id="report">(.*?)</pre>', done.stdout, re.S)
    assert done.returncode == 0 and found, done.stderr
    return json.loads(html.unescape(found[1]))

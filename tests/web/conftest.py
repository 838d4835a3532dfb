"""Servers, and pages of Debian's Chromium, for `make test-web`.

The environment has none of Runahead's packages: nothing here imports them.
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
RUNAHEAD = ROOT / ".venv" / "bin" / "runahead"
PICTURES = ROOT / "docs" / "pictures"
MAX_PICTURE = 200_000
"""Bytes."""
KEY = "sesame"
PATIENCE_MS = 60_000
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-color-profile=srgb",
)  # fmt: skip
NATIVE = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "256M", "--threads", "1")
SIM = ("--backend", "sim", "--sim-step-ms", "20", "--sim-decode-us", "200", "--tensor-parallel-size", "4")
EIGHT = (*SIM, "--pipeline-parallel-size", "2")


class WebServer(NamedTuple):
    url: str
    """With a slash at its end."""
    process: psutil.Process

    def worker(self, rank: int) -> psutil.Process:
        children = self.process.children()
        return next(c for c in children if any(word.endswith(f"/worker-{rank}.json") for word in c.cmdline()))


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[WebServer]:
    with tempfile.TemporaryDirectory(prefix="ra-") as runtime:
        process = subprocess.Popen(
            [str(RUNAHEAD), "serve", "--port", "0", "--log-level", "warning", *arguments],
            env=os.environ | {"XDG_RUNTIME_DIR": runtime} | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            match = re.search(r"Page: (\S+/) ", process.stdout.readline())
            assert match, "the server did not start"
            yield WebServer(match[1], psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="session")
def model() -> Iterator[WebServer]:
    """The default model at depth two."""
    with serving(*NATIVE) as server:
        yield server


@pytest.fixture(scope="session")
def ranks() -> Iterator[WebServer]:
    """Four simulated ranks behind an API key."""
    with serving(*SIM, RUNAHEAD_API_KEY=KEY) as server:
        yield server


@pytest.fixture(scope="session")
def eight() -> Iterator[WebServer]:
    """Two simulated stages of four ranks each."""
    with serving(*EIGHT) as server:
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", headless=False, args=list(FLAGS), timeout=PATIENCE_MS
        )
        yield browser
        browser.close()


Opener = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Opens a page of a server. At the end no page has logged an error or asked another host for anything."""
    contexts, problems = [], list[str]()

    def opened(server: WebServer, width: int = 1360, height: int = 820, scheme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        host = urlsplit(server.url).netloc
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: urlsplit(r.url).netloc == host or problems.append(f"asked for {r.url}"))
        page.goto(server.url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def picture(page: Page, name: str, selector: str | None = None) -> None:
    """Write a picture of the page, or of one element, for the documentation."""
    PICTURES.mkdir(exist_ok=True)
    path = PICTURES / f"{name}.png"
    (page.locator(selector) if selector else page).screenshot(path=path)
    assert path.stat().st_size < MAX_PICTURE, path

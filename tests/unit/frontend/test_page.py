"""The files of the page: complete, served with their types, and without anything from another host."""

import re
from pathlib import Path

import pytest

from services.frontend.page.files import HEADERS, load_page

STATIC = Path(__file__).parents[3] / "services" / "frontend" / "page" / "static"
OWN = sorted(path for path in STATIC.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))
VENDORED = {"marked.esm.js": "MIT", "purify.es.mjs": "Apache License"}
"""File, and words of its licence."""


def test_every_file_that_the_page_loads_is_served() -> None:
    paths = load_page().keys()
    index = (STATIC / "index.html").read_text()
    loaded = {f"/{name}" for name in re.findall(r'(?:src|href)="([^"]+)"', index)}
    for script in STATIC.glob("*.js"):
        loaded |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text())}
    assert loaded <= paths
    assert paths - loaded == {"/"}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_file_names_another_host(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?|wss?):?//[\w.-]|[\"'(]//\w|\bimport\(", text) == []


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_file_has_what_the_content_security_policy_refuses(path: Path) -> None:
    """Inline scripts, inline styles and code from strings."""
    text = path.read_text()
    assert re.findall(r"\sstyle=|\son\w+=\"|<style|\beval\(|new Function|innerHTML|javascript:", text) == []
    assert re.findall(r"<script(?! type=\"module\" src=)", text) == []


@pytest.mark.parametrize(("name", "licence"), VENDORED.items())
def test_a_vendored_library_has_its_version_and_licence(name: str, licence: str) -> None:
    vendor = STATIC / "vendor"
    assert re.search(r"v?\d+\.\d+\.\d+", (vendor / name).read_text()[:600])
    assert licence in (vendor / f"{name.partition('.')[0]}.LICENSE").read_text()
    assert f"{name.partition('.')[0]}.LICENSE" not in load_page()


def test_the_policy_allows_only_this_host() -> None:
    assert HEADERS["content-security-policy"].startswith("default-src 'self';")

"""The programs of docs/examples.md, run as they are, at the address of a test's server."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.checkpoint.default_model import packaged_model
from tests.e2e.server import ServeProcess, serving

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="deploy/model.txt is not installed")
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = dict(
    re.findall(
        r"## ([^\n]*)\n(?:(?!\n## ).)*?```python\n(.*?)```", (ROOT / "docs" / "examples.md").read_text(), re.DOTALL
    )
)
PRINTED = {
    "An agent with tools": r"called stock .*apples.* -> 12\n.*\S",
    "Data from text": r"Invoice\(customer='Ann Smith', amount=250\)",
    "Search by embeddings": r"^0\.\d+  A cat sleeps",
    "A batch of requests from a file": r"Egypt .*Cairo.*\nJapan .*Tokyo",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with serving("--dtype=float32", "--max-model-len=1024", RUNAHEAD_MODEL="") as running:
        yield running


@pytest.mark.parametrize("name", PRINTED)
def test_program_prints_what_its_page_promises(name: str, server: ServeProcess, tmp_path: Path) -> None:
    program = PROGRAMS[name].replace("http://127.0.0.1:8000", server.url)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RUNAHEAD_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=clean | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[name], done.stdout), done.stdout


def test_every_program_is_run() -> None:
    assert PROGRAMS.keys() == PRINTED.keys()

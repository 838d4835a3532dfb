"""Commands and flags in the README work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import ServeProcess

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def at_server(text: str, server: ServeProcess) -> str:
    return text.replace("http://127.0.0.1:8000", server.url)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_example_runs(server: ServeProcess, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", at_server(code, server)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", [block for block in blocks("sh") if block.startswith("curl")])
def test_curl_example_runs(server: ServeProcess, command: str) -> None:
    done = subprocess.run(["bash", "-ec", at_server(command, server)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"choices"' in done.stdout


def test_readme_has_examples() -> None:
    assert blocks("python")
    assert any(block.startswith("curl") for block in blocks("sh"))


def test_readme_is_short() -> None:
    assert len(README.split()) <= 1200


def test_common_flags_exist() -> None:
    from services.config import BenchConfig, ServeConfig

    known = {name.replace("_", "-") for model in (ServeConfig, BenchConfig) for name in model.model_fields}
    known |= {f"no-{name}" for name in known} | {"config", "help", "version"}
    rows = re.findall(r"^\| `--([a-z-]+)", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    assert rows
    assert set(rows) <= known

"""The examples of docs/clients.md, run as they are, at the address of a test's server."""

import re
import sys

import pytest

from tests.clients.conftest import ROOT, RunningServer, run

NODE = ROOT / "tests" / "clients" / "node"
PAGE = (ROOT / "docs" / "clients.md").read_text()
COMMANDS = {"python": [sys.executable, "-c"], "js": ["node", "--input-type=module", "--eval"]}
EXAMPLES = re.findall(r"```(python|js)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_example_prints_an_answer(language: str, code: str, server: RunningServer) -> None:
    text = code.replace("http://127.0.0.1:8000", server.url)
    assert run(*COMMANDS[language], text, directory=NODE).strip()

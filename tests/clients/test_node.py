"""Clients for Node.js: OpenAI's and Anthropic's libraries, and Vercel's AI SDK. Their tests are in `node`."""

from pathlib import Path

import pytest

from tests.clients.conftest import RunningServer, run

NODE = Path(__file__).parent / "node"


@pytest.mark.parametrize("file", sorted(path.name for path in NODE.glob("*.test.js")))
def test_client_for_node(server: RunningServer, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setenv("MODEL", server.model)
    run("node", "--test", "--test-reporter=spec", str(NODE / file))

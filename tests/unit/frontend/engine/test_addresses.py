"""Lists of engines: files with broken lines, files that change, names that are resolved."""

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from protocol.security import Security
from services.frontend.engine.addresses import EngineAddress, follow, parse
from tests.waiting import wait_until

LOCAL = Security()
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def test_broken_lines_are_named_and_the_others_count() -> None:
    text = f"""# comment
ipc:///run/a - left
ipc:///run/b - left
tcp://127.0.0.1:5601 {KEY}

http://x
tcp://10.0.0.1:5601 - far
ipc:///run/c short right
ipc:///run/d - right more
"""
    found, problems = parse(text, LOCAL)
    assert found == [
        EngineAddress("left", "ipc:///run/a"),
        EngineAddress("tcp://127.0.0.1:5601", "tcp://127.0.0.1:5601", KEY),
    ]
    assert [problem.partition(":")[0] for problem in problems] == [f"line {n}" for n in (3, 6, 7, 8, 9)]
    assert "there is an engine left already" in problems[0]
    assert "not the loopback address" in problems[2]
    assert "the public key has 5 characters, not 40; - means none" in problems[3]


async def changes(source: str, heard: list[list[EngineAddress]]) -> asyncio.Task[None]:
    return asyncio.create_task(follow(source, LOCAL, heard.append))


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, heard = tmp_path / "engines", list[list[EngineAddress]]()
    file.write_text("ipc:///run/a\n")
    task = await changes(str(file), heard)
    await asyncio.to_thread(wait_until, lambda: len(heard) == 1)
    file.unlink()
    with caplog.at_level(logging.ERROR):
        await asyncio.to_thread(wait_until, lambda: "cannot be read" in caplog.text)
        file.write_text("ipc:///run/a\nnonsense\nipc:///run/b\n")
        await asyncio.to_thread(wait_until, lambda: len(heard) == 2)
    assert [address.name for address in heard[1]] == ["ipc:///run/a", "ipc:///run/b"]
    assert "line 2: " in caplog.text
    task.cancel()


async def test_a_name_is_resolved(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its engines when it does not resolve."""
    heard, asked = list[list[EngineAddress]](), list[int]()
    monkeypatch.setattr("services.frontend.engine.addresses.DNS_INTERVAL", 0.01)
    task = await changes("dns://localhost:5601", heard)
    await asyncio.to_thread(wait_until, lambda: heard)
    assert "127.0.0.1:5601" in [address.name for address in heard[0]]

    async def fails(*_: object, **__: object) -> None:
        asked.append(1)
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    await asyncio.to_thread(wait_until, lambda: len(asked) > 3)
    assert (len(heard), caplog.text.count("Name or service not known")) == (1, 1)
    task.cancel()

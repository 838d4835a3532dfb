"""Settings of recordings and KV events are checked before a service starts."""

import json
from pathlib import Path

import pytest

from services.cli.app import run

SERVE = ("serve", "--backend", "sim", "--sim-vocab-size", "100")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the line with which a command is refused."""
    assert run([*SERVE, *arguments]) == 2
    return capsys.readouterr().err


def kv_events(**settings: object) -> str:
    return json.dumps({"enable_kv_cache_events": True, **settings})


def test_a_directory_that_others_can_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o755)
    assert f"chmod 700 {tmp_path}" in refusal(capsys, "--record", str(tmp_path))
    file = tmp_path / "file"
    file.touch()
    assert "cannot be made" in refusal(capsys, "--record", str(file))


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://192.168.1.7:5557", "tcp://router:5557"])
def test_kv_events_beyond_this_machine_need_a_permission(
    capsys: pytest.CaptureFixture[str], key: str, endpoint: str
) -> None:
    text = refusal(capsys, "--kv-events-config", kv_events(**{key: endpoint}))
    assert "--insecure-transport" in text
    assert endpoint in text


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"endpoint": "udp://1.2.3.4:5"}, "is not an endpoint"),
        ({"endpoint": "tcp://127.0.0.1:99999"}, "is not an endpoint"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "must differ"),
        ({"endpoint": f"ipc:///{'x' * 200}"}, "at most"),
        ({"publisher": "kafka"}, "zmq"),
        ({"buffer_steps": 0}, "greater than or equal to 1"),
        ({"buffer": 1}, "extra"),
    ],
)
def test_unusable_kv_events_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], settings: dict[str, object], part: str
) -> None:
    text = refusal(capsys, "--kv-events-config", kv_events(**settings))
    assert "--kv-events-config" in text
    assert part in text.lower()

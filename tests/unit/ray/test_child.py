"""A service as a child of an actor, supervised by a thread, and the keys of both sides of its connections."""

import contextlib
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest

from protocol.security import SERVER, client_keys, public_roles
from services.checkpoint import DEMO_MODEL
from services.config import SchedulerConfig
from services.ray.child import ServiceChild
from services.ray.keys import KeyDirectory
from tests.waiting import PATIENCE, wait_until


def schedulers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "services.cli.child" in child.cmdline():
                found.append(child)
    return found


def config(directory: Path, **changes: object) -> SchedulerConfig:
    endpoints = {"client_endpoint": f"ipc://{directory}/c", "worker_endpoint": f"ipc://{directory}/w"}
    return SchedulerConfig.model_validate({"model": str(DEMO_MODEL)} | endpoints | changes)


def test_a_service_is_started_again_and_stopped_in_order(tmp_path: Path) -> None:
    child = ServiceChild(SERVER, config(tmp_path), tmp_path)
    assert stat.S_IMODE((tmp_path / "scheduler.json").stat().st_mode) == 0o600
    wait_until((tmp_path / "c").exists, "the socket exists")
    (first,) = schedulers()
    first.send_signal(signal.SIGKILL)
    wait_until(lambda: schedulers() not in ([], [first]), "another scheduler runs")
    assert child.failure == ""
    wait_until(lambda: psutil.Process(schedulers()[0].pid).num_threads() > 1, "it serves")
    child.stop(PATIENCE)
    assert (schedulers(), child.failure) == ([], "")


def test_a_service_that_cannot_start_has_failed_with_the_reason(tmp_path: Path) -> None:
    child = ServiceChild(SERVER, config(tmp_path, client_endpoint="tcp://10.1.2.3:1"), tmp_path)
    wait_until(lambda: child.failure, "the failure is known")
    assert child.failure.startswith("scheduler exited with status 1: --client-endpoint: tcp://10.1.2.3:1: ")


def test_a_service_whose_process_cannot_be_made_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actor was healthy without it."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    child = ServiceChild(SERVER, config(tmp_path), tmp_path)
    wait_until(lambda: child.failure, "the failure is known")
    assert child.failure.startswith("the scheduler cannot be started: [Errno 2] No such file or directory: ")
    child.stop(PATIENCE)


def test_public_keys_let_peers_in_by_their_roles(tmp_path: Path) -> None:
    made = {role: tmp_path / role for role in ("scheduler", "frontend", "worker")}
    for path in made.values():
        path.mkdir()
    keys = {role: KeyDirectory(path, role) for role, path in made.items()}
    for role in ("frontend", "worker", "worker"):
        keys[SERVER].admit(role, keys[role].public_key)
    keys["worker"].admit(SERVER, keys[SERVER].public_key)
    roles = public_roles(made["scheduler"])
    assert roles.pop(keys[SERVER].public_key.encode()) == SERVER
    assert roles == {keys[role].public_key.encode(): role for role in ("frontend", "worker")}
    assert client_keys(made["worker"])[1] == keys[SERVER].public_key.encode()
    assert client_keys(made["frontend"], keys[SERVER].public_key)[1] == keys[SERVER].public_key.encode()


@pytest.mark.parametrize("key", ["", "x" * 39, "x" * 41, '"' * 40, "é" * 40])
def test_a_key_that_is_none_is_refused(tmp_path: Path, key: str) -> None:
    keys = KeyDirectory(tmp_path, SERVER)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match="has 40 characters of Z85"):
        keys.admit("worker", key)
    assert sorted(path.name for path in tmp_path.iterdir()) == before

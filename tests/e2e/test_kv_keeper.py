"""`runahead kv-keeper` beside `serve`: the KV cache outlives all of its processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.server import NATIVE, ServeProcess, is_alive, serving, wait_until
from tests.e2e.test_tiers import PREFIX, SIM, answer, forget


@contextmanager
def keeper(path: Path, seconds: int) -> Iterator[subprocess.Popen[str]]:
    arguments = ["kv-keeper", str(path), "--recovery-timeout-seconds", str(seconds)]
    with subprocess.Popen(
        [sys.executable, "-m", "services.cli", *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert "Keeping KV memory" in process.stdout.readline()
            yield process
        finally:
            process.terminate()
        assert process.wait() == 0
    assert not path.exists()


def num_kept(process: subprocess.Popen[str]) -> int:
    files = Path(f"/proc/{process.pid}/fd").iterdir()
    return sum("memfd:runahead-kv" in os.readlink(file) for file in files)


def kill_all(server: ServeProcess) -> None:
    server.find_services()
    server.signal(signal.SIGKILL)
    for service in server.services.values():
        service.kill()
    server.wait()
    wait_until(lambda: not any(map(is_alive, server.services.values())), "all services have ended")


@pytest.mark.parametrize(
    "layout",
    [
        (*SIM, "--tensor-parallel-size", "2"),
        NATIVE,
        *(pytest.param((*SIM, "--batch-queue-depth", depth), marks=pytest.mark.soak) for depth in "13"),
    ],
    ids=["two ranks", "demo model", "depth 1", "depth 3"],
)
def test_the_next_server_adopts_the_blocks_of_one_that_was_killed(layout: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "kv"
    layout = (*layout, "--kv-keeper", str(path))
    with keeper(path, seconds=300) as process:
        with serving(*layout) as server:
            text, cached = answer(server)
            assert cached == 0
            kill_all(server)
        with serving(*layout) as server:
            assert "KV blocks are adopted" in server.log.read_text()
            assert answer(server) == (text, PREFIX)
        for other in (("--max-model-len", "512"), ("--kv-cache-memory-bytes", str(8 << 20))):
            with serving(*layout, *other) as server:
                assert answer(server) == (text, 0), "the cache has other limits, or another size"
                assert num_kept(process) == (2 if "2" in layout else 1), "those before are freed"


def test_a_reset_reaches_memory_without_a_worker(tmp_path: Path) -> None:
    """Another server's workers may be those that drop it."""
    layout = (*SIM, "--kv-keeper", str(tmp_path / "kv"), "--enable-admin-routes")
    with keeper(tmp_path / "kv", seconds=300), serving(*layout) as lost:
        text, _ = answer(lost)
        with serving(*layout) as server:
            kill_all(lost)
            forget(server)
            with serving(*layout) as after:
                assert answer(after) == (text, 0)


def test_blocks_that_nobody_wants_are_freed(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with keeper(path, seconds=1) as process:
        with serving(*SIM, "--kv-keeper", str(path)) as server:
            answer(server)
            assert num_kept(process) == 1
            kill_all(server)
        wait_until(lambda: num_kept(process) == 0, "the memory is freed")


def test_a_server_without_its_keeper_is_refused_in_one_line(tmp_path: Path) -> None:
    with serving(*SIM, "--kv-keeper", str(tmp_path / "kv"), wait=False) as server:
        assert server.wait() == 2
        assert "no keeper answers (No such file or directory); start one with runahead kv-keeper" in server.last_line()

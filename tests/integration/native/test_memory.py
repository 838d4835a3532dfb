"""Memory that is computed without weights is that of the loaded model."""

import logging

import pytest

from protocol.membership import Shard
from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.worker.backends.native.memory import rank_memory
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.partition import ModelPart
from tests.integration.native.driver import RunnerDriver


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}]
)
def test_memory_is_known_before_weights_are_read(
    settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    part = ModelPart.from_shard(ModelConfig.from_checkpoint(DEMO_MODEL), Shard())
    with caplog.at_level(logging.INFO):
        driver = RunnerDriver(DEMO_MODEL, **settings)
    config = WorkerConfig(model=str(DEMO_MODEL), **settings)  # type: ignore[arg-type]  a few valid values
    expected = rank_memory(config, DEMO_MODEL, part, driver.block_size)
    assert driver.loaded.bytes_per_block == expected.kv_block
    assert f"weights: {expected.weights / 2**20:.1f} MiB in" in caplog.text

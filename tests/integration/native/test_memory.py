"""Memory that is computed without weights is that of the loaded model."""

import logging
import re
from collections.abc import Callable

import pytest

from protocol.membership import Shard
from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.worker.backends.native.memory import rank_memory
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.partition import ModelPart
from tests.integration.native.conftest import Family
from tests.integration.native.driver import RunnerDriver


def start(caplog: pytest.LogCaptureFixture, **settings: str) -> tuple[RunnerDriver, float]:
    """Return a runner, and the MiB of weights that its log states."""
    with caplog.at_level(logging.INFO):
        driver = RunnerDriver(DEMO_MODEL, **settings)
    stated = re.findall(r"weights: ([\d.]+) MiB in", caplog.text)
    return driver, float(stated[-1])


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_memory_is_known_before_weights_are_read(settings: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    part = ModelPart.from_shard(ModelConfig.from_checkpoint(DEMO_MODEL), Shard())
    driver, stated = start(caplog, **settings)
    config = WorkerConfig(model=str(DEMO_MODEL), **settings)  # type: ignore[arg-type]  a few valid values
    expected = rank_memory(config, DEMO_MODEL, part, driver.block_size)
    assert stated == pytest.approx(expected.weights / 2**20, abs=0.051)
    assert driver.loaded.bytes_per_block == expected.kv_block


def test_every_implementation_counts_a_tied_head_once(caplog: pytest.LogCaptureFixture) -> None:
    compiled, plain = (start(caplog, dtype="bfloat16", kernels=each)[1] for each in ("compiled", "reference"))
    assert compiled == pytest.approx(plain, abs=0.051)


def test_memory_of_experts_beside_a_shared_one_and_dense_layers(make_family: Callable[[str], Family]) -> None:
    family = make_family("llama4")
    shards = Shard(), *(Shard(rank, 2, 0, 1) for rank in range(2)), *(Shard(0, 1, stage, 2) for stage in range(2))
    config = WorkerConfig(model=str(family.path), dtype="float32")
    sizes = {name: p.numel() for name, p in family.model.named_parameters() if p.ndim > 1 and "router" not in name}
    whole = ModelConfig.from_checkpoint(family.path)
    one, *parts = (rank_memory(config, family.path, ModelPart.from_shard(whole, shard), 16) for shard in shards)
    assert one.weights == 4 * sum(sizes.values())
    # 211 token ids, padded, in the embedding and the head
    assert sum(rank.weights for rank in parts[:2]) == one.weights + 2 * 4 * whole.hidden_size
    assert sum(stage.weights for stage in parts[2:]) == one.weights
    read = {name: size / 2 if ".experts." in name else size for name, size in sizes.items() if "embed" not in name}
    assert one.per_token == sum(stage.per_token for stage in parts[2:]) == 4 * sum(read.values())

"""Memory that is computed without weights is that of the loaded model."""

import logging
import re

import pytest

from protocol.membership import Shard
from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.worker.backends.native.memory import RankMemory, rank_memory
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.partition import ModelPart
from services.worker.kernels import selection
from tests.integration.native.driver import RunnerDriver


def loaded_and_expected(settings: dict[str, str], caplog: pytest.LogCaptureFixture) -> tuple[float, RankMemory, int]:
    """Return the MiB of weights that the log states, what is known before, and the runner's bytes of a KV block."""
    part = ModelPart.from_shard(ModelConfig.from_checkpoint(DEMO_MODEL), Shard())
    with caplog.at_level(logging.INFO):
        driver = RunnerDriver(DEMO_MODEL, **settings)
    config = WorkerConfig(model=str(DEMO_MODEL), **settings)  # type: ignore[arg-type]  a few valid values
    expected = rank_memory(config, DEMO_MODEL, part, driver.block_size)
    stated = re.search(r"weights: ([\d.]+) MiB in", caplog.text)
    assert stated is not None
    return float(stated[1]), expected, driver.loaded.bytes_per_block


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_memory_is_known_before_weights_are_read(
    settings: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = selection.processor_features() - {*selection.OWN_BFLOAT16}
    monkeypatch.setattr(selection, "processor_features", lambda: features)
    stated, expected, bytes_per_block = loaded_and_expected(settings, caplog)
    assert stated == pytest.approx(expected.weights / 2**20, abs=0.051)
    assert bytes_per_block == expected.kv_block


@pytest.mark.skipif(
    not {*selection.OWN_BFLOAT16} & selection.processor_features(), reason="a processor without bfloat16"
)
def test_own_products_in_bfloat16_keep_a_tied_head_once(caplog: pytest.LogCaptureFixture) -> None:
    stated, expected, _ = loaded_and_expected({"dtype": "bfloat16"}, caplog)
    model = ModelConfig.from_checkpoint(DEMO_MODEL)
    table = 2 * model.vocab_size * model.hidden_size
    assert stated == pytest.approx((expected.weights - table) / 2**20, abs=0.051)

"""The number of KV blocks that a rank offers, and the context length that it serves."""

import pytest

from protocol.membership import Assignment
from services.cli.engine_set import divided
from services.config import ServeConfig, WorkerConfig
from services.worker import machine
from services.worker.backends.kv_blocks import affordable_blocks, context_limit, num_kv_blocks
from services.worker.runner import LoadError


def test_blocks_that_fit_into_memory() -> None:
    assert affordable_blocks(1000, 100) == 10
    assert affordable_blocks(1099, 100, reserved=1) == 9


def test_memory_without_room_for_one_block_names_what_would_do() -> None:
    with pytest.raises(LoadError, match=r"99 bytes hold no KV block; one takes 100 bytes: raise .* to 100 at least"):
        affordable_blocks(99, 100)
    with pytest.raises(LoadError, match=r"beside the 1 that the backend needs .* to 200 at least"):
        affordable_blocks(199, 100, reserved=1)


def test_a_share_of_the_host_is_used_as_far_as_all_slots_fill_it_and_given_memory_whole() -> None:
    assignment = Assignment(epoch=1, rank=0, world_size=1, block_size=16, num_slots=8, max_num_batched_tokens=64)
    given = WorkerConfig(model="m", kv_cache_memory_bytes=1 << 20)
    several = divided(ServeConfig(model="m", data_parallel_size=2)).service_settings(WorkerConfig)
    for config in (WorkerConfig(model="m"), WorkerConfig.model_validate(several)):
        assert num_kv_blocks(config, assignment, 100, max_model_len=100) == 8 * 7
    assert num_kv_blocks(given, assignment, 100, max_model_len=100) == (1 << 20) // 100


def test_ranks_and_engines_of_one_machine_share_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 40_000)
    assignment = Assignment(epoch=1, rank=0, world_size=4, block_size=16, num_slots=80, max_num_batched_tokens=64)
    for engines, ranks, blocks in ((1, 1, 100), (1, 4, 25), (2, 2, 25)):
        config = WorkerConfig(model="m", engines_here=engines)
        assert num_kv_blocks(config, assignment, 100, 1600, ranks=ranks) == blocks


def test_context_beyond_the_model_is_refused() -> None:
    assert context_limit(0, 256) == 256
    assert context_limit(100, 256) == 100
    with pytest.raises(LoadError, match="max_model_len 257 is more than the 256 positions"):
        context_limit(257, 256)

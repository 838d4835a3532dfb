"""Memory behind the window of a layer is given to other requests, and no token changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocol.kv_groups import MAX_GROUPS
from protocol.membership import Assignment, InitializeCache, Shard
from protocol.sampling import SamplingParams
from protocol.steps import SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.layer_groups import LayerGroups
from services.worker.backends.native.model.partition import ModelPart
from services.worker.backends.native.runner import NativeRunner
from services.worker.kernels.cpu.network import CpuNetwork
from services.worker.kernels.interface.kv_cache import KVCache
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GarblingRunner
from tests.integration.native.engine_driver import EngineDriver, LocalSteps, ServedRequest
from tests.integration.native.test_left_out import NGRAM, ROOMY, assert_equal, limits, serve
from tests.matrix import covering

PROMPT = [5, 9, 31, 5, 9, 31, 5, 9, 31, 5, 9, 44, 7, 5, 9, 31, 5]
FAMILIES = ["gemma3", "gpt-oss", "mistral-window", "olmo3-yarn"]


@pytest.mark.parametrize(("name", "depth"), covering(FAMILIES, (1, 2, 3), strength=1))
def test_answers_are_those_of_one_table_that_keeps_every_token(
    make_family: Callable[[str], Family], name: str, depth: int
) -> None:
    """With grammars, seeds, penalties and log-probabilities; with late masks, and drafts or preemption."""
    path = make_family(name).path
    scarce = 40 if name != "mistral-window" else 24  # which has one group
    late, speculation, blocks = {1: (0, None, scarce), 2: (1, None, scarce), 3: (3, NGRAM, ROOMY)}[depth]
    served = serve(path, depth, late, speculation, blocks, max_kv_groups=MAX_GROUPS)
    assert_equal(served, serve(path, 1, 0))
    assert blocks == ROOMY or served.counters["num_preemptions"] > 0


class PoisonedSteps(LocalSteps):
    """Fills all free blocks with NaN before each step, and notes how many blocks are held."""

    def __init__(self, runner: NativeRunner, cache: KVCache) -> None:
        super().__init__(runner)
        self.cache, self.most = cache, 0
        self.driver: EngineDriver | None = None

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> None:
        pool, cache = self.driver.core.epoch.kv.pool, self.cache
        free = torch.tensor([block for block, refs in enumerate(pool.refs) if not refs])
        cache.keys[:, free] = cache.values[:, free] = torch.nan
        self.most = max(self.most, pool.num_blocks - len(free))
        super().launch(plan)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_kernel_reads_behind_the_window(
    make_family: Callable[[str], Family], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence much longer than the window equals transformers, although freed blocks hold NaN."""
    family, caches, make = make_family(name), list[KVCache](), CpuNetwork.kv_cache

    def kept(*args: Any) -> KVCache:
        caches.append(make(*args))
        return caches[-1]

    monkeypatch.setattr(CpuNetwork, "kv_cache", kept)
    size = replace(limits(96, 1, None), max_num_seqs=1, max_model_len=120, enable_prefix_caching=False)
    runner = GarblingRunner(WorkerConfig(model=str(family.path), threads=1, dtype="float32"))
    sizes = size.block_size, size.num_slots, size.max_num_batched_tokens, size.max_model_len
    loaded = runner.load(Assignment(1, 0, 1, *sizes, max_kv_groups=MAX_GROUPS), lambda *_: None)
    runner.init_kv_cache(InitializeCache(size.num_blocks, size.max_model_len))
    steps = PoisonedSteps(runner, *caches)
    steps.driver = EngineDriver(steps, replace(size, groups=loaded.groups), loaded.vocab_size, 1)
    request = ServedRequest(PROMPT * 3, SamplingParams(60, 0.0))
    [output] = steps.driver.serve([request])
    assert output == family.reference(PROMPT * 3, 60, output)[0]
    windows = sum(group.size > 0 for group in loaded.groups)
    bound = -(-111 // 4) * (len(loaded.groups) - windows) + windows * (-(-(21 + 24) // 4) + 1)
    assert steps.most <= bound < -(-111 // 4) * len(loaded.groups)
    runner.shutdown()


def parts(windows: tuple[int, ...], stages: int = 1) -> list[ModelPart]:
    """Parts of a model whose layers have these windows."""
    base = ModelConfig(
        100, 16, 16, len(windows), 2, 2, 8, 1000, 1e-6, False, (None,) * len(windows), windows, *(False,) * 4, "float32"
    )  # fmt: skip
    return [ModelPart.from_shard(base, Shard(0, 1, stage, stages)) for stage in range(stages)]


@pytest.mark.parametrize(
    ("windows", "groups", "depth"),
    [
        ((0, 0, 0), [0], 3),
        ((9, 9), [9], 2),
        ((9, 0) * 12, [0, 9], 12),
        ((9, 9, 9, 0) * 4, [0, 9, 9, 9], 4),
        ((9, 9, 9, 9, 9, 0) * 4 + (9, 9), [0] + [9] * 6, 4),
        ((9,) * 40 + (0,), [0] + [9] * 14, 3),
        ((9, 0, 0, 0, 9, 9, 0), [0, 9], 4),
        ((1000, 0), [0], 2),
    ],
)
def test_layers_are_divided_into_groups_of_equal_size(windows: tuple[int, ...], groups: list[int], depth: int) -> None:
    (part,) = parts(windows)
    found = LayerGroups.of(part, MAX_GROUPS, 1000)
    assert [group.size for group in found.groups] == groups
    assert found.depth == depth
    assert len({*zip(found.numbers, found.places, strict=True)}) == len(windows)
    for window, number in zip(windows, found.numbers, strict=True):
        assert found.groups[number].size == (window if window < 1000 else 0)
    assert LayerGroups.of(part, 1, 1000).is_plain


def test_stages_have_the_same_groups() -> None:
    windows = (9, 9, 9, 9, 9, 0) * 4
    found = [LayerGroups.of(part, MAX_GROUPS, 1000) for part in parts(windows, stages=3)]
    assert len({each.groups for each in found}) == 1
    assert {each.depth for each in found} == {2}

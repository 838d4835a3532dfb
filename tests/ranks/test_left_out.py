"""Constrained rows whose masks are late, in groups of real ranks: the rank that samples decides for all of them."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.integration.native.conftest import Family
from tests.integration.native.engine_driver import EngineDriver
from tests.integration.native.test_left_out import NGRAM, limits, requests, serve
from tests.ranks.group import RankGroup, RankPool

encode = msgspec.msgpack.encode


class GroupSteps:
    """`LaunchedSteps` on a group of ranks."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def launch(self, plan: SchedulerOutput) -> None:
        self._group.call("launch", encode(plan))

    def add_masks(self, grammar: GrammarOutput) -> None:
        self._group.call("masks", encode(grammar))

    def release(self, slots: bytes) -> None:
        self._group.call("release", slots)

    def ended(self) -> bool:
        return all(self._group.call("ended"))

    def result(self) -> ModelRunnerOutput:
        return msgspec.msgpack.decode(self._group.call("result")[self._group.output], type=ModelRunnerOutput)


@pytest.fixture(scope="module")
def wanted(make_model: Callable[[str], Family]) -> list[list[int]]:
    """Return the answers of one rank at depth one."""
    return serve(make_model("tied").path, 1, 0).answers


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["without drafts", "ngram"])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.soak)], ids=str)
def test_ranks_leave_out_the_same_rows(
    make_model: Callable[[str], Family],
    wanted: list[list[int]],
    pool: RankPool,
    layout: tuple[int, int],
    speculation: Speculation | None,
) -> None:
    """Tokens are those of one rank at depth one, and every rank and stage computes rows at their true positions."""
    family: Family = make_model("tied")
    model: Path = family.path
    tp, pp = layout
    drafts = 0 if speculation is None else speculation.num_speculative_tokens
    group = RankGroup(pool.take(tp * pp), model, tp, pp)
    for depth, late in ((pp + 1, 1), (2 * pp, 2)):
        size = limits(96, depth, speculation, pp)
        sizes = size.block_size, size.num_slots, size.max_num_batched_tokens, size.max_model_len
        group.load(Assignment(1, 0, 1, *sizes, speculation=speculation), lambda phase, fraction: None)
        group.init_kv_cache(InitializeCache(size.num_blocks, size.max_model_len))
        driver = EngineDriver(GroupSteps(group), size, family.vocab_size, depth, late, drafts)
        assert driver.serve(requests()) == wanted
        assert driver.core.store.counters["left_out_rows_total"] > 3

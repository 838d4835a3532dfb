"""Constrained rows whose masks are late, on simulated ranks: the output rank decides for all of them."""

from dataclasses import replace

import msgspec
import pytest

from protocol.codec import encode
from protocol.membership import Speculation
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.integration.native.engine_driver import EngineDriver
from tests.integration.native.test_left_out import limits, requests
from tests.integration.worker.test_sim_left_out import NGRAM, serve
from tests.ranks.sim_group import MakeGroup, SimGroup
from tests.unit.worker.plans import SLOTS, VOCAB


class SimGroupSteps:
    """`LaunchedSteps` on a group of simulated ranks. Only the output rank is waited for: another one may wait for it in
    the middle of a launch."""

    def __init__(self, group: SimGroup) -> None:
        self._group = group

    def _send(self, method: str, *arguments: object) -> None:
        for rank in self._group.ranks:
            rank.send(method, *arguments)

    def launch(self, plan: SchedulerOutput) -> None:
        self._send("launch", encode(plan))

    def add_masks(self, grammar: GrammarOutput) -> None:
        self._send("masks", encode(grammar))

    def release(self, slots: bytes) -> None:
        self._send("release", slots)

    def ended(self) -> bool:
        for rank in self._group.ranks:
            if rank is not self._group.output:
                rank.read_answers()
        return bool(self._group.output.call("ended"))

    def result(self) -> ModelRunnerOutput:
        self._send("result")
        return msgspec.msgpack.decode(self._group.output.last_answer(), type=ModelRunnerOutput)

    def finish(self) -> None:
        """Raises: RankFailure, of any rank in any step"""
        for rank in self._group.ranks:
            rank.last_answer()


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["without drafts", "ngram"])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.soak)], ids=str)
def test_ranks_leave_out_the_same_rows(
    make_group: MakeGroup, layout: tuple[int, int], speculation: Speculation | None
) -> None:
    """Tokens are those of one rank at depth one. Every rank verifies positions, drafts and tokens of the others."""
    tp, pp = layout
    wanted, drafts = serve(1, 0).answers[:5], 0 if speculation is None else speculation.num_speculative_tokens
    flags = {"sim_step_ms": 0.5 * pp, "sim_draft_acceptance": "request"}
    group, depth = make_group(tp, pp, speculation=speculation, **flags), 2 * pp
    size = replace(limits(96, depth, speculation, pp), max_num_seqs=SLOTS // 2)
    steps = SimGroupSteps(group)
    driver = EngineDriver(steps, size, VOCAB, depth, 1, drafts, patience=0.02)
    assert driver.serve(requests()[:5]) == wanted
    steps.finish()
    assert driver.core.store.counters["left_out_rows_total"] > 3

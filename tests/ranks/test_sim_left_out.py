"""Constrained rows whose masks are late, on simulated ranks: the output rank decides for all of them."""

from dataclasses import replace

import msgspec
import pytest

from protocol.codec import encode
from protocol.membership import Speculation
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.integration.native.engine_driver import EngineDriver
from tests.integration.native.test_left_out import ServedAnswers, limits, requests
from tests.ranks.sim_group import MakeGroup, SimGroup
from tests.unit.worker.plans import SLOTS, VOCAB

NGRAM = Speculation("ngram", 3)


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


def serve(
    make_group: MakeGroup, layout: tuple[int, int], depth: int, late: int, speculation: Speculation | None, blocks: int
) -> ServedAnswers:
    """Serve five requests on four seats, with `blocks` of KV cache."""
    drafts, served = 0 if speculation is None else speculation.num_speculative_tokens, requests()[:5]
    tp, pp = layout
    group = make_group(tp, pp, speculation=speculation, sim_step_ms=0.5 * pp, sim_draft_acceptance="request")
    steps, size = SimGroupSteps(group), replace(limits(blocks, depth, speculation, pp), max_num_seqs=SLOTS // 2)
    driver = EngineDriver(steps, size, VOCAB, depth, late, drafts, patience=0.02)
    answers = driver.serve(served)
    steps.finish()
    group.leave()
    return ServedAnswers(answers, [request.scores for request in served], driver.core.store.counters)


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["without drafts", "ngram"])
@pytest.mark.parametrize(
    ("layout", "blocks"),
    [((1, 1), 96), ((1, 1), 16), ((2, 1), 96), ((1, 2), 16), pytest.param((2, 2), 96, marks=pytest.mark.soak)],
)
def test_ranks_leave_out_the_same_rows(
    make_group: MakeGroup, layout: tuple[int, int], blocks: int, speculation: Speculation | None
) -> None:
    """Tokens and log-probabilities are those of one rank at depth one, with few blocks too. Every rank verifies
    positions, drafts and tokens of the others."""
    wanted = serve(make_group, (1, 1), 1, 0, None, 96)
    assert [len(tokens) for tokens in wanted.answers] == [14] * 5
    for depth, late in ((1, 1), (2, 1), (3, 3)) if layout == (1, 1) else ((2 * layout[1], 1),):
        served = serve(make_group, layout, depth, late, speculation, blocks)
        assert served.answers == wanted.answers
        assert served.scores == wanted.scores
        assert (served.counters["left_out_rows_total"] > 3) == (depth > 1)
        assert blocks > 16 or served.counters["num_preemptions"] > 0
        assert speculation is None or served.counters["spec_decode_num_accepted_tokens"] > 0

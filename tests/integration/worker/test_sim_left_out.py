"""Constrained rows whose masks are late are left out on the simulator, with the production scheduler core in front."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from protocol.codec import unpack
from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from tests.integration.native.engine_driver import EngineDriver
from tests.integration.native.test_left_out import ServedAnswers, limits, requests
from tests.unit.worker.plans import VOCAB

NGRAM = Speculation("ngram", 3)


class SimSteps:
    """`LaunchedSteps` on one simulated rank; a thread of its own waits for results, as in a worker."""

    def __init__(self, runner: SimRunner) -> None:
        self._runner = runner
        self._results: deque[Future[ModelRunnerOutput | StepTimes]] = deque()
        self._thread = ThreadPoolExecutor(1)

    def launch(self, plan: SchedulerOutput) -> None:
        self._runner.execute_model(plan)
        self._results.append(self._thread.submit(self._runner.sample_tokens(None).get))

    def add_masks(self, grammar: GrammarOutput) -> None:
        self._runner.add_masks(grammar)

    def release(self, slots: bytes) -> None:
        self._runner.release(np.array(unpack(slots)))

    def ended(self) -> bool:
        return self._results[0].done()

    def result(self) -> ModelRunnerOutput:
        result = self._results.popleft().result()
        assert isinstance(result, ModelRunnerOutput)
        return result

    def close(self) -> None:
        self._thread.shutdown()


def serve(depth: int, late: int, speculation: Speculation | None = None, num_blocks: int = 96) -> ServedAnswers:
    size, served = limits(num_blocks, depth, speculation), requests()
    config = WorkerConfig(backend="sim", sim_vocab_size=VOCAB, sim_step_ms=0.5, sim_draft_acceptance="request")
    runner = SimRunner(config, full_check=True)
    assert runner.identify().leaves_rows_out
    sizes = size.block_size, size.num_slots, size.max_num_batched_tokens, size.max_model_len
    runner.load(Assignment(1, 0, 1, *sizes, speculation=speculation), lambda phase, fraction: None)
    runner.init_kv_cache(InitializeCache(size.num_blocks, size.max_model_len))
    steps, drafts = SimSteps(runner), 0 if speculation is None else speculation.num_speculative_tokens
    driver = EngineDriver(steps, size, VOCAB, depth, late, drafts, patience=0.02)
    answers = driver.serve(served)
    steps.close()
    runner.shutdown()
    return ServedAnswers(answers, [request.scores for request in served], driver.core.store.counters)


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["without drafts", "ngram"])
@pytest.mark.parametrize("num_blocks", [96, 22], ids=["roomy", "preempting"])
def test_answers_are_those_of_depth_one(speculation: Speculation | None, num_blocks: int) -> None:
    """Tokens and log-probabilities."""
    wanted = serve(1, 0)
    assert [len(tokens) for tokens in wanted.answers] == [14] * 7
    for depth, late in ((1, 1), (2, 1), (2, 2), (3, 3)):
        served = serve(depth, late, speculation, num_blocks)
        assert served.answers == wanted.answers
        assert served.scores == wanted.scores
        assert (served.counters["left_out_rows_total"] > 3) == (depth > 1)
        assert num_blocks > 22 or served.counters["num_preemptions"] > 0
        assert speculation is None or served.counters["spec_decode_num_accepted_tokens"] > 0

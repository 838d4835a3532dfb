"""vLLM's drafters under the scheduler: the same tokens (docs/invariants.md) as without drafts, at any depth."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import msgspec
import pytest

from protocol.membership import Assignment, Speculation
from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.worker.backends.vllm import VllmRunner
from services.worker.runner import LoadError
from tests.random_models import edit_config
from tests.vllm import checkpoints
from tests.vllm.driver import BLOCK, CHUNK, CONTEXT, VllmRun, VllmStream, VllmWorker
from tests.vllm.parameter_cases import (
    DRAFTS,
    FEW_BLOCKS,
    GREEDY,
    PARAMETER_CASES,
    SAMPLED,
    all_streams,
    assert_all_equal,
    prompt_of,
)
from tests.vllm.test_speculation import REPEATED, K, accepted


def streams() -> list[VllmStream]:
    """Return a request for each parameter, one that repeats itself, and two that fill the context."""
    length, few = CONTEXT - 16, {"max_tokens": 16}
    near = [
        VllmStream(prompt_of(number, length), msgspec.structs.replace(params, **few))
        for number, params in enumerate((GREEDY, SAMPLED))
    ]
    return [*all_streams(), VllmStream(REPEATED, GREEDY), *near]


@pytest.fixture(scope="module")
def plain() -> list[VllmStream]:
    """Answers without drafts, at depth one."""
    worker = VllmWorker()
    with VllmRun(worker, 1, prefix_caching=False) as run:
        answers = run.serve(*streams())
    worker.runner.shutdown()
    return answers


@pytest.fixture(scope="module", params=["ngram", "eagle", "draft_model"])
def worker(
    request: pytest.FixtureRequest, plain: list[VllmStream], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmWorker]:
    """A worker with n-gram drafts, with the demo model's own head, or with the demo model as its own draft model."""
    eagle = request.param == "eagle"
    path = checkpoints.make_eagle(tmp_path_factory.mktemp("drafter") / "eagle") if eagle else DEMO_MODEL
    worker = VllmWorker(DRAFTS if request.param == "ngram" else Speculation(request.param, K, str(path)))
    yield worker
    worker.runner.shutdown()


def test_answers_and_accepted_drafts_are_equal_at_any_depth(worker: VllmWorker, plain: list[VllmStream]) -> None:
    """Same tokens, equal acceptance. With every parameter, grammars, log-probabilities, and prompts in chunks."""
    rows = []
    for depth in (1, 3):
        with VllmRun(worker, depth, prefix_caching=False) as run:
            got = run.serve(*streams())
            assert accepted(run) > 0
        assert_all_equal(got, plain)
        # The context cuts drafts of the last two, and a constrained row that follows a left-out one has none.
        rows.append([s.rows for s in got[:-2] if s.structured is None])
    assert rows[0] == rows[1]
    assert max(map(max, rows[0])) == K + 1


def test_preemptions_and_late_masks_change_no_answer(worker: VllmWorker, plain: list[VllmStream]) -> None:
    """Also with drafts of prefixes that other requests have computed."""
    with VllmRun(worker, 3, num_blocks=FEW_BLOCKS, late=5) as run:
        assert_all_equal(run.serve(*streams()), plain)
        assert run.core.stats()["num_preemptions"] >= 3
        assert run.core.stats()["left_out_rows_total"] > 3
        assert accepted(run) > 0


class Varying:
    """A `Drafting`: another number of drafts in each step, and none now and then."""

    min_acceptance = 0.0
    is_trial = rests = False

    def __init__(self) -> None:
        self._numbers = cycle((K, 0, 1, 2))

    def length(self, num_rows: int) -> int:
        return next(self._numbers)

    def observe(self, *step: object) -> None:
        """Observations are ignored."""


def test_number_of_drafts_may_change_in_every_step(worker: VllmWorker, plain: list[VllmStream]) -> None:
    """A step without drafts keeps the drafter's KV cache complete."""
    with VllmRun(worker, 2, drafting=Varying()) as run:
        assert_all_equal(run.serve(*streams()), plain)
        assert accepted(run) > 0


def test_request_continues_in_the_next_epoch(worker: VllmWorker, plain: list[VllmStream]) -> None:
    number = list(PARAMETER_CASES).index("grammar, sampled, penalties")
    stream = streams()[number]
    stream.tokens = plain[number].tokens[:10]
    with VllmRun(worker, 2) as run:
        assert run.serve_one(0, stream).tokens == plain[number].tokens


def test_model_that_drafts_for_itself_is_always_right(worker: VllmWorker) -> None:
    """Every position of the draft model is computed from the right tokens and blocks."""
    if worker.speculation.method != "draft_model":
        pytest.skip("a head is not the model")
    requests = [VllmStream(prompt_of(n, 20 + 30 * n), GREEDY) for n in range(5)]
    with VllmRun(worker, 2) as run:
        for stream in run.serve(*requests):
            assert stream.rows[0] == 1
            assert set(stream.rows[1:-1]) == {K + 1}


def refusal(speculation: Speculation) -> str:
    runner = VllmRunner(WorkerConfig(model=str(DEMO_MODEL), backend="vllm", enforce_eager=True))
    assignment = Assignment(1, 0, 1, BLOCK, 8, CHUNK, CONTEXT, speculation=speculation)
    with pytest.raises(LoadError) as refused:
        runner.load(assignment, lambda phase, fraction: None)
    return str(refused.value)


def test_drafters_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    assert refusal(Speculation("eagle", K)) == '"method": "eagle" needs a "model" with --backend vllm'
    assert refusal(Speculation("eagle", K, "/no/such/head")).startswith("the drafter: no such model directory")
    assert "shorter" in refusal(Speculation("draft_model", K, str(DEMO_MODEL), max_model_len=CONTEXT - 1))
    short = checkpoints.make_eagle(tmp_path / "short")
    edit_config(short, max_position_embeddings=128)
    assert refusal(Speculation("eagle", K, str(short))).endswith("use --max-model-len 128")

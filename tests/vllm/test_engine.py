"""vLLM under the scheduler: neither depth nor preemption nor aborts nor other requests change an answer."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

import numpy as np
import pytest
import torch

from protocol.membership import Assignment
from protocol.requests import FinishReason
from protocol.sampling import Pooling, SamplingParams
from services.checkpoint import DEMO_MODEL, read_text, text_digest
from services.config import WorkerConfig
from services.scheduler.capabilities import Combination, refusal, table
from services.worker.backends.vllm import VllmRunner
from services.worker.backends.vllm.engine_config import EngineOptions, create_engine_config
from services.worker.runner import LoadError
from services.worker.weights import layer_contents
from services.worker.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.matrix import covering
from tests.simulation.grammar import Automaton
from tests.vllm.driver import BLOCK, CHUNK, CONTEXT, VOCAB, VllmRun, VllmStream, VllmWorker
from tests.vllm.parameter_cases import (
    DEPTHS,
    FEW_BLOCKS,
    GRAMMAR,
    GREEDY,
    PARAMETER_CASES,
    SAMPLED,
    all_streams,
    assert_all_equal,
    assert_equal,
    each_depth,
    prompt_of,
)


@pytest.fixture(scope="module")
def worker() -> Iterator[VllmWorker]:
    worker = VllmWorker()
    yield worker
    worker.runner.shutdown()


@pytest.fixture(scope="module")
def alone(worker: VllmWorker) -> dict[str, VllmStream]:
    """Answers of requests that run alone at depth one."""
    streams = dict(zip(PARAMETER_CASES, all_streams(), strict=True))
    with VllmRun(worker, 1, prefix_caching=False) as run:
        for stream in streams.values():
            run.serve(stream)
    return streams


@pytest.mark.parametrize(("depth", "prefix_caching"), covering(DEPTHS, [False, True], strength=1))
def test_answers_equal_those_of_requests_alone(
    depth: int, prefix_caching: bool, worker: VllmWorker, alone: dict[str, VllmStream]
) -> None:
    with VllmRun(worker, depth, prefix_caching=prefix_caching) as run:
        assert_all_equal(run.serve(*all_streams()), alone.values())
        assert run.core.stats()["num_preemptions"] == 0


@each_depth
def test_preemption_storm_changes_no_answer(depth: int, worker: VllmWorker, alone: dict[str, VllmStream]) -> None:
    """The tokens of a preempted request stay output: penalties, random numbers and log-probabilities continue."""
    with VllmRun(worker, depth, num_blocks=FEW_BLOCKS) as run:
        assert_all_equal(run.serve(*all_streams()), alone.values())
        assert run.core.stats()["num_preemptions"] >= 3


def test_the_number_of_threads_may_change_between_steps(
    worker: VllmWorker, alone: dict[str, VllmStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()

    class Alternating:
        def __init__(self) -> None:
            self._numbers = cycle((1, 2))

        def choose(self, _: int) -> int:
            return next(self._numbers)

        def record(self, _: float) -> None:
            used.add(torch.get_num_threads())

    with VllmRun(worker, 2) as run:
        monkeypatch.setattr(worker.runner.engine, "threads", Alternating())
        assert_all_equal(run.serve(*all_streams()), alone.values())
    assert used == {1, 2}


CELLS = {
    cell: reason for cell, reason in table() if cell.backend == "vllm" and not cell.structured and not cell.speculation
}
"""Each cell is tested with structured output too. Cells with drafts are in test_speculation.py."""


def test_nothing_is_refused_without_drafts() -> None:
    assert not any(CELLS.values())


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if not cell.pipeline and cell.batching_policy != "chunked"], ids=str
)
def test_supported_cell_gives_the_same_answers(
    cell: Combination, worker: VllmWorker, alone: dict[str, VllmStream]
) -> None:
    assert refusal(replace(cell, structured=True)) is None
    with VllmRun(worker, 1 + cell.runs_ahead, policy=cell.batching_policy) as run:
        assert_all_equal(run.serve(*all_streams()), alone.values())


def test_answers_match_their_grammars(alone: dict[str, VllmStream]) -> None:
    """The other parameters are compared with vLLM's own answers in test_parameters.py."""
    for name in ("grammar", "grammar, sampled, penalties"):
        automaton = Automaton.from_params(GRAMMAR, VOCAB, ())
        assert all(map(automaton.accept, alone[name].tokens)), name


ONE = SamplingParams(max_tokens=1, temperature=0.0)


def test_embedding_is_the_state_that_the_next_token_is_computed_from(worker: VllmWorker) -> None:
    prompts = [prompt_of(number, 20 + 30 * number) for number in range(4)]
    with VllmRun(worker, 2) as run:
        states = run.serve(*(VllmStream(prompt, ONE, pooling=Pooling.LAST) for prompt in prompts))
        model = worker.runner.engine.runner.model
        with torch.inference_mode():
            logits = model.compute_logits(torch.tensor([stream.embedding for stream in states]))
    with VllmRun(worker, 1) as run:
        tokens = [stream.tokens[0] for stream in run.serve(*(VllmStream(prompt, ONE) for prompt in prompts))]
    assert logits.argmax(-1).tolist() == tokens


@each_depth
def test_mean_is_that_of_all_states_in_chunks_and_with_generation_in_the_batch(depth: int, worker: VllmWorker) -> None:
    prompt = prompt_of(3, 6)
    long = prompt_of(1, 200)
    with VllmRun(worker, depth) as run:
        prefixes = run.serve(*(VllmStream(prompt[: i + 1], ONE, pooling=Pooling.LAST) for i in range(6)))
    expected = np.mean([stream.embedding for stream in prefixes], axis=0)
    with VllmRun(worker, 1) as run:
        [alone] = run.serve(VllmStream(long, ONE, pooling=Pooling.MEAN))
    with VllmRun(worker, depth) as run:
        mixed = [VllmStream(prompt_of(n, 50), SAMPLED) for n in range(4)]
        means = [VllmStream(prompt, ONE, pooling=Pooling.MEAN), VllmStream(long, ONE, pooling=Pooling.MEAN)]
        short, chunked = run.serve(*mixed[:2], *means, *mixed[2:])[2:4]
    assert len(long) > 3 * CHUNK
    assert short.embedding == pytest.approx(expected, abs=1e-4)
    assert chunked.embedding == pytest.approx(alone.embedding, abs=1e-4)
    assert short.finish.reason is FinishReason.LENGTH or short.tokens == []


@each_depth
def test_abort_in_the_middle_of_a_prompt(depth: int, worker: VllmWorker, alone: dict[str, VllmStream]) -> None:
    names = ("greedy", "sampled", "another seed")
    with VllmRun(worker, depth, prefix_caching=False) as run:
        streams = [run.add(n, s) for n, s in enumerate(all_streams()[:3])]
        victim = run.add(9, VllmStream(prompt_of(3, 250), GREEDY))
        while victim.tokens == [] and not len(run.core.epoch.running) > 3:
            run.run_step()
        run.run_step()
        assert victim.tokens == []
        run.abort(9)
        run.finish()
        for name, stream in zip(names, streams, strict=True):
            assert_equal(stream, alone[name])


@pytest.mark.parametrize("name", ["greedy", "sampled", "repetition_penalty", "grammar, sampled, penalties"])
def test_request_continues_in_the_next_epoch(name: str, worker: VllmWorker, alone: dict[str, VllmStream]) -> None:
    """Another worker receives only its tokens: they stay output, and its random numbers continue."""
    stream = all_streams()[list(PARAMETER_CASES).index(name)]
    expected = alone[name]
    stream.tokens = expected.tokens[:10]
    with VllmRun(worker, 2) as run:
        run.add(0, stream)
        run.finish()
    assert stream.tokens == expected.tokens
    assert {p: s[:2] for p, s in stream.scores.items()}.items() <= {
        p: s[:2] for p, s in expected.scores.items()
    }.items()


def test_epoch_that_ends_between_forward_pass_and_sampling_leaves_nothing(
    worker: VllmWorker, alone: dict[str, VllmStream]
) -> None:
    loads = worker.loads
    with VllmRun(worker, 2) as run:
        for number, stream in enumerate(all_streams()[:6]):
            run.add(number, stream)
        run.run_step()
        sample, worker.runner.sample_tokens = worker.runner.sample_tokens, partial(_fail)  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="lost here"):
            run.run_step()
        worker.runner.sample_tokens = sample  # type: ignore[method-assign]
    with VllmRun(worker, 2) as run:
        assert_all_equal(run.serve(*all_streams()), alone.values())
    assert worker.loads == loads, "the weights are read once"


def _fail(grammar: object) -> None:
    raise RuntimeError("lost here")


def test_block_size_that_does_not_fit_attention_is_refused() -> None:
    runner = VllmRunner(WorkerConfig(model=str(DEMO_MODEL), backend="vllm"))
    with pytest.raises(LoadError, match=r"--block-size 48 is not a multiple of 32.*--block-size 64"):
        runner.load(Assignment(1, 0, 1, 48, 8, 64), lambda phase, fraction: None)


def test_the_performance_mode_is_vllms() -> None:
    settings = WorkerConfig(model=str(DEMO_MODEL), backend="vllm", performance_mode="throughput")
    options = EngineOptions(DEMO_MODEL, "float32", settings, Assignment(1, 0, 1, BLOCK, 8, CHUNK, CONTEXT))
    assert create_engine_config(options, {"kv_cache_memory_bytes": 1}).performance_mode == "throughput"


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    runner = VllmRunner(WorkerConfig(model=str(DEMO_MODEL), backend="vllm"))
    with pytest.raises(LoadError, match=r"there is no no-such-compiler: install it or use --enforce-eager"):
        runner.load(Assignment(1, 0, 1, BLOCK, 8, 64), lambda phase, fraction: None)


def test_context_longer_than_the_models_is_refused() -> None:
    runner = VllmRunner(WorkerConfig(model=str(DEMO_MODEL), backend="vllm"))
    with pytest.raises(LoadError, match="vLLM cannot serve this model"):
        runner.load(Assignment(1, 0, 1, BLOCK, 8, 64, 10**6), lambda phase, fraction: None)


def test_loaded_model_reports_its_sizes(worker: VllmWorker) -> None:
    with VllmRun(worker, 1):
        loaded = worker.loaded
    assert (loaded.vocab_size, loaded.max_model_len, loaded.bytes_per_block) == (VOCAB, CONTEXT, 131072)
    assert loaded.num_blocks == (64 << 20) // 131072 - 1
    assert loaded.hidden_size == 192
    assert torch.get_num_threads() == 1, "--threads"


def test_a_worker_reports_the_digests_of_its_weights_and_of_its_tokenizer(worker: VllmWorker) -> None:
    """The scheduler compares them with those of other workers, and with its own tokenizer."""
    with VllmRun(worker, 1):
        contents = worker.loaded.contents
    assert contents == layer_contents(SafetensorsCheckpoint(DEMO_MODEL), 1)
    text = read_text(DEMO_MODEL, "tokenizer.json")
    assert text is not None
    assert worker.runner.identify().tokenizer == text_digest(text)


def test_memory_for_no_block_is_refused(worker: VllmWorker) -> None:
    """vLLM reserves one block. The last test, because a process has one vLLM at a time."""
    worker.runner.shutdown()
    small = VllmWorker(kv_cache_memory_bytes=131072)
    with pytest.raises(LoadError, match="raise --kv-cache-memory-bytes to 262144"):
        small.enter(1)
    small.runner.shutdown()

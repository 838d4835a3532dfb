"""Every architecture: tokens under our scheduler are those of vLLM's own `LLM.generate`, however the work is cut."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from services.worker.runner import LoadError
from tests.vllm import checkpoints
from tests.vllm.driver import CHUNK, CONTEXT, Run, Stream, Worker
from tests.vllm.preloaded import processes
from tests.vllm.reference import Answers, Ask, answers

DEMO = "demo"
AMX = bool(torch.cpu.get_capabilities().get("amx_tile"))
"""Whether this processor has them: matrix instructions that vLLM's kernels for eight bits prefer."""


class Case(NamedTuple):
    model: str
    dtype: str = "float32"
    hides_amx: bool = False
    """vLLM computes as on a processor without AMX."""


CASES = {
    DEMO: Case(DEMO),
    **{name: Case(name) for name in checkpoints.MAKERS},
    f"{checkpoints.INT8}-bfloat16": Case(checkpoints.INT8, "bfloat16"),
    f"{checkpoints.INT8}-float32": Case(checkpoints.INT8, hides_amx=True),
}
"""With AMX, vLLM's kernels for eight bits take no float32."""
LENGTHS = (5, 150, 33, 70, 64, 96)
"""Of prompts, in tokens: shorter and longer than a block (32) and than what a step may hold (64)."""
OUTPUT = 24
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 2**40 + 1, "top_p": 0.9},
)
FEW = 13
"""Blocks of which the longer half of the requests takes all."""


def asks(kinds: Sequence[dict[str, Any]] = KINDS) -> list[Ask]:
    return [
        Ask([(number * 389 + i * 31) % 4000 + 10 for i in range(length)], {"max_tokens": OUTPUT, **kind})
        for number, length in enumerate(LENGTHS)
        for kind in kinds
    ]


class Ours(msgspec.Struct):
    """What came out under our scheduler."""

    alone: list[list[int]]
    together: dict[str, list[list[int]]]
    """By depth and prefix cache."""
    again: list[list[int]]
    """The same requests once more, their prompts in the prefix cache."""
    tight: list[list[int]]
    """With few blocks."""
    cached_tokens: float
    preemptions: float


def hide_amx() -> None:
    """For the rest of this process."""
    mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False).start()


def ours(model: str, case: Case) -> Ours:
    """Takes a process of its own: vLLM is built in it."""
    if case.hides_amx:
        hide_amx()
    worker = Worker(model=model, dtype=case.dtype)

    def streams() -> list[Stream]:
        return [Stream(ask.prompt, SamplingParams(**ask.params)) for ask in asks()]

    def tokens(run: Run, asked: list[Stream]) -> list[list[int]]:
        return [stream.tokens for stream in run.serve(*asked)]

    with Run(worker, 2, prefix_caching=False) as run:
        alone = [tokens(run, [stream])[0] for stream in streams()]
    together = {}
    for depth, caching in ((1, True), (2, False), (3, True)):
        with Run(worker, depth, prefix_caching=caching) as run:
            together[f"depth {depth}, {caching=}"] = tokens(run, streams())
            if caching:
                again = tokens(run, streams())
                cached = run.core.stats()["prefix_cache_hits"]
    with Run(worker, 3, num_blocks=FEW) as run:
        tight = tokens(run, streams())
        preemptions = run.core.stats()["num_preemptions"]
    return Ours(alone, together, again, tight, cached, preemptions)


def theirs(
    model: str, case: Case = CASES[DEMO], kinds: Sequence[dict[str, Any]] = KINDS, **engine: Any
) -> Answers:
    """Each request alone, then all together."""
    if case.hides_amx:
        hide_amx()
    everything = asks(kinds)
    for ask in everything:
        ask.params["ignore_eos"] = True  # ours names no tokens that end the text
    return answers(
        model, [*([ask] for ask in everything), everything], max_model_len=CONTEXT, dtype=case.dtype, **engine
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with processes() as pool:
        yield pool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("checkpoints")
    made = {name: checkpoints.make(name, directory / name) for name in checkpoints.ARCHITECTURES}
    return {name: str(path) for name, path in {DEMO: DEMO_MODEL, **made}.items()}


@pytest.fixture(scope="module", params=CASES)
def both(
    request: pytest.FixtureRequest, pool: ProcessPoolExecutor, models: dict[str, str]
) -> tuple[Ours, Answers]:
    """What a model said under our scheduler, and under vLLM's."""
    case = CASES[request.param]
    mine, reference = (pool.submit(side, models[case.model], case) for side in (ours, theirs))
    return mine.result(), reference.result()


def test_tokens_are_vllms_alone_and_together(both: tuple[Ours, Answers]) -> None:
    mine, reference = both
    expected = [batch[0] for batch in reference.tokens[:-1]]
    assert reference.tokens[-1] == expected, "vLLM itself answers a batch as it answers each alone"
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert mine.alone == expected
    assert mine.together == dict.fromkeys(mine.together, expected)


def test_prompts_that_the_cache_has_change_nothing(both: tuple[Ours, Answers]) -> None:
    mine, reference = both
    assert mine.again == reference.tokens[-1]
    assert mine.cached_tokens > 0
    assert reference.cached_tokens > 0


def test_preemption_changes_nothing(both: tuple[Ours, Answers]) -> None:
    mine, reference = both
    assert mine.tight == reference.tokens[-1]
    assert mine.preemptions > 0


def test_vllm_itself_says_the_same_however_it_is_set(pool: ProcessPoolExecutor) -> None:
    """So that what others are compared with is no accident of its settings."""
    greedy = KINDS[:1]
    settings: list[tuple[Sequence[dict[str, Any]], dict[str, Any]]] = [
        (KINDS, {}),
        (KINDS, {"enable_prefix_caching": False}),
        (KINDS, {"num_gpu_blocks_override": FEW}),
        # Greedy: vLLM's CPU build fails on a request with a seed whose prompt takes several steps.
        (greedy, {"max_num_batched_tokens": CHUNK}),
    ]
    running = [pool.submit(theirs, str(DEMO_MODEL), kinds=kinds, **engine) for kinds, engine in settings]
    plain, uncached, few, chunks = (future.result() for future in running)
    assert uncached.tokens == few.tokens == plain.tokens
    assert chunks.tokens[-1] == plain.tokens[-1][:: len(KINDS)]
    assert (plain.cached_tokens > 0, uncached.cached_tokens) == (True, 0)
    assert (plain.preemptions, few.preemptions > 0) == (0, True)


def refusal(model: str) -> str:
    """The error of a worker that loads `model` in float32 where vLLM's kernel takes no float32."""
    error = RuntimeError("int8_scaled_mm_with_quant: expect A to be bfloat16 or half.")
    if not AMX:
        mock.patch.object(CPUInt8ScaledMMLinearKernel, "apply_weights", side_effect=error).start()
    with pytest.raises(LoadError) as refused:
        Worker(model=model, dtype="float32").enter(FEW)
    return str(refused.value)


def test_dtype_that_a_kernel_does_not_take_is_refused_by_name(
    pool: ProcessPoolExecutor, models: dict[str, str]
) -> None:
    text = pool.submit(refusal, models[checkpoints.INT8]).result()
    assert "cannot compute compressed-tensors weights in float32 (int8_scaled_mm_with_quant" in text
    assert text.endswith("use --dtype bfloat16")

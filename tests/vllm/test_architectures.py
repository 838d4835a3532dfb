"""Every architecture: tokens under this scheduler equal those of vLLM's own `LLM.generate`, at any depth and batch."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

from protocol.kv_groups import num_states
from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from services.worker.runner import LoadError
from tests.vllm import checkpoints
from tests.vllm.driver import CHUNK, CONTEXT, VllmRun, VllmStream, VllmWorker
from tests.vllm.reference import VllmAnswers, VllmRequest, generate

DEMO = "demo"
AMX = bool(torch.cpu.get_capabilities().get("amx_tile"))
"""True: this processor has the matrix instructions that vLLM's kernels for eight bits prefer."""


class ArchitectureCase(NamedTuple):
    model: str
    dtype: str = "float32"
    hides_amx: bool = False
    """Make vLLM compute as on a processor without AMX."""


CASES = {
    DEMO: ArchitectureCase(DEMO),
    **{name: ArchitectureCase(name) for name in checkpoints.MAKERS},
    f"{checkpoints.INT8}-bfloat16": ArchitectureCase(checkpoints.INT8, "bfloat16"),
    f"{checkpoints.INT8}-float32": ArchitectureCase(checkpoints.INT8, hides_amx=True),
}
"""With AMX, vLLM's kernels for eight bits do not support float32."""
PER_CHANGE = {"gemma3", "mistral-window", "gpt-oss", "granite-hybrid", f"{checkpoints.INT8}-bfloat16"}
"""Each kind of KV cache, states, experts, and other weights. The demo model is in test_parameters.py. The layers of the
others are vLLM's alone; `make soak` runs all."""
LENGTHS = (5, 150, 33, 70, 64, 96)
"""Tokens of each prompt: shorter and longer than a block (32) and than the budget of a step (64)."""
OUTPUT = 24
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 2**40 + 1, "top_p": 0.9})
GROUPS = {
    "gemma3": ["full_attention", "sliding_window", "sliding_window"],
    "gpt-oss": ["full_attention", "sliding_window"],
    "mistral-window": ["sliding_window"],
    "granite-hybrid": ["full_attention", "recurrent_state", "recurrent_state", "recurrent_state"],
    "falcon-h1": ["full_attention", "recurrent_state"],
}
"""Groups of KV cache of models with windows or recurrent states."""
HYBRIDS = ("granite-hybrid", "falcon-h1")
"""With its prefix cache, vLLM's CPU build fails on them, and this scheduler turns its own off."""
FEW_BLOCKS = 13
"""Number of blocks that the longer half of the requests fills."""


def vllm_requests(kinds: Sequence[dict[str, Any]] = KINDS) -> list[VllmRequest]:
    return [
        VllmRequest([(number * 389 + i * 31) % 4000 + 10 for i in range(length)], {"max_tokens": OUTPUT, **kind})
        for number, length in enumerate(LENGTHS)
        for kind in kinds
    ]


class ArchitectureAnswers(msgspec.Struct):
    """Tokens under this scheduler, by request."""

    alone: list[list[int]]
    """Every third request, alone."""
    together: dict[str, list[list[int]]]
    """All requests together, by depth."""
    again: list[list[int]]
    """The same requests again, with their prompts in the prefix cache."""
    preempted: list[list[int]]
    """With few blocks, so that requests are preempted."""
    cached_tokens: float
    preemptions: float
    groups: list[str]
    """Kind of each group of KV cache."""


def hide_amx() -> None:
    """Hide AMX from vLLM for the rest of this process."""
    mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False).start()


def answer(model: str, case: ArchitectureCase) -> ArchitectureAnswers:
    """Needs a new process, because it creates vLLM."""
    if case.hides_amx:
        hide_amx()
    worker = VllmWorker(model=model, dtype=case.dtype)

    def streams() -> list[VllmStream]:
        return [VllmStream(request.prompt, SamplingParams(**request.params)) for request in vllm_requests()]

    def tokens(run: VllmRun, streams: list[VllmStream]) -> list[list[int]]:
        return [stream.tokens for stream in run.serve(*streams)]

    with VllmRun(worker, 2, prefix_caching=False) as run:
        alone = [tokens(run, [stream])[0] for stream in streams()[::3]]
    together = {}
    for depth in (1, 3):
        with VllmRun(worker, depth) as run:
            together[f"depth {depth}"] = tokens(run, streams())
            again = tokens(run, streams())
            cached = run.core.stats()["prefix_cache_hits"]
    of_states = num_states(worker.loaded.groups)
    tables = max(1, len(worker.loaded.groups) - of_states)
    few = FEW_BLOCKS * (2 * tables + 1) // 3 + 2 * of_states  # windows hold less than a table each
    with VllmRun(worker, 3, num_blocks=few) as run:
        preempted = tokens(run, streams())
        preemptions = run.core.stats()["num_preemptions"]
    groups = [group.kind for group in worker.loaded.groups]
    return ArchitectureAnswers(alone, together, again, preempted, cached, preemptions, groups)


def reference(
    model: str, case: ArchitectureCase = CASES[DEMO], kinds: Sequence[dict[str, Any]] = KINDS, **engine: Any
) -> VllmAnswers:
    """vLLM's answers to all requests together, and again."""
    if case.hides_amx:
        hide_amx()
    requests = vllm_requests(kinds)
    for request in requests:
        request.params["ignore_eos"] = True  # the streams have no end tokens
    return generate(
        model,
        [requests, requests],
        max_model_len=CONTEXT,
        dtype=case.dtype,
        **{} if case.model not in HYBRIDS else {"enable_prefix_caching": False},
        **engine,
    )


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in PER_CHANGE else pytest.mark.soak) for name in CASES]
)
def both(
    request: pytest.FixtureRequest, pool: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ArchitectureAnswers, VllmAnswers]:
    """Answers of a model under this scheduler, and under vLLM's."""
    case = CASES[request.param]
    model = DEMO_MODEL
    if case.model != DEMO:
        model = checkpoints.make(case.model, tmp_path_factory.mktemp("checkpoints") / case.model)
    mine, vllms = (pool.submit(side, str(model), case) for side in (answer, reference))
    return mine.result(), vllms.result()


def test_tokens_equal_vllms_alone_and_together(both: tuple[ArchitectureAnswers, VllmAnswers]) -> None:
    mine, vllms = both
    expected, again = vllms.tokens
    assert again == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert mine.alone == expected[::3]
    assert mine.together == dict.fromkeys(mine.together, expected)


def test_cached_prompts_change_no_token(
    request: pytest.FixtureRequest, both: tuple[ArchitectureAnswers, VllmAnswers]
) -> None:
    mine, vllms = both
    is_cached = request.node.callspec.params["both"] not in HYBRIDS
    assert mine.again == vllms.tokens[-1]
    assert (mine.cached_tokens > 0) == is_cached
    assert (vllms.cached_tokens > 0) == is_cached


def test_layers_with_a_window_or_a_state_have_block_tables_of_their_own(
    request: pytest.FixtureRequest, both: tuple[ArchitectureAnswers, VllmAnswers]
) -> None:
    expected = GROUPS.get(request.node.callspec.params["both"], [])
    assert sorted(both[0].groups) == expected


def test_preemption_changes_no_token(both: tuple[ArchitectureAnswers, VllmAnswers]) -> None:
    mine, vllms = both
    assert mine.preempted == vllms.tokens[-1]
    assert mine.preemptions > 0


@pytest.mark.soak
def test_vllms_own_settings_change_no_token(pool: ProcessPoolExecutor) -> None:
    """The reference does not depend on vLLM's settings."""
    greedy = KINDS[:1]
    settings: list[tuple[Sequence[dict[str, Any]], dict[str, Any]]] = [
        (KINDS, {}),
        (KINDS, {"enable_prefix_caching": False}),
        (KINDS, {"num_gpu_blocks_override": FEW_BLOCKS}),
        # Greedy, because vLLM's CPU build fails on a seeded request whose prompt takes several steps.
        (greedy, {"max_num_batched_tokens": CHUNK}),
    ]
    running = [pool.submit(reference, str(DEMO_MODEL), kinds=kinds, **engine) for kinds, engine in settings]
    plain, uncached, few, chunks = (future.result() for future in running)
    assert uncached.tokens == few.tokens == plain.tokens
    assert chunks.tokens[-1] == plain.tokens[-1][:: len(KINDS)]
    assert (plain.cached_tokens > 0, uncached.cached_tokens) == (True, 0)
    assert (plain.preemptions, few.preemptions > 0) == (0, True)


def refusal(model: str) -> str:
    """Return the error of a worker that loads `model` in float32 where vLLM's kernel does not support it."""
    error = RuntimeError("int8_scaled_mm_with_quant: expect A to be bfloat16 or half.")
    if not AMX:
        mock.patch.object(CPUInt8ScaledMMLinearKernel, "apply_weights", side_effect=error).start()
    with pytest.raises(LoadError) as refused:
        VllmWorker(model=model, dtype="float32").enter(FEW_BLOCKS)
    return str(refused.value)


def test_dtype_that_a_kernel_does_not_support_is_refused_by_name(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    text = pool.submit(refusal, str(checkpoints.make(checkpoints.INT8, tmp_path / "model"))).result()
    assert "cannot compute compressed-tensors weights in float32 (int8_scaled_mm_with_quant" in text
    assert text.endswith("use --dtype bfloat16")

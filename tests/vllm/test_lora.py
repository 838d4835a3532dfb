"""LoRA adapters: tokens under this scheduler equal those of vLLM's own `LLM.generate` with the same adapters."""

import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from protocol.lora import LoRAAdapter
from protocol.requests import Finish, FinishReason
from protocol.sampling import SamplingParams
from services.frontend.adapters import Adapters
from services.worker.runner import LoadError
from tests.vllm import checkpoints
from tests.vllm.driver import VllmRun, VllmStream, VllmWorker
from tests.vllm.reference import VllmRequest, generate

LENGTHS = (5, 70, 33, 64)
"""Tokens of each prompt: shorter and longer than a block (32) and than the budget of a step (64)."""
OUTPUT = 16
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 7, "prompt_logprobs": 1})


def vllm_requests(adapters: list[LoRAAdapter]) -> list[VllmRequest]:
    """Each prompt with the model and with each adapter, so that a hit across adapters would change tokens."""
    return [
        VllmRequest(
            [(number * 389 + i * 31) % 4000 + 10 for i in range(length)],
            {"max_tokens": OUTPUT, "ignore_eos": True, **KINDS[number % 2]},
            lora=adapter,
        )
        for number, length in enumerate(LENGTHS)
        for adapter in (None, *adapters)
    ]


class LoRAAnswers(msgspec.Struct):
    """Tokens of each answer, then the likeliest tokens of its prompt, if it asks for them."""

    together: dict[str, list[list[int]]]
    """By maximum of adapters in a step and depth."""
    preempted: list[list[int]]
    preemptions: float
    failed: list[Finish | None]
    """Ends of a request whose adapter has other files than it names, and of one beside it."""
    kept: list[list[int]]
    """Answers of requests beside which another adapter comes, when the files of theirs are gone."""


def answer(model: str, adapters: list[LoRAAdapter], third: LoRAAdapter) -> LoRAAnswers:
    """Needs a new process, because it creates vLLM. The adapters have one name, which was given to other files."""
    together, kept = {}, []
    adapters = [
        msgspec.structs.replace(adapter, name="a", path=shutil.copytree(adapter.path, f"{adapter.path}-copy"))
        for adapter in adapters
    ]

    def serve(run: VllmRun) -> list[list[int]]:
        streams = [VllmStream(r.prompt, SamplingParams(**_own(r.params)), lora=r.lora) for r in vllm_requests(adapters)]
        return [[*s.tokens, *(ids[1] for _, ids, _ in s.scores.values())] for s in run.serve(*streams)]

    worker = VllmWorker(model=model, dtype="float32", max_loras=2)
    for depth in (1, 3):
        with VllmRun(worker, depth) as run:
            together[f"two, depth {depth}"] = serve(run)
            together[f"two, depth {depth}, cached prompts"] = serve(run)
    with VllmRun(worker, 3, num_blocks=13) as run:
        preempted = serve(run)
        preemptions = run.core.stats()["num_preemptions"]
    changed = msgspec.structs.replace(adapters[0], digest="0" * 64)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
    with VllmRun(worker, 3) as run:
        beside = [VllmStream([5] * 70, params, lora=adapter) for adapter in (changed, None)]
        failed = [stream.finish for stream in run.serve(*beside)]
    for ended in (0, 1):
        with VllmRun(worker, 2) as run:
            pair = [VllmStream(r.prompt, SamplingParams(**_own(r.params)), lora=r.lora) for r in _greedy(adapters)]
            for number, stream in enumerate((*pair, VllmStream([5] * 70, params, lora=third))):
                run.add(number, stream)
            while not all(stream.tokens for stream in pair):
                run.run_step()
            for adapter in adapters:
                Path(adapter.path).rename(f"{adapter.path}-gone")
            run.abort(ended)
            run.finish()
            kept.append(pair[1 - ended].tokens)
            for adapter in adapters:
                Path(f"{adapter.path}-gone").rename(adapter.path)
    worker.max_loras = 1  # vLLM is loaded again
    with VllmRun(worker, 2) as run:
        together["one, depth 2"] = serve(run)
    return LoRAAnswers(together, preempted, preemptions, failed, kept)


def _greedy(adapters: list[LoRAAdapter]) -> list[VllmRequest]:
    """A request with each adapter."""
    return [r for r in vllm_requests(adapters) if r.lora is not None and len(r.prompt) == 33]


def _own(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "ignore_eos"}


def reference(model: str, adapters: list[LoRAAdapter]) -> list[list[int]]:
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_prefix_caching": False}
    alone = [[request] for request in vllm_requests(adapters)]  # beside adapters, vLLM's answers of the model are wrong
    answers = generate(model, alone, max_model_len=256, **settings)
    likeliest = [[max(score, key=score.__getitem__) for _, score in batch[0].values()] for batch in answers.scores]
    return [[*batch[0], *scored] for batch, scored in zip(answers.tokens, likeliest, strict=True)]


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen3", marks=pytest.mark.soak)])
def test_tokens_equal_vllms(architecture: str, pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    base = checkpoints.make(architecture, tmp_path / "base")
    loading = Adapters(base, 8)
    *adapters, third = (
        loading.load(name, str(checkpoints.make_adapter(tmp_path / name, base, seed)))
        for seed, name in enumerate("abc")
    )
    own, vllms = pool.submit(answer, str(base), adapters, third), pool.submit(reference, str(base), adapters)
    mine, expected = own.result(), vllms.result()
    assert len({tuple(tokens) for tokens in expected}) == len(expected)  # every adapter changes every answer
    assert mine.together == dict.fromkeys(mine.together, expected)
    assert mine.preempted == expected
    assert mine.preemptions > 0
    assert [end and end.reason for end in mine.failed] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert mine.kept == expected[8:6:-1]


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    worker = VllmWorker(model=str(checkpoints.make("qwen2-moe", tmp_path / "experts")), max_loras=1)
    with pytest.raises(LoadError, match="models with experts are served without --enable-lora"):
        worker.enter(9)


def named_modules() -> tuple[str, ...]:
    """Needs a new process, because it imports vLLM."""
    from vllm.model_executor.models.utils import WeightsMapper

    from services.worker.backends.vllm.adapters import adapted_modules

    adapters = SimpleNamespace(supported_lora_modules=["proj", "qkv"], packed_modules_mapping={})
    mapper = WeightsMapper(orig_to_new_substr={".attn.qkv_proj.": ".attn.qkv.", ".attn.out_proj.": ".attn.proj."})
    adapters.model = SimpleNamespace(hf_to_vllm_mapper=mapper)
    weights = [f"vision_tower.blocks.0.attn.{name}.weight" for name in ("out_proj", "qkv_proj", "norm")]
    return adapted_modules(SimpleNamespace(_adapter_manager=adapters), weights)


def test_modules_have_the_names_of_the_checkpoint_too(pool: ProcessPoolExecutor) -> None:
    assert pool.submit(named_modules).result() == ("out_proj", "proj", "qkv", "qkv_proj")

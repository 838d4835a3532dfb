"""The reference: vLLM's own `LLM.generate`, each engine in a process of its own."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from vllm import LLM, PoolingParams, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.reader import Counter

from protocol.lora import LoRAAdapter

_SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
}
_created: list[LLM] = []
_GENERATING = _SETTINGS | {"block_size": 32, "num_gpu_blocks_override": 256}


class VllmRequest(msgspec.Struct):
    """One request."""

    prompt: list[int]
    params: dict[str, Any]
    """Fields of vLLM's SamplingParams."""
    set_afterwards: dict[str, Any] = {}
    """The same, set afterwards, because vLLM's frontend takes them as text only."""
    lora: LoRAAdapter | None = None

    def sampling_params(self) -> SamplingParams:
        params = SamplingParams(**self.params)
        for name, value in self.set_afterwards.items():
            setattr(params, name, value)
        return params


Score = tuple[int, dict[int, float]]
"""The token's rank, and log-probabilities by token, its own among them."""


class VllmAnswers(msgspec.Struct):
    tokens: list[list[list[int]]]
    """Token ids of each request of each batch."""
    scores: list[list[dict[int, Score]]]
    """Log-probabilities by position, of each request of each batch."""
    preemptions: int
    """Number of preemptions in all batches."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache, in all batches."""


def _create(model: str, **engine: Any) -> LLM:
    """Return vLLM's own engine, which compiles parts of its sampler even with `enforce_eager` unless torch may not. It
    is kept, because the process ends faster than the engine."""
    torch.compiler.set_stance("force_eager")
    _created.append(LLM(model=model, **engine))
    return _created[-1]


def generate(model: str, batches: list[list[VllmRequest]], **engine: Any) -> VllmAnswers:
    """Return vLLM's answers to each batch, one batch after the other. The process must end afterwards, because vLLM
    cannot be created twice.

    Args:
        engine: fields of EngineArgs
    """
    llm = _create(model, **{**_GENERATING, "disable_log_stats": False, "skip_tokenizer_init": True, **engine})
    tokens, scores = [], []
    for batch in batches:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt} for request in batch],
            [request.sampling_params() for request in batch],
            use_tqdm=False,
            lora_request=[r.lora and LoRARequest(r.lora.name, r.lora.number, r.lora.path) for r in batch],
        )
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
        scores.append([_scores(output) for output in outputs])
    counts = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    return VllmAnswers(tokens, scores, counts["vllm:num_preemptions"], counts["vllm:prefix_cache_hits"])


def chat(
    model: str,
    conversations: list[Any],
    params: list[dict[str, Any]],
    adapters: Sequence[LoRAAdapter | None] = (None,),
    **engine: Any,
) -> list[tuple[list[int], list[int]]]:
    """Return the prompt and the answer of `LLM.chat` for each adapter and conversation. The process must end
    afterwards."""
    llm = _create(model, **{**_GENERATING, **engine})
    outputs = [
        output
        for lora in adapters  # beside adapters, vLLM's answers of the model are wrong
        for output in llm.chat(
            conversations,
            [SamplingParams(**fields) for fields in params],
            use_tqdm=False,
            lora_request=lora and LoRARequest(lora.name, lora.number, lora.path),
        )
    ]
    return [(list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)) for output in outputs]


def pool_texts(model: str, method: str, arguments: list[Any], **engine: Any) -> list[list[float]]:
    """Return the numbers of `LLM.embed`, `LLM.classify` or `LLM.score` for texts. The process must end afterwards."""
    llm = _create(model, **{**_SETTINGS, **engine})
    outputs = getattr(llm, method)(*arguments, use_tqdm=False)
    field = {"embed": "embedding", "classify": "probs", "score": "score"}[method]
    found = [getattr(output.outputs, field) for output in outputs]
    return [[values] if isinstance(values, float) else list(values) for values in found]


def pool(
    model: str, task: Any, requests: Sequence[tuple[list[int], dict[str, Any]]], **engine: Any
) -> list[list[float]]:
    """Return the numbers that vLLM's `LLM.encode` gives for each prompt, with fields of its PoolingParams. The process
    must end afterwards."""
    llm = _create(model, **{**_SETTINGS, **engine})
    outputs = llm.encode(
        [{"prompt_token_ids": prompt} for prompt, _ in requests],
        [PoolingParams(**fields) for _, fields in requests],
        pooling_task=task,
        use_tqdm=False,
    )
    return [output.outputs.data.float().flatten().tolist() for output in outputs]


def _scores(output: RequestOutput) -> dict[int, Score]:
    """Return log-probabilities by position. vLLM stores them by token id, so a token occurs once per position."""
    prompt, completion = output.prompt_token_ids or [], output.outputs[0]
    tokens = [*prompt, *completion.token_ids]
    rows = [*(output.prompt_logprobs or [None] * len(prompt)), *(completion.logprobs or [])]
    return {
        at: (row[tokens[at]].rank or 0, {token: score.logprob for token, score in row.items()})
        for at, row in enumerate(rows)
        if row
    }

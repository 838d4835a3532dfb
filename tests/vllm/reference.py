"""vLLM's own `LLM.generate`, the reference; each engine in a process of its own."""

from typing import Any

import msgspec
from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.metrics.reader import Counter


class Ask(msgspec.Struct):
    """One request."""

    prompt: list[int]
    params: dict[str, Any]
    """Fields of vLLM's SamplingParams."""
    beyond: dict[str, Any] = {}
    """The same, set afterwards: what vLLM's frontend takes as text only."""

    def sampling_params(self) -> SamplingParams:
        params = SamplingParams(**self.params)
        for name, value in self.beyond.items():
            setattr(params, name, value)
        return params


Score = tuple[int, dict[int, float]]
"""The token's rank, and log-probabilities by token, its own among them."""


class Answers(msgspec.Struct):
    tokens: list[list[list[int]]]
    """Token ids of each request of each batch."""
    scores: list[list[dict[int, Score]]]
    """By position, where log-probabilities are asked for; of each request of each batch."""
    preemptions: int
    """How often a request was preempted, all batches together."""
    cached_tokens: int
    """Prompt tokens that the prefix cache had, all batches together."""


def answers(model: str, batches: list[list[Ask]], **engine: Any) -> Answers:
    """What vLLM says to each batch, one after the other. `engine`: fields of EngineArgs.

    vLLM is built in this process, which ought to end afterwards.
    """
    llm = LLM(
        **{
            "model": model,
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 16,
            "block_size": 32,
            "num_gpu_blocks_override": 256,
            "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": False,
            **engine,
        }
    )
    tokens, scores = [], []
    for batch in batches:
        outputs = llm.generate(
            [{"prompt_token_ids": ask.prompt} for ask in batch],
            [ask.sampling_params() for ask in batch],
            use_tqdm=False,
        )
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
        scores.append([_scores(output) for output in outputs])
    counts = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    return Answers(tokens, scores, counts["vllm:num_preemptions"], counts["vllm:prefix_cache_hits"])


def _scores(output: RequestOutput) -> dict[int, Score]:
    """vLLM keeps them by token: what is asked for stands there once, however often it was named."""
    prompt, said = output.prompt_token_ids or [], output.outputs[0]
    tokens = [*prompt, *said.token_ids]
    rows = [*(output.prompt_logprobs or [None] * len(prompt)), *(said.logprobs or [])]
    return {
        at: (row[tokens[at]].rank or 0, {token: score.logprob for token, score in row.items()})
        for at, row in enumerate(rows)
        if row
    }

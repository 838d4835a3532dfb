"""Adapters of the rows for which vLLM computes log-probabilities of a prompt."""

from typing import Any

import torch

from services.worker.backends.vllm import vllm_api


def score_prompts_with_own_adapters(runner: Any) -> None:
    """Make vLLM's model runner compute the logits of each prompt with its request's adapter.

    vLLM computes them with the adapters of the step's sampled tokens: it fails where their number differs from the
    prompt's, also if no request has an adapter.
    """
    score = runner._get_prompt_logprobs_dict  # noqa: SLF001  vLLM has no public method

    def scored(states: torch.Tensor, counts: dict[str, int]) -> dict[str, vllm_api.LogprobsTensors | None]:
        batch = runner.input_batch
        found: dict[str, vllm_api.LogprobsTensors | None] = {}
        for request_id in [name for name in runner.num_prompt_logprobs if name in counts]:
            adapter = (int(batch.request_lora_mapping[batch.req_id_to_index[request_id]]),)
            runner._set_active_loras(adapter, adapter, {*batch.lora_id_to_lora_request.values()})  # noqa: SLF001
            found |= score(states, {request_id: counts[request_id]})
        return found

    runner._get_prompt_logprobs_dict = scored  # noqa: SLF001

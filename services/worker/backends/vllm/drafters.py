"""vLLM's drafters: their configuration, checks of those with a model, and the tokens that these read."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from protocol.membership import Speculation
from services.worker.runner import LoadError
from services.worker.weights import drafter_path


def drafter_config(speculation: Speculation | None) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config`.

    Raises: LoadError, without a checkpoint.
    """
    if speculation is None:
        return None
    method, count = speculation.method, speculation.num_speculative_tokens
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": count}
    if method == "ngram":
        shortest, longest = speculation.prompt_lookup_min, speculation.prompt_lookup_max
        return config | {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    if not speculation.model:
        raise LoadError(f'"method": "{method}" needs a "model" with --backend vllm')
    return config | {"model": str(drafter_path(speculation))}


def check_drafter(config: Any, speculation: Speculation | None) -> None:
    """Check vLLM's `VllmConfig`.

    vLLM drops the drafts of all requests of a step when one of them is too long for the drafter.

    Raises: LoadError, if the model's context is longer than the drafter's, its attention is latent, or a drafter with a
        model would have several ranks.
    """
    if speculation is None:
        return
    if config.model_config.use_mla:
        raise LoadError(
            "--speculative-config: with latent attention, vLLM's CPU build computes other tokens in rows with drafts"
        )
    if speculation.method == "ngram":
        return
    if config.parallel_config.world_size > 1:
        raise LoadError(
            f'"method": "{speculation.method}" has run with one rank only: use "ngram", or --tensor-parallel-size 1 '
            "--pipeline-parallel-size 1"
        )
    longest = int(config.speculative_config.draft_model_config.max_model_len)
    longest = min(longest, speculation.max_model_len or longest)
    if longest < config.model_config.max_model_len:
        raise LoadError(
            f"the drafter reads sequences of {longest} tokens, which with --backend vllm must not be shorter than the "
            f"model's context: use --max-model-len {longest}"
        )


def give_next_tokens_of_chunks(runner: Any) -> None:
    """Make the drafter read the token behind each part of a prompt.

    vLLM lets it read the last token of the prompt there. What the drafter then stores for that position, and how many
    drafts are accepted, would depend on how a prompt is cut, which differs from depth to depth (equal acceptance,
    docs/invariants.md).
    """
    drafter = runner.drafter
    prepare = drafter.prepare_next_token_ids_padded

    def prepared(
        sampled: torch.Tensor, requests: Mapping[str, Any], batch: Any, discarded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, counts = prepare(sampled, requests, batch, discarded)
        for row in np.flatnonzero(discarded[: batch.num_reqs].numpy()).tolist():
            behind = requests[batch.req_ids[row]].get_token_id(int(runner.seq_lens[row]))
            if behind >= 0:  # a row that is left out is the last one of its request
                ids[row] = behind
        return ids, counts

    drafter.prepare_next_token_ids_padded = prepared

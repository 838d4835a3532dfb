"""Verification of drafts: a draft is accepted if vLLM's ordinary sampler draws the same token at its position.

vLLM's own rejection sampler draws one more random number for every draft, so the tokens of a seeded request would
depend on the number of drafts; and it supports neither `min_p` nor `logit_bias`. Here each position of a row is sampled
as the next step would sample it: the accepted tokens before it count as output, and each token has one draw. So the
tokens are those of a run without drafts: the same tokens (docs/invariants.md).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.vllm import vllm_api

NO_TOKEN = -1
"""vLLM's padding of a row of sampled tokens."""


class DraftVerifier:
    """A replacement of vLLM's rejection sampler, for drafters that propose one sequence per row.

    Args:
        sampler: vLLM's sampler
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.acceptable: Mapping[int, int] = {}
        """Largest number of drafts to accept, by row of vLLM's batch. Rows without an entry accept all drafts."""

    def __call__(
        self,
        metadata: vllm_api.SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling: vllm_api.SamplingMetadata,
    ) -> vllm_api.SamplerOutput:
        """Sample every row up to its first rejected draft, and one token more.

        Args:
            logits: [rows + drafts, vocab], those of a row one after the other
            sampling: its `output_token_ids` are vLLM's own lists; they are unchanged on return

        Returns: int32[rows, max drafts + 1] tokens, padded with NO_TOKEN, and the log-probabilities of each.
        """
        drafts, width = np.array(metadata.num_draft_tokens), metadata.max_spec_len + 1
        if width == 1:
            return self._sampler(logits=logits, sampling_metadata=sampling)
        expected, firsts = self._expected(drafts, metadata), np.cumsum(drafts + 1) - drafts - 1
        ids = torch.full((len(drafts), width), NO_TOKEN, dtype=torch.int32)
        tokens, outputs = ids.numpy(), sampling.output_token_ids
        logprobs: list[vllm_api.LogprobsTensors] = []
        open_rows = np.arange(len(drafts))
        for offset in range(width):
            generators = {row: sampling.generators[row] for row in open_rows.tolist() if row in sampling.generators}
            sampled = self._sampler(
                logits=logits[torch.from_numpy(firsts + np.minimum(offset, drafts))],
                sampling_metadata=replace(sampling, generators=generators),
            )
            tokens[open_rows, offset] = sampled.sampled_token_ids[:, 0].numpy()[open_rows]
            logprobs.append(sampled.logprobs_tensors)
            open_rows = open_rows[tokens[open_rows, offset] == expected[open_rows, offset]]
            if not len(open_rows):
                break
            for row, token in zip(open_rows.tolist(), tokens[open_rows, offset].tolist(), strict=True):
                outputs[row].append(token)
            for processor in sampling.logitsprocs.all:
                processor.update_state(None)
        for row, count in enumerate((tokens != NO_TOKEN).sum(1).tolist()):
            del outputs[row][len(outputs[row]) - (count - 1) :]
        return vllm_api.SamplerOutput(ids, _stack_logprobs(logprobs, width))

    def _expected(self, drafts: NDArray[np.int64], metadata: vllm_api.SpecDecodeMetadata) -> NDArray[np.int32]:
        """Return int32[rows, max drafts + 1]: the token that must be sampled at each position for the row to continue,
        or NO_TOKEN at the row's last position."""
        positions = np.arange(metadata.max_spec_len + 1)
        expected = np.full((len(drafts), len(positions)), NO_TOKEN, np.int32)
        expected[positions < drafts[:, None]] = metadata.draft_token_ids.numpy()
        for row, acceptable in self.acceptable.items():
            expected[row, acceptable:] = NO_TOKEN
        return expected


def _stack_logprobs(logprobs: list[vllm_api.LogprobsTensors], width: int) -> vllm_api.LogprobsTensors | None:
    """Return `width` entries per row, the shape that vLLM expects. Entries without a token have arbitrary values."""
    if logprobs[0] is None:
        return None
    logprobs = logprobs + logprobs[-1:] * (width - len(logprobs))
    columns = zip(*(entry[:3] for entry in logprobs), strict=True)
    return vllm_api.LogprobsTensors(*(torch.stack(column, 1).flatten(0, 1) for column in columns))

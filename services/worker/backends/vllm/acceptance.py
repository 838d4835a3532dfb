"""Which drafts are accepted: those that are what vLLM's own sampler draws at their position.

vLLM's rejection sampler draws once more for every draft, so what it says to a seeded request depends on how many there
were; and it knows neither `min_p` nor `logit_bias`. Here each position of a row is sampled as the next step would have
sampled it: what was accepted before is output by then, and one draw belongs to each token. So every token is the one
that there would be without speculation.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.vllm import names

NO_TOKEN = -1
"""vLLM's, in a row of tokens where there are no more."""


class Acceptance:
    """Takes the place of vLLM's rejection sampler, for proposals of single tokens.

    Args:
        sampler: vLLM's own
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.acceptable: Mapping[int, int] = {}
        """By row of vLLM's batch, how many drafts may be accepted; a row that is not named: all it has."""

    def __call__(
        self,
        metadata: names.SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling: names.SamplingMetadata,
    ) -> names.SamplerOutput:
        """Args:
            logits: [rows + drafts, vocab], those of a row back to back
            sampling: `output_token_ids` are vLLM's own lists, of every row

        Returns: int32[rows, most drafts + 1] tokens, NO_TOKEN where there are no more; log-probabilities of each.
        """
        drafts, width = np.array(metadata.num_draft_tokens), metadata.max_spec_len + 1
        if width == 1:
            return self._sampler(logits=logits, sampling_metadata=sampling)
        expected, firsts = self._expected(drafts, metadata), np.cumsum(drafts + 1) - drafts - 1
        ids = torch.full((len(drafts), width), NO_TOKEN, dtype=torch.int32)
        said, outputs = ids.numpy(), sampling.output_token_ids
        scores: list[names.LogprobsTensors] = []
        open_rows = np.arange(len(drafts))
        for offset in range(width):
            drawing = {i: sampling.generators[i] for i in open_rows.tolist() if i in sampling.generators}
            sampled = self._sampler(
                logits=logits[torch.from_numpy(firsts + np.minimum(offset, drafts))],
                sampling_metadata=replace(sampling, generators=drawing),
            )
            said[open_rows, offset] = sampled.sampled_token_ids[:, 0].numpy()[open_rows]
            scores.append(sampled.logprobs_tensors)
            open_rows = open_rows[said[open_rows, offset] == expected[open_rows, offset]]
            if not len(open_rows):
                break
            for row, token in zip(open_rows.tolist(), said[open_rows, offset].tolist(), strict=True):
                outputs[row].append(token)
            for processor in sampling.logitsprocs.all:
                processor.update_state(None)
        for row, count in enumerate((said != NO_TOKEN).sum(1).tolist()):
            del outputs[row][len(outputs[row]) - (count - 1) :]
        return names.SamplerOutput(ids, _joined(scores, width))

    def _expected(self, drafts: NDArray[np.int64], metadata: names.SpecDecodeMetadata) -> NDArray[np.int32]:
        """int32[rows, most drafts + 1]: what the token at each place must be for the next one to count; NO_TOKEN where
        nothing comes after."""
        places = np.arange(metadata.max_spec_len + 1)
        expected = np.full((len(drafts), len(places)), NO_TOKEN, np.int32)
        expected[places < drafts[:, None]] = metadata.draft_token_ids.numpy()
        for row, acceptable in self.acceptable.items():
            expected[row, acceptable:] = NO_TOKEN
        return expected


def _joined(scores: list[names.LogprobsTensors], width: int) -> names.LogprobsTensors | None:
    """Of each row `width` entries, as vLLM wants them; those of no token are anything."""
    if scores[0] is None:
        return None
    scores = scores + scores[-1:] * (width - len(scores))
    columns = zip(*(entry[:3] for entry in scores), strict=True)
    return names.LogprobsTensors(*(torch.stack(column, 1).flatten(0, 1) for column in columns))

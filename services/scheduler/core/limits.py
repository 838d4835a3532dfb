from dataclasses import dataclass

import numpy as np

from protocol.sampling import SamplingParams
from services.scheduler.core.slots import Column


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes the scheduler plans within; all in tokens unless named otherwise."""

    max_num_seqs: int
    """Requests running at once."""
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    stages: int = 1
    """Pipeline stages that a step passes through (PP)."""
    lookahead: int = 0
    """Positions after a row that a drafter writes KV at."""
    drafts_in_flight: int = 0
    """Most drafts of one request in all steps in flight together."""

    @property
    def num_slots(self) -> int:
        """Twice the running requests, so that slots behind a fence never hold up admission (spec 0.7)."""
        return 2 * self.max_num_seqs

    def held(self, ends: Column) -> Column:
        """int32[rows]: tokens to have blocks for where rows end at `ends`; a drafter looks ahead."""
        return np.minimum(ends + np.int32(self.lookahead), self.max_model_len) if self.lookahead else ends

    def positions(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens whose KV a request may need at most: the last token's is never written, but a draft's after it may."""
        drafts = self.drafts_in_flight + self.lookahead
        return min(
            num_prompt_tokens + params.max_tokens - 1 + drafts, self.max_model_len - (0 if drafts else 1)
        )

"""The sizes within which steps are formed."""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from protocol.kv_groups import ONE_GROUP, KVGroup, most_blocks, num_states
from protocol.sampling import SamplingParams
from services.scheduler.core.slots import Column


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of one epoch, in tokens unless named otherwise."""

    max_num_seqs: int
    """Requests running at once."""
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    stages: int = 1
    """Pipeline stages."""
    lookahead: int = 0
    """Positions behind a row at which a drafter writes KV."""
    drafts_in_flight: int = 0
    """Maximum number of drafts of one request in all steps in flight together."""
    leaves_rows_out: bool = False
    """True: the workers sample a step without the constrained rows whose masks are missing (left-out row,
    docs/invariants.md). False: no step is dispatched while the masks of another one are missing."""
    groups: tuple[KVGroup, ...] = ONE_GROUP
    loads_blocks: bool = False
    """True: the workers load KV blocks from a tier (loaded block, docs/invariants.md)."""
    fetches_blocks: bool = False
    """True: they load KV blocks from the workers of another engine, if a request names one."""
    max_loras: int = 0
    """LoRA adapters of all running requests together (adapter seat); 0: none are served."""
    pools_only: bool = False
    """True: the model has a pooler of its own and generates no text (`Pooling.MODEL`)."""
    encoder_budget: int = 0
    """Maximum number of positions of the items that are encoded in one step (encoder budget); 0: none are served."""
    whole_prompts: bool = False
    """True: the model attends in both directions, so a prompt is computed in one step (whole prompt)."""

    @property
    def takes_back_states(self) -> bool:
        """True: the workers take back the recurrent state of a row that they leave out. It has one position (recurrent
        state, docs/invariants.md)."""
        return self.leaves_rows_out and num_states(self.groups) > 0

    @property
    def num_slots(self) -> int:
        """Number of slots: twice the running requests (spare slots, docs/invariants.md)."""
        return 2 * self.max_num_seqs

    @property
    def kv_capacity(self) -> int:
        """Tokens of one request that the KV cache holds; with full attention, of all requests together."""
        size, whole = self.block_size, self.num_blocks * self.block_size
        if self.groups == ONE_GROUP:
            return whole
        longest = max(-(-self.max_model_len // size), 1)  # a window can hold any number of tokens
        fits = range(1, longest + 1)
        return size * bisect_right(fits, self.num_blocks, key=lambda blocks: self.most_blocks(blocks * size))

    def most_blocks(self, num_tokens: int) -> int:
        """Maximum number of blocks that a request holds at once while it computes so many tokens. Behind a chunk come
        the drafter's positions."""
        return most_blocks(self.groups, num_tokens, self.max_num_batched_tokens + self.lookahead, self.block_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return min(self.max_model_len, self.kv_capacity)

    @property
    def most_pinned(self) -> int:
        """Maximum number of blocks that pins hold: the longest request fits beside them (pinned block)."""
        return self.num_blocks - self.most_blocks(self.longest)

    def held(self, ends: Column) -> Column:
        """Tokens for which rows that end at `ends` need blocks, int32[rows]; includes the drafter's positions."""
        return np.minimum(ends + np.int32(self.lookahead), self.max_model_len) if self.lookahead else ends

    def positions(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Maximum number of tokens whose KV a request may need. The last token's KV is never written, unless a draft
        follows it."""
        drafts = self.drafts_in_flight + self.lookahead
        return min(num_prompt_tokens + params.max_tokens - 1 + drafts, self.max_model_len - (0 if drafts else 1))

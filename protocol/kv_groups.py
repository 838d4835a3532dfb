"""Groups of layers by the keys that a query reads: each group has a block table of its own.

All groups of a model share one pool of blocks of equal size. A block holds the keys and values of one group's layers
for `block_size` tokens, or the recurrent state of one request in a group's layers. A table is sent block position after
block position, each with one block of every group, in the order of the groups; with one group it is the list of its
blocks. The blocks of recurrent states come before all others, one of each such group.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from protocol.fields import Count

MAX_GROUPS = 255
NO_BLOCK = -1
"""Entry of a table where a group has no block, because no query reads these positions any more."""

Kind = Literal["full_attention", "sliding_window", "chunked_local_attention", "recurrent_state"]


class KVGroup(msgspec.Struct, array_like=True, frozen=True):
    """Layers whose queries read the same positions."""

    kind: Kind = "full_attention"
    size: Count = 0
    """Tokens of the window, the query's own included, or of a chunk; 0 with full attention and recurrent states."""

    @property
    def is_state(self) -> bool:
        """True: the layers have no keys, but one state of each request, which every position changes."""
        return self.kind == "recurrent_state"

    def first_read(self, position: int) -> int:
        """Return the first position that a query at `position`, or at a later one, reads."""
        match self.kind:
            case "sliding_window":
                return max(0, position - self.size + 1)
            case "chunked_local_attention":
                return position // self.size * self.size
        return 0

    def unread_from(self, position: int) -> int:
        """Return the first query that reads nothing before `position`. Not with full attention."""
        if self.kind == "sliding_window":
            return position + self.size - 1
        return -(-position // self.size) * self.size

    def most_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the maximum number of blocks that a request of `num_tokens` holds at once, if it computes at most
        `chunk` tokens in a step and no other step of it is in flight."""
        if self.is_state:
            return 1
        blocks = -(-num_tokens // block_size)
        return min(blocks, -(-(self.size - 1 + chunk) // block_size) + 1) if self.size else blocks


KVGroups = Annotated[tuple[KVGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)]
ONE_GROUP: tuple[KVGroup, ...] = (KVGroup(),)
"""The group of a model with full attention only."""


def most_blocks(groups: Sequence[KVGroup], num_tokens: int, chunk: int, block_size: int) -> int:
    """Return the maximum number of blocks that a request holds at once; see `KVGroup.most_blocks`."""
    return sum(group.most_blocks(num_tokens, chunk, block_size) for group in groups)


def num_states(groups: Sequence[KVGroup]) -> int:
    """Return the number of blocks with recurrent states at the beginning of a table."""
    return sum(group.is_state for group in groups)


def name_in_group(name: bytes, group: int) -> bytes:
    """Return the name of a group's block whose tokens have this name (protocol.block_names)."""
    return bytes((name[0] ^ group,)) + name[1:] if group else name

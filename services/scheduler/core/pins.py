"""Prefixes that are pinned, and the blocks that they hold (pinned block, docs/invariants.md).

A pin is a holder of blocks like a request, so they are neither evicted nor given away. It names its blocks, and holds
those of them that the prefix cache has: the others when they are computed. Pins survive an epoch, their blocks do not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.block_names import NAME_BYTES
from protocol.codec import MAX_MESSAGE_BYTES
from protocol.requests import PinnedPrefix
from protocol.steps import KeptPin
from services.scheduler.core.limits import Limits

if TYPE_CHECKING:
    from services.scheduler.core.kv_cache import KVCacheManager

MAX_PINS = 1024
MAX_NAMES = MAX_MESSAGE_BYTES // 2 // NAME_BYTES
"""Names of the blocks of all pins, which one message has; those of a block in several pins count each time."""


class PinRefused(Exception):
    """The text says why, and what would be possible."""


@dataclass(eq=False, slots=True)
class Pin:
    id: str
    owner: str
    names: list[bytes]
    """Names of the blocks of a prefix, from its start."""
    table: list[int] = field(default_factory=list)
    """Table of the part of the prefix whose blocks it holds."""

    @property
    def blocks(self) -> list[int]:
        return [block for block in self.table if block >= 0]


class Pins:
    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        """In the order of their begin."""
        self._is_sent = True
        self._is_used = False
        """True: there has been a pin, which workers may keep."""

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, pin: Pin, kv: "KVCacheManager", limits: Limits) -> None:
        """Raises: PinRefused"""
        if pin.id in self._pins:
            raise PinRefused(f"there is a pin {pin.id!r}; unpin it first, or give another id")
        if len(self) >= MAX_PINS:
            raise PinRefused(f"{MAX_PINS} prefixes are pinned; unpin some first")
        if (num_names := sum(len(each.names) for each in (*self, pin))) > MAX_NAMES:
            raise PinRefused(f"all pins would have {num_names} blocks, and {MAX_NAMES} is the most; unpin some first")
        wanted, most = self._num_blocks(limits, pin), limits.most_pinned
        if wanted > most:
            raise PinRefused(
                f"{wanted} of {limits.num_blocks} KV blocks would be pinned, but at most {most} can be: a request of "
                f"{limits.longest} tokens must fit beside them; unpin some, pin a shorter prefix, lower "
                "--max-model-len, or give the KV cache more memory"
            )
        self._pins[pin.id], self._is_sent, self._is_used = pin, False, True
        self.hold(kv)

    def remove(self, pin_id: str, kv: "KVCacheManager") -> Pin:
        """Raises: PinRefused"""
        if (pin := self._pins.pop(pin_id, None)) is None:
            raise PinRefused(f"there is no pin {pin_id!r}")
        self._is_sent = False
        self._give_back(pin, kv)
        return pin

    def take_unsent(self) -> list[KeptPin] | None:
        """Return all pins for the workers; None: they have them."""
        if self._is_sent:
            return None
        self._is_sent = True
        return [KeptPin(pin.id, pin.owner, b"".join(pin.names)) for pin in self]

    def hold(self, kv: "KVCacheManager") -> None:
        """Hold what the prefix cache has got meanwhile. Call it before blocks may be evicted that became findable."""
        for pin in self:
            known = len(pin.table) // kv.num_groups
            if known == len(pin.names) or pin.names[known] not in kv.pool.by_hash:
                continue
            held, pin.table = pin.blocks, kv.prefix_of(pin.names)
            kv.pool.hold(pin.blocks)
            kv.pool.give_back(reversed(held))

    def release(self, kv: "KVCacheManager") -> None:
        """Hold no block any more."""
        for pin in self:
            self._give_back(pin, kv)

    def fit(self, limits: Limits) -> None:
        """Remove the latest pins that another epoch's cache has no room for. They hold no blocks, and new workers do
        not have them, but may have any that was removed."""
        self._is_sent &= not self._is_used
        while self._pins and self._num_blocks(limits) > limits.most_pinned:
            self._pins.popitem()

    def listed(self, block_size: int, bytes_per_block: int, num_groups: int) -> list[PinnedPrefix]:
        return [
            PinnedPrefix(
                pin.id,
                pin.owner,
                len(pin.names) * block_size,
                len(pin.table) // num_groups * block_size,
                len(pin.blocks) * bytes_per_block,
            )
            for pin in self
        ]

    def _num_blocks(self, limits: Limits, *more: Pin) -> int:
        """Return the number of blocks that all pins may hold."""
        return len({name for pin in (*self, *more) for name in pin.names}) * len(limits.groups)

    @staticmethod
    def _give_back(pin: Pin, kv: "KVCacheManager") -> None:
        blocks, pin.table = pin.blocks, []
        kv.pool.give_back(reversed(blocks))

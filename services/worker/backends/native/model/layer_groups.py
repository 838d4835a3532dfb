"""Division of a model's layers into groups of KV cache (protocol.kv_groups).

Layers with the same window belong to one or more groups, so that all groups have about as many layers and a block of
any group has the same size. Consecutive layers with the same window take turns, so that a pipeline stage has about as
many layers of each of these groups.
"""

from collections import Counter, defaultdict
from typing import NamedTuple, Self

from protocol.kv_groups import ONE_GROUP, KVGroup
from services.worker.backends.native.model.partition import ModelPart

MOST = 16
"""Maximum number of groups: a request's next block costs the scheduler time for each group."""


class LayerGroups(NamedTuple):
    """Groups of a model, and where the layers of one rank have their keys and values."""

    groups: tuple[KVGroup, ...]
    """Groups with full attention come first."""
    numbers: tuple[int, ...]
    """Group of each layer of the part."""
    places: tuple[int, ...]
    """Index of each layer in the cache: layers of different groups share their memory."""

    @property
    def depth(self) -> int:
        """Number of layers of the cache."""
        return max(self.places) + 1

    @classmethod
    def of(cls, part: ModelPart, most: int, longest: int) -> Self:
        """Divide a model's layers; all ranks get the same groups.

        Args:
            most: maximum number of groups; 1: the scheduler keeps every token.
            longest: context length, tokens; a window that is not shorter frees nothing.
        """
        windows = [window if window < longest else 0 for window in part.whole.windows]
        layers = Counter(windows)
        each, most = min(layers.values()), min(most, MOST)
        if max(layers.values()) < 1.5 * each:
            each = max(layers.values())  # less memory than another group with few layers
        while (number := sum(-(-count // each) for count in layers.values())) > most and each < len(windows):
            each += 1
        if most == 1 or number > most or set(layers) == {0}:
            layers, windows, each = Counter({0: len(windows)}), [0] * len(windows), len(windows)
        firsts, groups = dict[int, int](), list[KVGroup]()
        for window in sorted(layers):  # full attention is 0
            firsts[window] = len(groups)
            kind = KVGroup("sliding_window", window) if window else KVGroup()
            groups += [kind] * -(-layers[window] // each)
        seen, numbers = Counter[int](), list[int]()
        for window in windows:
            numbers.append(firsts[window] + seen[window] % -(-layers[window] // each))
            seen[window] += 1
        own, places, used = (numbers[part.layers.start : part.layers.stop], list[int](), defaultdict[int, int](int))
        for number in own:
            places.append(used[number])
            used[number] += 1
        return cls(tuple(groups), tuple(own), tuple(places))

    @property
    def is_plain(self) -> bool:
        """Return whether all layers have one block table that keeps every token."""
        return self.groups == ONE_GROUP

"""Images and sounds of requests as vLLM's encoder gets them, and the steps that encode them (encoder budget,
docs/invariants.md)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from protocol.steps import NewRequest
from services.worker.backends.vllm import vllm_api

Features = list[Any]
"""vLLM's `MultiModalFeatureSpec` of each item, in order."""


def pack_features(features: Features) -> bytes:
    """Return `Media.data`."""
    encoder = vllm_api.MsgpackEncoder()
    return msgspec.msgpack.encode([bytes(part) for part in encoder.encode(features)])


def unpack_features(data: bytes) -> Features:
    parts = msgspec.msgpack.decode(data, type=list[bytes])
    decoder = vllm_api.MsgpackDecoder(list[vllm_api.MultiModalFeatureSpec])
    return list(decoder.decode(parts))


class MediaInputs:
    """
    Args:
        encoded: vLLM's own outputs of its encoder, by content
    """

    def __init__(self, encoded: Mapping[str, Any] | None) -> None:
        self._encoded = {} if encoded is None else encoded
        self._features: dict[int, Features] = {}
        """By slot; only of requests with items that are not computed whole."""

    def enter(self, request: NewRequest) -> Features:
        """Return the items of a request before its first row."""
        if request.media is None:
            return []
        self._features[request.slot] = features = unpack_features(request.media.data)
        return features

    def leave(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._features.pop(slot, None)

    def reach(
        self, slots: NDArray[Any], ids: Sequence[str], starts: NDArray[Any], ends: NDArray[Any]
    ) -> dict[str, list[int]]:
        """Return the numbers of the items that must be encoded for rows from `starts` to `ends`, by request id.

        Equal items are encoded once, and stay until no request has positions of them to compute.
        """
        inputs: dict[str, list[int]] = {}
        known = set(self._encoded)
        if not self._features:
            return inputs
        for slot, name, start, end in zip(slots.tolist(), ids, starts.tolist(), ends.tolist(), strict=True):
            for number, feature in enumerate(self._features.get(slot, ())):
                at = feature.mm_position
                if at.offset < end and start < at.offset + at.length and feature.identifier not in known:
                    known.add(feature.identifier)
                    inputs.setdefault(name, []).append(number)
            self._forget_passed(slot, start)
        return inputs

    def _forget_passed(self, slot: int, start: int) -> None:
        """Forget the items before a row."""
        if features := self._features.get(slot):
            last = features[-1].mm_position
            if start >= last.offset + last.length:
                del self._features[slot]

    def take_passed(self) -> list[str]:
        """Return the items whose encoded form no request needs any more. vLLM drops them before the step."""
        if not self._encoded:
            return []
        needed = {feature.identifier for features in self._features.values() for feature in features}
        return [name for name in self._encoded if name not in needed]

"""Tokens that stand in for those of a recording without tokens.

A block gets tokens that follow from its number among the blocks with the same parent, so prefixes are equal exactly
where they were equal. They are no stop tokens, except where a stop token ended a request.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from protocol.codec import unpack
from services.scheduler.core.observer import Record, RequestFinished, RequestRefused
from services.scheduler.core.request import RequestKey
from services.scheduler.core.slots import Column
from services.scheduler.recording.records import ArrivalRecord, OutcomeRecord, PlanRecord, RecordingHeader
from services.scheduler.recording.segments import RecordingError


@dataclass(eq=False)
class RecordedTokens:
    """Tokens of one request, as far as a recording tells them."""

    blocks: "array[int]" = field(default_factory=lambda: array("Q"))
    """Ids of its full blocks."""
    stops: dict[int, int] = field(default_factory=dict)
    """Position -> stop token that ended it."""
    length: int = 0
    """Tokens at its end."""


class Surrogates:
    """Tokens of the requests of a recording. `read` collects first what the recording tells about them."""

    def __init__(self, header: RecordingHeader) -> None:
        self._size, self._vocab_size = header.limits.block_size, header.vocab_size
        self._requests: list[RecordedTokens] = []
        """In order of arrival."""
        self._stop_ids: set[int] = set()
        self._numbers: dict[int, int] = {}
        """Block id -> its number among the blocks with the same parent."""
        self._num_children: dict[int, int] = defaultdict(int)
        """Block id -> blocks that follow it; 0: first blocks."""
        self._ends: dict[int, dict[int, int]] = defaultdict(dict)
        """Block id -> offset -> stop token."""
        self._alphabet: Column = np.zeros(1, np.int32)

    def read(self, records: Iterable[Record]) -> None:
        """Raises: RecordingError, if too few tokens are no stop tokens."""
        open_requests: dict[RequestKey, RecordedTokens] = {}
        owners: dict[int, RecordedTokens] = {}
        for record in records:
            match record:
                case ArrivalRecord():
                    key = (record.frontend, record.message.number)
                    open_requests.setdefault(key, self._arrive(record))
                case RequestRefused() | RequestFinished():
                    open_requests.pop((record.frontend, record.finish.number), None)
                case PlanRecord(plan=plan, requests=requests):
                    for new, key in zip(plan.new, requests, strict=True):
                        owners[new.slot] = open_requests.get(key) or RecordedTokens()
                case OutcomeRecord():
                    _take(record, owners)
        for request in self._requests:
            self._number_blocks(request)
        self._alphabet = np.setdiff1d(np.arange(self._vocab_size), [*self._stop_ids]).astype(np.int32)
        if len(self._alphabet) < 2:
            raise RecordingError(
                f"nearly all {self._vocab_size} tokens of the vocabulary are stop tokens of a request; such a "
                "recording replays only with --record-tokens"
            )

    def _arrive(self, record: ArrivalRecord) -> RecordedTokens:
        params = record.message.params
        self._stop_ids.update(params.eos_token_ids, params.stop_token_ids)
        request = RecordedTokens(array("Q", unpack(record.blocks, np.uint64).tolist()), length=record.num_tokens)
        self._requests.append(request)
        return request

    def _number_blocks(self, request: RecordedTokens) -> None:
        parent = 0
        for block in request.blocks:
            if block not in self._numbers:
                self._numbers[block] = self._num_children[parent]
                self._num_children[parent] += 1
            parent = block
        for position, token in request.stops.items():
            index, offset = divmod(position, self._size)
            if index < len(request.blocks):
                self._ends[request.blocks[index]][offset] = token

    @property
    def filler(self) -> int:
        """A token that ends no request."""
        return int(self._alphabet[0])

    def tokens_of(self, arrival: int, num_tokens: int) -> Column:
        """Return at least `num_tokens` tokens of the request that arrived as number `arrival`, counted from 0."""
        request = self._requests[arrival]
        rest = max(num_tokens, request.length) - len(request.blocks) * self._size
        last = np.full(max(rest, 0), self._alphabet[0], np.int32)
        for position, token in request.stops.items():
            if (offset := position - len(request.blocks) * self._size) >= 0:
                last[offset] = token
        return np.concatenate([*map(self._block, request.blocks), last])

    def _block(self, block: int) -> Column:
        """Return the tokens of a block: its number in a system whose digits are the alphabet."""
        number, base = self._numbers[block], len(self._alphabet)
        digits = np.zeros(self._size, np.int64)
        for at in range(self._size):
            if not number:
                break
            number, digits[at] = divmod(number, base)
        tokens = self._alphabet[digits]
        for offset, token in self._ends.get(block, {}).items():
            tokens[offset] = token
        return tokens


def _take(record: OutcomeRecord, owners: dict[int, RecordedTokens]) -> None:
    slots = unpack(record.slots).tolist()
    for row, block in zip(unpack(record.block_rows).tolist(), unpack(record.blocks, np.uint64).tolist(), strict=True):
        owners[slots[row]].blocks.append(block)
    columns = (record.stop_rows, record.stop_positions, record.stop_tokens)
    for row, position, token in zip(*(unpack(column).tolist() for column in columns), strict=True):
        owner = owners[slots[row]]
        owner.stops[position], owner.length = token, position + 1

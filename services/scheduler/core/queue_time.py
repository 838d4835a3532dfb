"""Estimate of the time that a new request waits before its first step.

The prompt tokens before it must be computed: their rate is measured while steps compute prompts. Steps are full while
tokens wait, so a measured step that was not counts as if it had been. And if all seats, or all KV blocks, are taken,
running requests must end first: `n` of them that hold their seats for a time `t` on average end at a rate of `n / t`
(Little's law). The longer of the two times counts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.core.epoch import EpochState
from services.scheduler.core.request import Request
from services.scheduler.core.store import RequestStore

MEMORY = 10.0
"""Seconds of computing prompts after which a measurement of their rate keeps 1 / e of its weight."""
NUM_ENDS = 64
"""Requests over which the time in a seat is averaged."""


@dataclass
class QueueTime:
    _cache_hits: int = 0
    """Prompt tokens found in the prefix cache so far, over all requests."""
    _tokens: float = 0.0
    """Prompt tokens computed, or found in the prefix cache, in `_seconds`; recent ones count more."""
    _computed: float = 0.0
    """Number of `_tokens` that were computed."""
    _seconds: float = 0.0
    _token_seconds: float = 0.0
    """Seconds of each measured step times its tokens: the more tokens a step has, the more it says about full ones."""
    _token_room: float = 0.0
    """Prompt tokens of each measured step, if it were full, times its tokens."""
    _measured_until: float | None = None
    """End of the last measured time; None: no step is in flight. Seconds, as in `RequestStore.now`."""
    _seat_seconds: float = 0.0
    """Mean time from the first step of a request to its end."""
    _num_ends: int = 0

    def on_dispatch(self, now: float) -> None:
        if self._measured_until is None:
            self._measured_until = now

    def on_result(self, now: float, prompt_tokens: int, room: int, cache_hits: int, is_idle: bool) -> bool:
        """A result was applied. Return whether the measured times have changed.

        Args:
            prompt_tokens: prompt tokens that its step computed.
            room: how many it could have computed.
            cache_hits: prompt tokens found in the prefix cache so far, over all requests.
            is_idle: no other step is in flight.
        """
        since = now if self._measured_until is None else self._measured_until
        self._measured_until = None if is_idle else now
        tokens = prompt_tokens + cache_hits - self._cache_hits
        if tokens:
            kept, seconds = math.exp(min(since - now, 0.0) / MEMORY), max(now - since, 0.0)
            self._tokens = self._tokens * kept + tokens
            self._computed = self._computed * kept + prompt_tokens
            self._seconds = self._seconds * kept + seconds
            self._token_seconds = self._token_seconds * kept + prompt_tokens * seconds
            self._token_room = self._token_room * kept + prompt_tokens * max(room, prompt_tokens)
            self._cache_hits = cache_hits
        return tokens > 0

    def on_ends(self, requests: Iterable[Request], now: float) -> None:
        for request in requests:
            self._num_ends = min(self._num_ends + 1, NUM_ENDS)
            self._seat_seconds += (now - request.scheduled - self._seat_seconds) / self._num_ends

    def reset(self) -> None:
        """No step is in flight any more."""
        self._measured_until = None

    def seconds(self, store: RequestStore, epoch: EpochState, num_tokens: int) -> float:
        """Return the estimate for a new request with so many tokens; 0.0 if nothing stands before it."""
        left = epoch.slots.entry[epoch.running] - epoch.slots.computed[epoch.running]
        tokens = store.num_waiting_tokens + int(left[left > 0].sum())
        return max(tokens * self._seconds_per_waiting_token, self._for_seats(store, epoch, num_tokens))

    @property
    def _seconds_per_waiting_token(self) -> float:
        if not self._token_room:
            return self.seconds_per_prompt_token
        return self._token_seconds / self._token_room * self._computed / self._tokens

    @property
    def seconds_per_prompt_token(self) -> float:
        """Measured time per prompt token, of which some were found in the prefix cache; 0.0: nothing was measured."""
        return self._seconds / self._tokens if self._tokens else 0.0

    @property
    def seconds_per_computed_token(self) -> float:
        """Measured time to compute a prompt token; 0.0: nothing was measured."""
        return self._seconds / self._computed if self._computed else 0.0

    def _for_seats(self, store: RequestStore, epoch: EpochState, num_tokens: int) -> float:
        limits, running = epoch.limits, epoch.running
        waiting = store.num_waiting + 1
        ends = float(waiting - (limits.max_num_seqs - len(running)))
        blocks = waiting * limits.most_blocks((store.num_waiting_tokens + num_tokens) // waiting)
        if (missing := blocks - epoch.kv.num_free) > 0 and len(running):
            held = limits.num_blocks - epoch.kv.num_free
            ends = max(ends, missing * len(running) / max(held, 1))
        if ends <= 0:
            return 0.0
        seconds = self._seat_seconds
        if len(running):  # they may take longer than those that have ended
            middle = epoch.slots.request(int(running[len(running) // 2]))
            seconds = max(seconds, store.now - middle.scheduled)
        return ends * seconds / (len(running) or limits.max_num_seqs)

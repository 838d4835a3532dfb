"""Requests of many sessions, drawn from published statistics.

Lengths, turns and pauses are those of the conversation trace of Mooncake (FAST 2025, `FAST25-release/traces` of
github.com/kvcache-ai/Mooncake; 12,031 requests in an hour), measured on the file:

- prompts: 964, 2306, 6909, 15366, 27367 and 85399 tokens at 10, 25, 50, 75, 90 and 99 %; here log-normal with the
  median 6909 and a deviation of 1.1, at most 120,000;
- outputs: 24, 350, 597 and 1115 tokens at 10, 50, 90 and 99 %; here a gamma distribution with the mean 343;
- 1.63 turns a session on average; here geometric;
- pauses between turns: 42, 66, 123, 264 and 483 s at 10, 25, 50, 75 and 90 %; here log-normal with the median 123 and a
  deviation of 0.95, divided by `WorkloadShape.speed`.

Not in the trace, and assumed: a part of the sessions begins with one of some system prompts, by Zipf's law; and one
tenth of the time is a burst with 1.5 times the requests (the trace's requests per 10 s have 2.1 times the variance of a
Poisson process).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

MAX_TOKENS = 120_000


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    requests: int
    per_second: float
    speed: float = 4.0
    block_size: int = 2048
    """Tokens of a block. Real ones are smaller; then 100 indexes of 1,000 engines would not fit into one machine."""
    applications: int = 200
    application_share: float = 0.3
    application_tokens: int = 8192
    burst: float = 1.5
    burst_seconds: float = 20.0
    turns: float = 1.63


class SessionRequest(NamedTuple):
    at: float
    number: int
    names: list[bytes]
    """Names of the full blocks of the prompt."""
    num_tokens: int
    output: int


@dataclass(slots=True)
class UserSession:
    number: int
    num_tokens: int
    names: list[bytes] = field(default_factory=list)

    def prompt(self, block_size: int) -> list[bytes]:
        """Return the names of the full blocks."""
        names = self.names
        while len(names) < self.num_tokens // block_size:
            parent = names[-1] if names else b""
            names.append(sha256(parent + b"%d" % self.number).digest())
        return names[: self.num_tokens // block_size]


def requests(shape: WorkloadShape, seed: int) -> Iterator[SessionRequest]:
    """Iterate over requests in the order of their arrival."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, shape.applications + 1)
    weights /= weights.sum()
    applications = [UserSession(-1 - app, shape.application_tokens) for app in range(shape.applications)]
    for application in applications:
        application.prompt(shape.block_size)
    quiet = (1 - 0.1 * shape.burst) / 0.9
    turns: list[tuple[float, int, UserSession]] = []
    """Next turns: a heap by time."""
    now, sessions, number = 0.0, 0, 0
    session_rate = shape.per_second / shape.turns
    burst_until, next_burst = 0.0, 0.0
    while number < shape.requests:
        if now >= next_burst:
            burst_until = now + shape.burst_seconds
            next_burst = now + float(rng.exponential(9 * shape.burst_seconds)) + shape.burst_seconds
        rate = session_rate * (shape.burst if now < burst_until and now > shape.burst_seconds else quiet)
        now += float(rng.exponential(1 / rate))
        sessions += 1
        session = UserSession(sessions, int(min(rng.lognormal(np.log(6909), 1.1), MAX_TOKENS)) + 1)
        if rng.random() < shape.application_share:
            application = applications[int(rng.choice(shape.applications, p=weights))]
            session.names, session.num_tokens = (list(application.names), session.num_tokens + shape.application_tokens)
        heappush(turns, (now, sessions, session))
        while turns and turns[0][0] <= now and number < shape.requests:
            at, _, session = heappop(turns)
            output = max(1, int(rng.gamma(1.6, 343 / 1.6)))
            yield SessionRequest(at, number, session.prompt(shape.block_size), session.num_tokens, output)
            number += 1
            if rng.random() < 1 - 1 / shape.turns and session.num_tokens < MAX_TOKENS:
                session.num_tokens += output + int(rng.lognormal(np.log(200), 1.2))
                pause = float(rng.lognormal(np.log(123), 0.95)) / shape.speed
                heappush(turns, (at + pause, session.number, session))

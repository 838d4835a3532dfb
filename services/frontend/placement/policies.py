"""The interface of placement policies, and the built-in ones.

A policy stores nothing between calls: it derives every answer from the view, so that a recording replays.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.frontend.placement.fleet import Column, EngineColumns, Rows
from services.plugins import find_class

log = logging.getLogger("runahead.frontend")

GROUP = "runahead.placement_policies"


@dataclass(slots=True)
class PlacementView:
    """The request that is placed, and the engines that may get it, in columns of equal length."""

    _fleet: EngineColumns
    rows: Rows
    """int64[engines]: each identifies an engine for as long as it is known."""
    num_tokens: int
    hits: NDArray[np.int64]
    """int64[engines]: tokens that each is expected to find in its prefix cache; zeros for a policy that does not use
    them."""
    count: int
    """Grows by one with each decision, from a number that depends on the frontend's seed: frontends that take turns do
    not walk in step."""
    random: float
    """Uniform in [0, 1): another number for each request and frontend."""

    @property
    def waiting_seconds(self) -> Column:
        """float64[engines]: expected time before the first step of a new request: as reported, and the computation that
        this frontend has placed since then."""
        return self._fleet.waiting_seconds.take(self.rows)

    @property
    def streams(self) -> Column:
        """float64[engines]: open requests as reported, and those placed since then."""
        return self._fleet.streams.take(self.rows)

    @property
    def token_seconds(self) -> Column:
        """float64[engines]: time to compute a prompt token, > 0."""
        return self._fleet.token_seconds(self.rows)

    def pick(self, chosen: NDArray[np.bool_]) -> int:
        """Return one of the engines for which `chosen` is true, at random: many frontends that see the same reports
        would all choose the first one."""
        found = chosen.nonzero()[0]
        return int(found[int(self.random * len(found))])


class PlacementPolicy(Protocol):
    uses_prefixes: bool
    """False: prompts are not hashed."""

    def choose(self, view: PlacementView) -> int:
        """Return the position of an engine in the columns of the view."""
        ...


class PrefixAwarePolicy:
    """The engine with the least cost in seconds: the time that its queue takes, the time to compute the tokens that it
    does not hold, which the request waits for, and those behind it too, and the time by which this request and the
    open ones delay one another while they decode. A hit counts as the seconds that it saves, and no more."""

    uses_prefixes = True
    DELAYED = 3.0
    """Requests that a second of computation delays: this one and, on a busy engine, those behind it."""
    OUTPUT = 32
    """Output tokens that a request is assumed to have. For each one, a step computes a row of every open request."""
    TIE = 0.02
    """Costs are equal up to this share of the time to compute the whole prompt."""

    def choose(self, view: PlacementView) -> int:
        seconds = view.token_seconds
        computing = self.DELAYED * (view.num_tokens - view.hits)
        decoding = 2 * self.OUTPUT * view.streams
        costs = view.waiting_seconds + (computing + decoding) * seconds
        least = costs[costs.argmin()]  # faster than min()
        return view.pick(costs <= least + self.TIE * view.num_tokens * seconds)


class LeastLoadedPolicy:
    """The engine with the fewest open requests."""

    uses_prefixes = False

    def choose(self, view: PlacementView) -> int:
        streams = view.streams
        return view.pick(streams == streams.min())


class RoundRobinPolicy:
    """Engines in turns."""

    uses_prefixes = False

    def choose(self, view: PlacementView) -> int:
        return view.count % len(view.rows)


BUILT_IN: dict[str, type[PlacementPolicy]] = {
    "prefix_aware": PrefixAwarePolicy,
    "least_loaded": LeastLoadedPolicy,
    "round_robin": RoundRobinPolicy,
}


def find_placement_policy(name: str) -> type[PlacementPolicy]:
    """Return the class of a policy; a call without arguments makes one.

    Raises: PluginError, if there is no such policy, its entry point does not load, or it is no `PlacementPolicy`.
    """
    members = ("uses_prefixes", "choose")
    found: type[PlacementPolicy] = find_class("--placement-policy", name, BUILT_IN, GROUP, members)
    return found


class GuardedPlacementPolicy:
    """A policy whose exceptions and impossible answers are replaced by the least loaded engine (policy guard,
    docs/invariants.md)."""

    def __init__(self, make: Callable[[], PlacementPolicy]) -> None:
        self._policy = make()
        self.uses_prefixes = bool(self._policy.uses_prefixes)
        self._reported: set[type[Exception]] = set()

    def choose(self, view: PlacementView) -> int:
        try:
            if 0 <= (at := self._policy.choose(view)) < len(view.rows):
                return int(at)
            raise IndexError(f"position {at} of {len(view.rows)} engines")
        except Exception as error:
            if type(error) not in self._reported:
                self._reported.add(type(error))
                log.exception("the placement policy failed; the least loaded engine is used instead: %s", error)
        return LeastLoadedPolicy().choose(view)

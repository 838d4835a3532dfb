"""The costs of a step, fitted to the recorded times: on the device, in the scheduler, and on the way between them.

    device = base + a * prefill tokens + b * decode tokens + c * context + d * verified drafts + e * proposed drafts
             + f * seconds of the scheduler's work beside it

The context is the number of (token, earlier token) pairs that attention reads. The last summand is what processes that
share cores take from the device. Coefficients are not negative. Steps count by their relative error, and those that
something else delayed are left out.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.steps import SchedulerOutput

FEATURES = ("step", "prefill token", "decode token", "context", "verified draft", "proposed draft")
_ROUNDS = 2000
"""Maximum rounds of coordinate descent; seven coefficients need far fewer."""
_OUTLIER = 3.0
"""A step that takes more than this multiple of the fitted time is left out of the second fit."""
_AS_GOOD = 1.02
"""A fit whose error is at most this multiple of the best one's explains the recording as well."""
MIN_STEPS = 20

Vector = NDArray[np.float64]


def features_of(plan: SchedulerOutput, drafted: NDArray[np.int32] | None = None) -> Vector:
    """Return the features of a step, float64[6].

    Args:
        drafted: int32[sampling rows], the drafts that the drafter found; None: as planned.
    """
    starts, counts = unpack(plan.starts).astype(np.float64), unpack(plan.counts).astype(np.float64)
    drafts = unpack(plan.drafts).astype(np.float64) if plan.drafts else np.zeros(len(counts))
    samples = np.frombuffer(plan.samples, np.bool_)
    if drafted is not None:
        counts[samples] += drafted - drafts[samples]
        drafts[samples] = drafted
    decodes = samples & (counts - drafts == 1)
    prefill, decode = counts[~decodes].sum(), float(decodes.sum())
    context = (counts * (starts + counts / 2)).sum()
    proposed = float(plan.num_speculative_tokens * samples.sum())
    return np.array((1.0, prefill, decode, context, drafts.sum(), proposed))


class HostCost(NamedTuple):
    """Times beside the device, in seconds. The vectors are those of `host_features`."""

    turn: Vector
    """The scheduler's work from a result to the next one."""
    sending: Vector
    """From the beginning of that work until the worker has prepared the plan."""
    returning: float
    """From the end of a step until the scheduler, if it is free, reads the result."""

    def scaled(self, factor: float) -> "HostCost":
        return HostCost(factor * self.turn, factor * self.sending, factor * self.returning)


def host_features(rows: int, requests: int) -> Vector:
    """Return the features of a turn of the scheduler, float64[3].

    Args:
        rows: rows of results, and of plans.
        requests: requests that arrived, entered a slot or ended.
    """
    return np.array((1.0, rows, requests))


class StepCost(NamedTuple):
    """A fitted cost model."""

    seconds: Vector
    """float64[6], by `FEATURES`"""
    error: float
    """Median of the relative errors on the recorded steps."""
    num_steps: int
    seen: NDArray[np.bool_]
    """bool[6]: the feature occurred in the recording."""
    shared: float = 0.0
    """Seconds that a step is longer for each second that the scheduler works beside it."""
    delays: float = 1.0
    """Recorded time over fitted time, with the delays."""

    def scaled(self, factor: float) -> Self:
        return self._replace(seconds=factor * self.delays * self.seconds, delays=1.0)

    def of(self, features: Vector) -> float:
        """Return the seconds of a step."""
        return float(features @ self.seconds)

    def of_decodes(self, rows: int, context: int) -> float:
        """Return the seconds of a step in which `rows` requests with `context` tokens each decode."""
        return float(np.array((1.0, 0.0, rows, rows * (context - 0.5), 0.0, 0.0)) @ self.seconds)

    def of_prefill(self, tokens: int) -> float:
        """Return the seconds of a step that computes the first tokens of one prompt."""
        return float(np.array((1.0, tokens, 0.0, tokens * tokens / 2, 0.0, 0.0)) @ self.seconds)

    @classmethod
    def fits(
        cls, features: Sequence[Vector], seconds: Sequence[float], shared: Sequence[float] | None = None
    ) -> Iterator[Self]:
        """Yield the best fit to steps, then those that explain them as well without one of the features: where features
        always occurred together, these are the ends of what each of them may cost.

        Args:
            shared: seconds that the scheduler worked beside each.

        Raises: ValueError, if there are too few.
        """
        if len(seconds) < MIN_STEPS:
            raise ValueError(f"the recording has {len(seconds)} steps with times; a cost model needs {MIN_STEPS}")
        x, y = (np.column_stack((features, np.zeros(len(seconds)) if shared is None else shared)), np.array(seconds))
        best, kept = fit(x, y)
        least = _error(x[kept], y[kept], best)
        seen = np.array(x[:, :-1].any(axis=0))
        for left_out in (None, *np.flatnonzero(best[1:]) + 1):
            solved = best
            if left_out is not None:
                without = x.copy()
                without[:, left_out] = 0
                solved = fit(without, y)[0]
                if _error(x[kept], y[kept], solved) > _AS_GOOD * least:
                    continue
            error = float(np.median(np.abs(x @ solved - y) / y))
            delays = float(y.sum() / (x @ solved).sum())
            yield cls(_unseen(solved[:-1], seen), error, len(y), seen, float(solved[-1]), delays)


def _unseen(seconds: Vector, seen: NDArray[np.bool_]) -> Vector:
    """A draft of a recording without drafts costs as much as a decoded token."""
    return seconds if seen[4] else np.concatenate((seconds[:4], [seconds[2], seconds[5]]))


def _error(x: Vector, y: Vector, solved: Vector) -> float:
    return float(np.sqrt(np.mean((x @ solved / y - 1) ** 2)))


def fit(x: Vector, y: Vector) -> tuple[Vector, NDArray[np.bool_]]:
    """Return the coefficients that are not negative and have the least relative errors, and which rows count: those
    that nothing delayed."""
    near = np.maximum(x @ _non_negative(x / y[:, None], np.ones(len(y))), 1e-9)
    kept = y <= _OUTLIER * near
    return _non_negative(x[kept] / near[kept, None], y[kept] / near[kept]), kept


def _non_negative(x: Vector, y: Vector) -> Vector:
    """Return the least-squares solution of x w = y with w >= 0, by coordinate descent."""
    scale = np.sqrt((x * x).sum(axis=0))
    scale[scale == 0] = 1
    normal, moment = (x / scale).T @ (x / scale), (x / scale).T @ y
    solved = np.zeros(x.shape[1])
    for _ in range(_ROUNDS):
        before = solved.copy()
        for index in range(len(solved)):
            if normal[index, index]:
                residual = moment[index] - normal[index] @ solved
                solved[index] = max(0.0, solved[index] + residual / normal[index, index])
        if np.array_equal(solved, before):
            break
    result: Vector = solved / scale
    return result

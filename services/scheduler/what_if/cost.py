"""The cost of a step on the device, fitted to the recorded step times.

    seconds = base + a * prefill tokens + b * decode tokens + c * context + d * verified drafts + e * proposed drafts

The context is the number of (token, earlier token) pairs that attention reads. Coefficients are not negative. Steps
count by their relative error, and those that something else delayed are left out.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.steps import SchedulerOutput

FEATURES = ("step", "prefill token", "decode token", "context", "verified draft", "proposed draft")
_ROUNDS = 2000
"""Rounds of coordinate descent; six coefficients need far fewer."""
_OUTLIER = 3.0
"""A step that takes more than this multiple of the fitted time is left out of the second fit."""
MIN_STEPS = 20

Vector = NDArray[np.float64]


def features_of(plan: SchedulerOutput) -> Vector:
    """Return the features of a step, float64[6]."""
    starts, counts = unpack(plan.starts).astype(np.float64), unpack(plan.counts).astype(np.float64)
    drafts = unpack(plan.drafts).astype(np.float64) if plan.drafts else np.zeros(len(counts))
    samples = np.frombuffer(plan.samples, np.bool_)
    decodes = samples & (counts - drafts == 1)
    prefill, decode = counts[~decodes].sum(), float(decodes.sum())
    context = (counts * (starts + counts / 2)).sum()
    proposed = float(plan.num_speculative_tokens * samples.sum())
    return np.array((1.0, prefill, decode, context, drafts.sum(), proposed))


class StepCost(NamedTuple):
    """A fitted cost model."""

    seconds: Vector
    """float64[6], by `FEATURES`"""
    error: float
    """Median of the relative errors on the recorded steps."""
    num_steps: int
    seen: NDArray[np.bool_]
    """bool[6]: the feature occurred in the recording."""

    def of(self, plan: SchedulerOutput) -> float:
        """Return the seconds of a step. A draft of a recording without drafts costs as much as a decoded token."""
        seconds = self.seconds.copy()
        if not self.seen[4]:
            seconds[4] = seconds[2]
        return float(features_of(plan) @ seconds)

    def of_decodes(self, rows: int, context: int) -> float:
        """Return the seconds of a step in which `rows` requests with `context` tokens each decode."""
        return float(np.array((1.0, 0.0, rows, rows * (context - 0.5), 0.0, 0.0)) @ self.seconds)

    def of_prefill(self, tokens: int) -> float:
        """Return the seconds of a step that computes the first tokens of one prompt."""
        return float(np.array((1.0, tokens, 0.0, tokens * tokens / 2, 0.0, 0.0)) @ self.seconds)

    @classmethod
    def fit(cls, features: Sequence[Vector], seconds: Sequence[float]) -> Self:
        """Fit to steps.

        Raises: ValueError, if there are too few.
        """
        if len(seconds) < MIN_STEPS:
            raise ValueError(
                f"the recording has {len(seconds)} steps with times; a cost model needs {MIN_STEPS}"
            )
        x, y = np.array(features), np.array(seconds)
        kept = y <= _OUTLIER * (x @ _non_negative(x / y[:, None], np.ones(len(y))))
        solved = _non_negative(x[kept] / y[kept, None], np.ones(int(kept.sum())))
        error = float(np.median(np.abs(x @ solved - y) / y))
        return cls(solved, error, len(y), np.array(x.any(axis=0)))


def _non_negative(x: Vector, y: Vector) -> Vector:
    """Return the least-squares solution of x w = y with w >= 0, by coordinate descent."""
    scale = np.sqrt((x * x).sum(axis=0))
    scale[scale == 0] = 1
    normal, moment = (x / scale).T @ (x / scale), (x / scale).T @ y
    solved = np.zeros(x.shape[1])
    for _ in range(_ROUNDS):
        for index in range(len(solved)):
            if normal[index, index]:
                residual = moment[index] - normal[index] @ solved
                solved[index] = max(0.0, solved[index] + residual / normal[index, index])
    result: Vector = solved / scale
    return result

"""Choice of the number of threads of a step, by the measured times of earlier steps.

vLLM's kernels meet at barriers after each small piece of work. A small step is slower on several cores than on one, and
so is a larger one while another process wants a core. Which number is best depends on the model, the size of the step
and the neighbours, so it is measured while serving.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

SAMPLES = 5
"""Times of a number of threads that count: the last ones."""
TRIAL_INTERVAL = 8
"""Steps of a size between two trials, at least."""
TRIAL_SHARE = 0.01
"""Largest share of the time that trials of slower numbers may cost."""
GAIN = 0.95
"""A number of threads is replaced by one that takes less than this share of its time: less is noise."""


@dataclass
class _SizeTimes:
    """Times of the steps of one size, in seconds."""

    best: int
    """Index of the number of threads that was fastest."""
    times: dict[int, deque[float]] = field(default_factory=dict)
    """Last times by index."""
    since_trial: int = 0
    """Steps since the last trial."""
    total: float = 0.0
    lost: float = 0.0
    """Seconds that trials took longer than steps with the best number."""
    tries_more: bool = False
    """The next trial has more threads than `best`, not fewer."""


class ThreadChoice:
    """The number of compute threads of each step. Steps whose numbers of tokens have as many bits are of one size.

    A step uses the number that was fastest for its size. Now and then one uses the next lower or higher number, as long
    as that costs less than TRIAL_SHARE of the time.

    Args:
        numbers: numbers of threads to choose from, ascending. A size begins with the last one.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = tuple(numbers)
        self._sizes: dict[int, _SizeTimes] = {}
        self._last = _SizeTimes(0), 0

    def choose(self, num_tokens: int) -> int:
        """Return the number of threads for a step."""
        last = len(self._numbers) - 1
        size = self._sizes.setdefault(num_tokens.bit_length(), _SizeTimes(last))
        index = size.best
        if last and size.since_trial >= TRIAL_INTERVAL and size.lost <= TRIAL_SHARE * size.total:
            size.tries_more = size.best < last and (size.tries_more or size.best == 0)
            index += 1 if size.tries_more else -1
            size.tries_more = not size.tries_more
        self._last = size, index
        return self._numbers[index]

    def record(self, seconds: float) -> None:
        """Add the time of the step that was chosen for last."""
        size, index = self._last
        size.total += seconds
        size.times.setdefault(index, deque(maxlen=SAMPLES)).append(seconds)
        if index == size.best:
            size.since_trial += 1
            return
        size.since_trial = 0
        size.lost += max(0.0, seconds - median(size.times[size.best]))
        tried = size.times[index]
        if len(tried) > SAMPLES // 2 and median(tried) < GAIN * median(size.times[size.best]):
            size.best = index


def numbers_to_try(cores: int) -> list[int]:
    """Return the numbers of threads worth a trial on so many cores: powers of two, and all cores."""
    return [*(1 << power for power in range((cores - 1).bit_length())), cores]

"""Choice of the number of threads of a step, by the measured times of earlier steps.

vLLM's kernels meet at barriers after each small piece of work. A small step is slower on several cores than on one, and
so is a larger one while another process wants a core. Which number is best depends on the model, the size of the step
and the neighbours, so it is measured while serving.

oneDNN's products keep the number of threads of their first call with as many rows. So small steps are measured before
serving, too, each number of threads with rows of its own.
"""

from collections import deque
from collections.abc import Callable, Sequence
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
LONG_SECONDS = 0.03
"""A size whose steps take longer begins with all threads, as larger ones do: barriers are a small part of them."""
FIRST_SIZE, LAST_SIZE = 3, 7
"""Numbers of bits of the tokens of steps before serving. Steps of fewer tokens begin as FIRST_SIZE does."""


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
        numbers: numbers of threads to choose from, ascending. A size that `begin` did not measure begins with the last.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = tuple(numbers)
        self._sizes: dict[int, _SizeTimes] = {}
        self._last = _SizeTimes(0), 0

    def begin(self, run: Callable[[int, int], float], most: int) -> None:
        """Let each size begin with the number of threads that is fastest before anything is served.

        Args:
            run: execute a step of so many tokens with so many threads; return its seconds.
            most: maximum tokens of a step
        """
        last = len(self._numbers) - 1
        for bits in range(FIRST_SIZE, LAST_SIZE + 1) if last else ():
            best, best_seconds = last, 0.0
            for index, tokens in zip(range(last, -1, -1), range((1 << bits) - 1, 1, -1), strict=False):
                if tokens > most or run(tokens, self._numbers[index]) > LONG_SECONDS:
                    return
                seconds = median(run(tokens, self._numbers[index]) for _ in range(SAMPLES))
                if not best_seconds or seconds < GAIN * best_seconds:
                    best, best_seconds = index, seconds
            for size in range(bits + 1) if bits == FIRST_SIZE else (bits,):
                self._sizes[size] = _SizeTimes(best)

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

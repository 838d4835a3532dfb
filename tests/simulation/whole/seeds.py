"""Runs of many seeds. A seed that fails is run again with its event log."""

from collections import Counter, deque
from collections.abc import Iterable

from tests.simulation.whole.faults import play

LINES = 400
"""Last lines of the event log that a failure shows."""


class SeedFailed(AssertionError):
    """A seed failed; the text has its number and its event log."""


def run_seeds(seeds: Iterable[int]) -> Counter[str]:
    """Return what has happened in all of them. Raises: SeedFailed"""
    happened = Counter[str]()
    for seed in seeds:
        try:
            happened.update(play(seed).happened)
        except Exception as error:
            raise SeedFailed(f"seed {seed}: {type(error).__name__}: {error}\n{event_log(seed)}") from error
    return happened


def event_log(seed: int) -> str:
    """Return the last events of a seed that fails."""
    lines = deque[str](maxlen=LINES)
    try:
        play(seed, lines.append)
    except Exception as error:
        lines.append(f"{type(error).__name__}: {error}")
    return "\n".join([*lines, f"again: python -m tests.simulation.whole.replay {seed}"])

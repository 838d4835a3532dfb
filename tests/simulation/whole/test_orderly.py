"""The whole engine when processes die, stop and are cut off: no stream loses, repeats or changes a token.

`play` checks each run: every answer equals that of a run without faults, nothing is left when it is quiet, weights are
not read again, older incarnations have no effect, and requests are served after the faults. Orderly runs have even
seeds, noisy ones (test_noisy.py) odd ones.
"""

from collections import Counter

import pytest

from tests.simulation.whole.faults import play
from tests.simulation.whole.seeds import run_seeds

SEEDS = (*range(0, 60, 2), 66, 100, 116, 122, 130, 138, 146, 150, 166, 168, 306)
"""The last ones are chosen: each event below happens in three seeds, or in as many as of the first 200, and each mutant
of test_mutants.py is noticed."""
CHUNK = 11
MUST_HAPPEN = [
    "workers killed",
    "schedulers killed",
    "frontends killed",
    "workers stopped",
    "schedulers stopped",
    "frontends stopped",
    "schedulers replaced",
    "workers cut off",
    "frontends cut off",
    "connections of workers reset",
    "connections of frontends reset",
    "connections made in another order",
    "a poisoned step fails",
    "a poisoned step its result fails",
    "a poisoned step crashes",
    "a poisoned step hangs",
    "a poisoned step lacks memory",
    "schedulers crashed by a request",
    "poisonous requests refused",
    "scheduler status 8",
    "steps sampled without rows",
    "blocks loaded",
    "blocks of a lost worker found",
    "tokens fetched",
    "blocks loaded ahead",
    "peers cut off",
    "engines killed",
    "engines stopped",
    "engines drained",
    "engines unlisted",
    "schedulers drained",
    "move: lost",
    "move: draining",
    "move: prefilled",
    "requests done",
    "requests left",
    "requests broken",
]


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """Events of all seeds together."""
    return Counter()


@pytest.mark.parametrize("first", range(0, len(SEEDS), CHUNK))
def test_any_faults_leave_each_answer_as_it_was(first: int, happened: Counter[str]) -> None:
    happened.update(run_seeds(SEEDS[first : first + CHUNK]))


def test_every_fault_has_happened(happened: Counter[str]) -> None:
    ended = sum(count for name, count in happened.items() if name.startswith("requests "))
    if ended < 2 * len(SEEDS):
        pytest.skip("not all seeds have run")
    assert [name for name in MUST_HAPPEN if not happened[name]] == []
    assert happened["requests done"] > 0.7 * ended


def test_a_run_replays_exactly() -> None:
    def traced(seed: int) -> list[str]:
        lines: list[str] = []
        play(seed, lines.append)
        return lines

    for seed in (4, 7):
        assert traced(seed) == traced(seed)

"""The whole engine on a network that loses, repeats, reorders and damages frames, with devices that hang.

Each answer is equal, or ends with one typed error; the rest is as in test_orderly.py.
"""

from collections import Counter

import pytest

from tests.simulation.whole.seeds import run_seeds

SEEDS = (*range(1, 60, 2), 131, 153, 195)
"""The last ones are chosen: each event below happens in three seeds, or in as many as of the first 200."""
CHUNK = 11
MUST_HAPPEN = [
    "frames lost",
    "frames repeated",
    "frames reordered",
    "frames corrupted",
    "devices hung",
    "steps out of memory",
    "steps sampled without rows",
    "worker status 4",
    "worker status 6",
    "worker status 7",
    "frontend status 4",
    "blocks loaded",
    "requests done",
    "requests 503",
]


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """Events of all seeds together."""
    return Counter()


@pytest.mark.parametrize("first", range(0, len(SEEDS), CHUNK))
def test_any_noise_ends_each_stream_with_its_answer_or_one_error(first: int, happened: Counter[str]) -> None:
    happened.update(run_seeds(SEEDS[first : first + CHUNK]))


def test_every_fault_has_happened(happened: Counter[str]) -> None:
    if sum(count for name, count in happened.items() if name.startswith("requests ")) < 2 * len(SEEDS):
        pytest.skip("not all seeds have run")
    assert [name for name in MUST_HAPPEN if not happened[name]] == []

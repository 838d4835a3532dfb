"""The whole engine on a network that loses, repeats, reorders and damages frames, with devices that hang.

Each answer is equal, or ends with one typed error; the rest is as in test_orderly.py.
"""

from collections import Counter

import pytest

from tests.simulation.whole.seeds import run_seeds

SEEDS, CHUNK = 120, 40
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


@pytest.mark.parametrize("first", range(1, SEEDS, CHUNK))
def test_any_noise_ends_each_stream_with_its_answer_or_one_error(first: int, happened: Counter[str]) -> None:
    happened.update(run_seeds(range(first, first + CHUNK, 2)))


def test_every_fault_has_happened(happened: Counter[str]) -> None:
    if sum(count for name, count in happened.items() if name.startswith("requests ")) < SEEDS:
        pytest.skip("not all seeds have run")
    assert [name for name in MUST_HAPPEN if not happened[name]] == []

"""Division of the keys of few tiles among programs."""

import pytest

from services.worker.kernels.cuda.split_plan import MOST_SPLITS, most_parts, num_splits


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("processors", [1, 4, 132])
def test_parts_of_every_step_fit_in_their_buffer(kv_heads: int, processors: int) -> None:
    most = most_parts(512, kv_heads, processors)
    for tiles in range(1, 513):
        splits = num_splits(tiles, kv_heads, processors)
        assert splits & (splits - 1) == 0
        assert 1 <= splits <= MOST_SPLITS
        assert splits == 1 or tiles * kv_heads * splits <= most


def test_fewer_tiles_have_more_parts() -> None:
    assert [num_splits(tiles, 8, 132) for tiles in (1, 2, 4, 8, 16, 32, 33, 34, 64)] == [32, 32, 16, 8, 4, 2, 1, 1, 1]

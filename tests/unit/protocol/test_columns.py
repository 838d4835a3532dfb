import numpy as np
import pytest

from protocol.columns import greatest, has_all, has_any, indices, total


@pytest.mark.parametrize("size", [0, 1, 5, 64, 65, 4097])
@pytest.mark.parametrize("kind", [np.bool_, np.int32, np.int64])
def test_reductions_equal_those_of_numpy(size: int, kind: type) -> None:
    rng = np.random.default_rng(size)
    for column in (rng.integers(-1, 3, size), np.zeros(size), np.ones(size), np.full(size, 2**31 - 1)):
        column = np.repeat(column.astype(kind), 2)[::2]  # not contiguous
        assert has_any(column) == column.any()
        if kind is np.bool_:
            assert has_all(column) == column.all()
            assert indices(column).tolist() == np.flatnonzero(column).tolist()
        else:
            assert total(column) == column.sum()
            assert greatest(column, 1) == column.max(initial=1)

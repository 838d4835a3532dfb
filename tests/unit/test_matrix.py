"""The cells of a matrix that run per change."""

from itertools import combinations

from _pytest.mark import ParameterSet

from tests.matrix import covering, pairwise


def per_change(cells: list[ParameterSet]) -> list[tuple[object, ...]]:
    return [cell.values for cell in cells if not cell.marks]


def test_every_pair_of_values_runs_per_change_and_every_cell_in_soak() -> None:
    columns = ("abc", (1, 2, 3), (True, False))
    cells = covering(*columns)
    chosen = per_change(cells)
    assert len(cells) == len({cell.values for cell in cells}) == 18
    assert len(chosen) < 12
    for (i, first), (j, second) in combinations(enumerate(columns), 2):
        assert {(cell[i], cell[j]) for cell in chosen} == {(a, b) for a in first for b in second}


def test_every_value_runs_per_change_about_equally_often() -> None:
    chosen = per_change(covering("abcdef", (1, 2, 3), strength=1))
    assert sorted(name for name, _ in chosen) == [*"abcdef"]
    assert sorted(depth for _, depth in chosen) == [1, 1, 2, 2, 3, 3]


def test_every_pair_of_the_valid_cells_runs_per_change() -> None:
    valid = [(a, b, c) for a in "ab" for b in (1, 2, 3) for c in (1, 2) if (a, b) != ("a", 3)]
    chosen = [cell for (cell,) in per_change(pairwise(valid, tuple))]
    assert len(chosen) < len(valid)
    for i, j in combinations(range(3), 2):
        assert {(cell[i], cell[j]) for cell in chosen} == {(cell[i], cell[j]) for cell in valid}

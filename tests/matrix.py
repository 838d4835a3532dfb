"""Matrices of parameters: a covering part of the cells runs per change, all cells in `make soak`."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product

import pytest
from _pytest.mark import ParameterSet


def covering(*columns: Sequence[object], strength: int = 2) -> list[ParameterSet]:
    """Return all cells of a matrix; those marked `soak` repeat combinations that a cell before them covers.

    Args:
        columns: the values of each parameter.
        strength: 2: a cell runs per change for every two values of different columns; 1: for every value.
    """
    covered: set[tuple[tuple[int, int], ...]] = set()
    chosen: set[tuple[int, ...]] = set()
    used = Counter[tuple[int, int]]()
    """Cells per value, so that all values of a column run about equally often."""
    cells = list(product(*(range(len(column)) for column in columns)))

    def new(cell: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return {*combinations(enumerate(cell), strength)} - covered

    def rank(cell: tuple[int, ...]) -> tuple[int, int]:
        return len(new(cell)), -sum(used[value] for value in enumerate(cell))

    while found := new(best := max(cells, key=rank)):
        chosen.add(best)
        covered |= found
        used.update(enumerate(best))
    return [
        pytest.param(
            *(column[index] for column, index in zip(columns, cell, strict=True)),
            marks=() if cell in chosen else (pytest.mark.soak,),
        )
        for cell in cells
    ]


def one_in(count: int, values: Sequence[object]) -> list[ParameterSet]:
    """Return `values`, of which every `count`-th runs per change, beginning with the first."""
    return [
        pytest.param(value, marks=() if index % count == 0 else (pytest.mark.soak,))
        for index, value in enumerate(values)
    ]

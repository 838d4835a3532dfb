"""Matrices of parameters: a covering part of the cells runs per change, all cells in `make soak`."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")
Combined = tuple[tuple[int, object], ...]
"""Values of some columns, as (column, value)."""


def covering(*columns: Sequence[object], strength: int = 2) -> list[ParameterSet]:
    """Return all cells of a matrix; those marked `soak` repeat combinations that other cells cover.

    Args:
        columns: the values of each parameter.
        strength: 2: for every two values of different columns a cell runs per change; 1: for every value.
    """
    cells = list(product(*columns))
    chosen = _choose([tuple(map(repr, cell)) for cell in cells], strength)
    return [
        pytest.param(*cell, marks=() if index in chosen else (pytest.mark.soak,)) for index, cell in enumerate(cells)
    ]


def pairwise(values: Sequence[T], cell: Callable[[T], tuple[object, ...]]) -> list[ParameterSet]:
    """Return `values`; those marked `soak` repeat pairs that others cover.

    Args:
        cell: returns the columns of a value.
    """
    chosen = _choose([cell(value) for value in values], strength=2)
    return [
        pytest.param(value, marks=() if index in chosen else (pytest.mark.soak,), id=str(value))
        for index, value in enumerate(values)
    ]


def _choose(cells: Sequence[tuple[object, ...]], strength: int) -> set[int]:
    """Return indices of cells that cover all combinations of `strength` values, chosen greedily."""
    covered: set[Combined] = set()
    chosen: set[int] = set()
    used = Counter[tuple[int, object]]()
    """Cells per value, so that all values of a column run about equally often."""

    def new(index: int) -> set[Combined]:
        return {*combinations(enumerate(cells[index]), strength)} - covered

    def rank(index: int) -> tuple[int, int]:
        return len(new(index)), -sum(used[value] for value in enumerate(cells[index]))

    while cells and (found := new(best := max(range(len(cells)), key=rank))):
        chosen.add(best)
        covered |= found
        used.update(enumerate(cells[best]))
    return chosen

"""Tables of states: of requests, of workers, and of the group of workers."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
R = TypeVar("R")


class IllegalTransition(Exception):
    """A state change that is not in the table: a bug in the scheduler, never the peer's fault."""


def transition(table: Mapping[tuple[S, E], R], state: S, event: E, who: str) -> R:
    """Return the row of a table. Raises: IllegalTransition"""
    if (row := table.get((state, event))) is None:
        raise IllegalTransition(f"{event.name} has no place while {who} is {state.name}")
    return row

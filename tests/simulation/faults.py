"""Faults that are put into the core on purpose: each replaces one public method of one of its parts.

A fault is a faulty method, with the production method as its first argument.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from inspect import signature
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from _pytest.mark import ParameterSet

from tests.simulation.driver import play
from tests.simulation.workload import draw

SEEDS = 150
"""A fault must show within so many seeds, running ahead by one step and by more."""
FIRST = (4, 12, 14, 16, 18, 1, 39)
"""Seeds that notice the faults that run per change; the others count when a change has changed those runs."""
FIRST_WITH_DRAFTS = (10, 2)
FIRST_WITH_A_TIER = (16, 14, 4, 39, 12)


class Fault(NamedTuple):
    part: type[Any]
    method: str
    broken: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.broken.__name__

    def injected(self) -> AbstractContextManager[Any]:
        """Return a context in which the core has the fault."""
        original = getattr(self.part, self.method)

        def method(*arguments: Any, **named: Any) -> Any:
            return self.broken(original, *arguments, **named)

        return patch.object(self.part, self.method, method)


class FaultList(list[Fault]):
    def add(self, part: type[Any], method: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate the faulty method of a fault in this list."""

        def add(broken: Callable[..., Any]) -> Callable[..., Any]:
            parameters = signature(getattr(part, method)).parameters.values()
            required = [
                each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
            ]
            signature(broken).bind(None, *required)  # else the call itself would raise, and be caught
            self.append(Fault(part, method, broken))
            return broken

        return add

    def returns(self, name: str, part: type[Any], method: str, value: object) -> None:
        """Add a fault: the method does nothing, and returns `value`."""
        self._named(name, part, method, lambda *_, **__: value)

    def passes(self, name: str, part: type[Any], method: str, **changes: Callable[[Any], Any]) -> None:
        """Add a fault: the method is called with changed values of these parameters."""

        def broken(original: Any, *arguments: Any, **named: Any) -> Any:
            bound = signature(original).bind(*arguments, **named)
            for parameter, change in changes.items():
                bound.arguments[parameter] = change(bound.arguments[parameter])
            return original(*bound.args, **bound.kwargs)

        self._named(name, part, method, broken)

    def meanwhile(self, name: str, part: type[Any], method: str, path: str, change: Callable[[Any], Any]) -> None:
        """Add a fault: the attribute at `path` of a parameter has a changed value while the method runs."""

        def broken(original: Any, *arguments: Any, **named: Any) -> Any:
            bound, (parameter, *names, last) = signature(original).bind(*arguments, **named), path.split(".")
            owner = reduce(getattr, names, bound.arguments[parameter])
            with patch.object(owner, last, change(getattr(owner, last))):
                return original(*arguments, **named)

        self._named(name, part, method, broken)

    def _named(self, name: str, part: type[Any], method: str, broken: Callable[..., Any]) -> None:
        broken.__name__ = name
        self.append(Fault(part, method, broken))


def parameters(faults: Sequence[Fault]) -> list[ParameterSet]:
    """One in sixteen faults runs per change, to notice a harness that catches nothing; `make soak` runs all."""
    return [
        pytest.param(fault, id=fault.name, marks=() if index % 16 == 0 else (pytest.mark.soak,))
        for index, fault in enumerate(faults)
    ]


def assert_caught(fault: Fault, speculates: bool = False, tier: bool = False) -> None:
    first = FIRST_WITH_A_TIER if tier else FIRST_WITH_DRAFTS if speculates else ()
    with fault.injected():
        for seed in (*first, *FIRST, *range(SEEDS)):
            for depth in draw(seed, speculates).depths[1:3]:
                try:
                    play(seed, depth, speculates=speculates, tier=tier)
                except Exception:
                    return
    pytest.fail(f"{SEEDS} seeds did not notice: {fault.name}")

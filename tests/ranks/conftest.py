"""Rank processes that last as long as the session, and checkpoints of `models`.

The fixtures import torch: where tests run in several processes, the one that distributes them reads only this file.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.integration.native.conftest import Family
    from tests.ranks.group import GroupDriver, RankPool
    from tests.ranks.sim_group import SimGroup


@pytest.fixture(scope="session")
def pool() -> "Iterator[RankPool]":
    from tests.ranks.group import RankPool

    pool = RankPool()
    yield pool
    assert not any(pool.close()), "a rank exited with an error"


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Family]":
    import torch

    from tests.integration.native.conftest import save
    from tests.ranks.models import MODELS, UNEQUAL

    made: dict[str, Family] = {}

    def make(name: str) -> "Family":
        if name not in made:
            torch.manual_seed(7)
            made[name] = save({**MODELS, **UNEQUAL}[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture
def tied(make_model: "Callable[[str], Family]") -> "Family":
    return make_model("tied")


@pytest.fixture
def start(pool: "RankPool") -> "Callable[..., GroupDriver]":
    """Return start(model, tp, pp), which returns the driver of a group that has joined and loaded."""
    from tests.ranks.group import GroupDriver, RankGroup

    def start(model: Path, tp: int, pp: int, **options: object) -> "GroupDriver":
        return GroupDriver(RankGroup(pool.take(tp * pp), model, tp, pp, **options), model)

    return start


@pytest.fixture
def make_group(request: pytest.FixtureRequest) -> "Iterator[Callable[..., SimGroup]]":
    """Return a function that makes groups of simulated ranks, one at a time."""
    from tests.ranks.sim_group import SimGroup, session_processes

    with ExitStack() as stack:

        def make(tp: int, pp: int, **options: Any) -> SimGroup:
            group = SimGroup(session_processes(request.session, tp * pp), tp, pp, **options)
            stack.callback(group.leave)
            return group

        yield make

from collections.abc import Iterator

import pytest

from services.scheduler.grammar.trial import process
from tests.unit.scheduler.grammar.support import PATIENCE_MS, CompilerClient, new_compiler


@pytest.fixture(scope="package", autouse=True)
def no_wall_clock() -> Iterator[None]:
    """A trial may wait for the processor for any time. Its processor time stays limited."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "WALL_SECONDS", PATIENCE_MS / 1000)
        yield


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompilerClient]:
    with new_compiler() as compiler:
        yield compiler

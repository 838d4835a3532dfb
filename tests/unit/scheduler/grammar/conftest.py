from collections.abc import Iterator

import pytest

from tests.unit.scheduler.grammar.support import CompilerClient, new_compiler


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompilerClient]:
    with new_compiler() as compiler:
        yield compiler

from collections.abc import Iterator

import pytest

from services.scheduler.grammar.compiler import GrammarCompiler
from tests.unit.scheduler.grammar.support import N_VOCAB, VOCABULARY, Desk


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    compiler = GrammarCompiler(VOCABULARY)
    compiler.use(N_VOCAB)
    yield Desk(compiler)
    compiler.close()

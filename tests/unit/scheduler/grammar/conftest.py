from collections.abc import Iterator

import pytest

from services.scheduler.grammar.compiler import GrammarCompiler
from tests.unit.scheduler.grammar.support import N_VOCAB, VOCABULARY, CompilerClient


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompilerClient]:
    inner = GrammarCompiler(VOCABULARY)
    inner.set_vocab_size(N_VOCAB)
    yield CompilerClient(inner)
    inner.close()

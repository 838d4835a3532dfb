"""The demo model's vocabulary, requests to a compiler, and masks as sets of token ids."""

import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from protocol.sampling import GrammarKind, StructuredOutputParams
from services.checkpoint import DEMO_MODEL
from services.scheduler.grammar import Grammar
from services.scheduler.grammar.compiler import GrammarCompiler
from services.scheduler.grammar.vocabulary import GrammarVocabulary

VOCABULARY = GrammarVocabulary.load(str(DEMO_MODEL))
N_VOCAB = VOCABULARY.num_tokens
WORDS = -(-N_VOCAB // 32)
(EOS,) = VOCABULARY.eos_token_ids
LIBRARY: LLTokenizer = replace(VOCABULARY, width=N_VOCAB).library_tokenizer()
_TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
PATIENCE_MS = 250_000


def tokens_of(text: str) -> list[int]:
    return list(LIBRARY.tokenize_str(text))


def text_of(token_ids: Sequence[int]) -> str:
    return str(_TOKENIZER.decode(list(token_ids), skip_special_tokens=True))


def wait(compiler: GrammarCompiler, *tickets: int) -> dict[int, Grammar | str]:
    """Return the results of these tickets, and of others that came in the meantime."""
    found: dict[int, Grammar | str] = {}
    ready = select.poll()
    ready.register(compiler.fileno(), select.POLLIN)
    while True:
        for ticket, result in compiler.take():
            assert ticket not in found, "a ticket was answered twice"
            found[ticket] = result
        if set(tickets) <= set(found):
            return found
        assert ready.poll(PATIENCE_MS), "no result within the patience"


class CompilerClient:
    """Submits grammars to the compiler `inner` under tickets of its own, and waits for the results."""

    def __init__(self, inner: GrammarCompiler) -> None:
        self.inner = inner
        self._tickets = iter(range(1, 1 << 30))

    def submit(
        self, kind: GrammarKind, text: str = "", eos: tuple[int, ...] = (EOS,), begins_after: tuple[int, ...] = ()
    ) -> int:
        ticket = next(self._tickets)
        self.inner.submit(ticket, StructuredOutputParams(kind, text, begins_after), eos)
        return ticket

    def result(self, kind: GrammarKind, text: str = "", **more: tuple[int, ...]) -> Grammar | str:
        ticket = self.submit(kind, text, **more)
        return wait(self.inner, ticket)[ticket]

    def grammar(self, kind: GrammarKind, text: str = "", **more: tuple[int, ...]) -> Grammar:
        result = self.result(kind, text, **more)
        assert not isinstance(result, str), result
        return result

    def refusal(self, kind: GrammarKind, text: str = "") -> str:
        result = self.result(kind, text)
        assert isinstance(result, str), "the grammar was not refused"
        return result


@contextmanager
def new_compiler(**more: int) -> Iterator[CompilerClient]:
    """Yield a client of a compiler with these arguments, which is closed afterwards."""
    inner = GrammarCompiler(VOCABULARY, **more)
    inner.set_vocab_size(N_VOCAB)
    try:
        yield CompilerClient(inner)
    finally:
        inner.close()


def allowed(grammar: Grammar) -> set[int]:
    """Return the ids of the tokens that may come next."""
    mask = np.zeros(WORDS, np.int32)
    grammar.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def matches(grammar: Grammar, text: str) -> bool:
    """Return whether the text can be a complete output: each token is allowed before it is accepted, then EOS."""
    return all(token in allowed(grammar) and grammar.accept(token) for token in [*tokens_of(text), EOS])


def random_output(grammar: Grammar, draw: Iterator[float], max_tokens: int) -> tuple[list[int], bool]:
    """Return a random output, and whether it ended with EOS."""
    output: list[int] = []
    for number in draw:
        if len(output) == max_tokens:
            break
        choices = sorted(allowed(grammar))
        token = choices[int(number * len(choices))]
        assert grammar.accept(token)
        if token == EOS:
            return output, True
        output.append(token)
    return output, False

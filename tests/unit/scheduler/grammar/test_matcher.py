"""`Matcher`: accepted tokens, failures, the start of the grammar and tokens after its end."""

from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from protocol.sampling import GrammarKind
from services.scheduler.grammar import matcher as matcher_module
from services.scheduler.grammar.matcher import Matcher, MatcherBatch
from tests.unit.scheduler.grammar.support import (
    EOS,
    LIBRARY,
    N_VOCAB,
    VOCABULARY,
    WORDS,
    CompilerClient,
    allowed,
    tokens_of,
)

EVERYTHING = 32 * WORDS
OTHER_EOS = 3


def regex_matcher(regex: str, **more: tuple[int, ...]) -> Matcher:
    library = LLMatcher(LIBRARY, LLMatcher.grammar_from_regex(regex), log_level=0)
    return Matcher(library, (EOS,), **more)


def test_no_token_is_accepted_after_one_that_does_not_match() -> None:
    grammar = regex_matcher("ab")
    a, b = tokens_of("a")[0], tokens_of("b")[0]
    assert not grammar.accept(b)
    assert not grammar.accept(a)
    assert len(allowed(grammar)) == EVERYTHING


def test_eos_where_the_output_cannot_end_is_not_accepted() -> None:
    assert not regex_matcher("ab").accept(EOS)


def test_every_token_is_allowed_after_eos() -> None:
    """A request with `ignore_eos` continues after an EOS token."""
    grammar = regex_matcher("a")
    assert grammar.accept(tokens_of("a")[0])
    assert allowed(grammar) == {EOS}
    assert grammar.accept(EOS)
    assert len(allowed(grammar)) == EVERYTHING
    assert grammar.accept(tokens_of("zebra")[0])
    assert grammar.accept(EOS)
    assert len(allowed(grammar)) == EVERYTHING


def test_failed_fill_sets_every_bit_and_no_token_is_accepted() -> None:
    limits = LLParserLimits(max_lexer_states=3, verbose_errors=False)
    library = LLMatcher(LIBRARY, LLMatcher.grammar_from_regex("(ab|cd){40}e"), log_level=0, limits=limits)
    grammar = Matcher(library, (EOS,))
    assert len(allowed(grammar)) == EVERYTHING
    assert not grammar.accept(tokens_of("a")[0])
    assert not grammar.accept(EOS)


def test_second_slow_mask_fails_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first slow mask may have waited for a processor."""
    monkeypatch.setattr(matcher_module, "MAX_FILL_SECONDS", -1.0)
    grammar = regex_matcher("a+")
    assert len(allowed(grammar)) < EVERYTHING
    assert grammar.accept(tokens_of("a")[0])
    assert len(allowed(grammar)) == EVERYTHING
    assert not grammar.accept(tokens_of("a")[0])


def test_every_token_is_allowed_until_begins_after_was_emitted() -> None:
    """Emitted tokens only (docs/invariants.md): tokens before the start do not belong to the grammar."""
    x, y, a = tokens_of("x")[0], tokens_of("y")[0], tokens_of("a")[0]
    grammar = regex_matcher("a", begins_after=(x, x, y))
    for token in (a, y, x, y, x, x, x):
        assert len(allowed(grammar)) == EVERYTHING
        assert grammar.accept(token)
    assert len(allowed(grammar)) == EVERYTHING
    assert grammar.accept(y)
    assert allowed(grammar) == {a}
    assert grammar.accept(a)
    assert allowed(grammar) == {EOS}


def test_eos_before_the_start_is_accepted() -> None:
    grammar = regex_matcher("a", begins_after=(7, 8))
    assert grammar.accept(EOS)


def test_eos_tokens_of_the_request_replace_those_of_the_tokenizer() -> None:
    a = tokens_of("a")[0]
    grammar = regex_matcher("aa?", eos_token_ids=(OTHER_EOS, EOS + N_VOCAB // 2))
    assert allowed(grammar) == {a}
    assert grammar.accept(a)
    assert allowed(grammar) == {a, OTHER_EOS, EOS + N_VOCAB // 2}
    assert grammar.accept(OTHER_EOS)
    assert len(allowed(grammar)) == EVERYTHING
    assert not regex_matcher("a*", eos_token_ids=(OTHER_EOS,)).accept(EOS)


def test_request_without_eos_tokens_ends_with_those_of_the_checkpoint() -> None:
    grammar = regex_matcher("a", eos_token_ids=())
    assert grammar.accept(tokens_of("a")[0])
    assert allowed(grammar) == {EOS}


def test_copies_advance_independently(compiler: CompilerClient) -> None:
    first, second = (compiler.grammar(GrammarKind.REGEX, "a{5}b") for _ in range(2))
    a = tokens_of("a")[0]
    for _ in range(5):
        assert first.accept(a)
    assert a not in allowed(first)
    assert a in allowed(second)


@pytest.mark.parametrize("extra", [0, 1, 31, 900])
def test_logits_wider_than_the_vocabulary(extra: int) -> None:
    """Checkpoints pad their embeddings. Padding must not be sampled."""
    width = N_VOCAB + extra
    tokenizer = replace(VOCABULARY, width=width).library_tokenizer()
    grammar = Matcher(LLMatcher(tokenizer, LLMatcher.grammar_from_regex("(.|\n)*"), log_level=0), (EOS,))
    mask = np.full(-(-width // 32), -1, np.int32)  # content of an earlier step
    grammar.fill(mask)
    found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert 0 < len(found)
    assert found.max() < N_VOCAB


def test_the_vocabulary_of_the_demo_model() -> None:
    assert (VOCABULARY.num_tokens, VOCABULARY.eos_token_ids, VOCABULARY.width) == (4096, (2,), 4096)


@pytest.mark.parametrize("mask", [np.zeros(2 * WORDS, np.int32)[::2], np.zeros(WORDS - 1, np.int32)])
def test_mask_of_another_shape_is_refused(mask: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"mask|buffer|size"):
        regex_matcher("a").fill(mask)


def test_grammar_without_a_match_fails_at_its_first_mask() -> None:
    library = LLMatcher(LIBRARY, LLMatcher.grammar_from_lark("start: a\na: b\nb: a"), log_level=0)
    grammar = Matcher(library, (EOS,))
    assert len(allowed(grammar)) == EVERYTHING
    assert not grammar.accept(tokens_of("a")[0])


def test_masks_that_are_filled_together_are_those_that_are_filled_alone() -> None:
    """Outputs that have not begun, are within their grammar, have ended, have failed and fail now."""
    a, b = tokens_of("a")[0], tokens_of("b")[0]

    def grammars() -> list[Matcher]:
        waits, inside, ended, failed = (regex_matcher("a[bc]", begins_after=begin) for begin in ((b,), (), (), ()))
        assert inside.accept(a)
        assert ended.accept(a)
        assert ended.accept(b)
        assert ended.accept(EOS)
        assert not failed.accept(b)
        translated = regex_matcher("a?", eos_token_ids=(OTHER_EOS,))
        without_match = LLMatcher(LIBRARY, LLMatcher.grammar_from_lark("start: a\na: b\nb: a"), log_level=0)
        return [waits, inside, ended, failed, translated, Matcher(without_match, (EOS,))]

    together, alone = np.empty((2, 6, WORDS), np.int32)
    MatcherBatch().fill(batch := grammars(), together)
    for grammar, mask in zip(grammars(), alone, strict=True):
        grammar.fill(mask)
    assert np.array_equal(together, alone)
    MatcherBatch().fill([batch[0]], together[:1])
    assert (together[0] == -1).all()
    assert [grammar.accept(a) for grammar in batch] == [True, False, True, False, True, False]


def look_ahead(grammar: Matcher, text: str) -> list[set[int]]:
    masks = np.zeros((len(tokens_of(text)) + 1, WORDS), np.int32)
    filled = grammar.look_ahead(tokens_of(text), masks)
    bits = np.unpackbits(masks[:filled].view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


@pytest.mark.parametrize("begins_after", [(), tuple(tokens_of("z"))])
def test_look_ahead_equals_accepting_and_changes_nothing(begins_after: tuple[int, ...]) -> None:
    """Draft masks: one mask for each position that drafts within the grammar lead to."""
    start = "z" if begins_after else ""
    text = f"{start}abab"
    grammar, other = (regex_matcher("(ab)*c", begins_after=begins_after) for _ in range(2))
    ahead = look_ahead(grammar, text)
    expected = [allowed(other)]
    for token in tokens_of(text):
        assert other.accept(token)
        expected.append(allowed(other))
    assert ahead == expected
    assert look_ahead(grammar, text) == expected, "the state changed"
    assert all(map(grammar.accept, tokens_of(f"{start}abc")))


def test_look_ahead_stops_at_a_draft_outside_of_the_grammar_and_at_eos() -> None:
    grammar = regex_matcher("(ab)*")
    a, b = tokens_of("a")[0], tokens_of("b")[0]
    masks = np.zeros((5, WORDS), np.int32)
    assert grammar.look_ahead([a, b, b, a], masks) == 3
    assert grammar.look_ahead([-1, -1, -1], masks) == 1, "there is no draft"
    assert grammar.look_ahead([EOS, EOS, EOS], masks) == 1, "nothing follows EOS"
    assert grammar.accept(a)

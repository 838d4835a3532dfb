"""Texts and bytes of single tokens, in both kinds of vocabularies."""

from pathlib import Path

from services.checkpoint import DEMO_MODEL
from services.frontend.text.token_texts import TokenText, TokenTexts
from services.frontend.text.tokenizer import Tokenizer
from tests.unit.frontend.text.test_tokenizer import with_byte_fallback

TEXT = "Grüße, 世界! 👩‍👩‍👧 ok"


def test_bytes_of_tokens_join_to_the_text_also_within_characters() -> None:
    tokenizer = Tokenizer(DEMO_MODEL)
    vocabulary = TokenTexts(tokenizer)
    words = [vocabulary[token] for token in tokenizer.encode(TEXT, add_special_tokens=False)]
    assert b"".join(word.raw for word in words).decode() == TEXT
    parts = [word for word in words if "\ufffd" in word.text]
    assert parts, "some tokens hold part of a character"
    assert all(word.text.encode() == word.raw for word in words if word not in parts)


def test_special_tokens_have_a_text_and_unknown_ids_have_none() -> None:
    vocabulary = TokenTexts(Tokenizer(DEMO_MODEL))
    assert vocabulary[2] == TokenText("<|eos|>", b"<|eos|>")
    assert vocabulary[2**31 - 1] == TokenText("", b"")


def test_words_keep_their_space_and_byte_tokens_are_bytes(tmp_path: Path) -> None:
    """Such a tokenizer strips the space before the first word of a text."""
    tokenizer, a, word = with_byte_fallback(tmp_path), 260, 262
    assert tokenizer.decode([word], show_special=True) == "a"
    vocabulary = TokenTexts(tokenizer)
    assert [vocabulary[token] for token in (word, a)] == [TokenText(" a", b" a"), TokenText("a", b"a")]
    parts = [vocabulary[3 + byte] for byte in "世".encode()]
    assert b"".join(part.raw for part in parts).decode() == "世"
    assert parts[0].text == "\ufffd"

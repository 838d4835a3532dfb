"""Texts and bytes of single tokens, in both kinds of vocabularies."""

import json
from pathlib import Path

from services.checkpoint import DEMO_MODEL
from services.frontend.text.token_texts import TokenText, TokenTexts
from services.frontend.text.tokenizer import Tokenizer

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
    pieces = ["<unk>", "<0xE4>", "<0xB8>", "<0x96>", "▁the", "the", "a", "▁a", "▁"]
    layout = {
        "version": "1.0", "truncation": None, "padding": None, "pre_tokenizer": None, "post_processor": None,
        "added_tokens": [
            {"id": 0, "content": "<unk>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True},
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": [["▁", "a"]],
        },
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([4], show_special=True) == "the"
    vocabulary = TokenTexts(tokenizer)
    assert [vocabulary[token] for token in (4, 5)] == [TokenText(" the", b" the"), TokenText("the", b"the")]
    assert b"".join(vocabulary[token].raw for token in (1, 2, 3)).decode() == "世"
    assert vocabulary[1].text == "\ufffd"

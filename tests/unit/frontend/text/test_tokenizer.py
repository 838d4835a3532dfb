"""Tokens to text without half characters, and text to the token ids that transformers gives."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer

from services.checkpoint import DEMO_MODEL, CheckpointError
from services.frontend.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    WordDetokenizer,
)
from services.frontend.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(DEMO_MODEL)
VOCAB = 4096


def with_byte_fallback(directory: Path) -> Tokenizer:
    """As Llama 2 and Mistral: spaces are "▁", unknown characters are spelt in bytes."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
    ]
    model = models.BPE(
        {word: index for index, word in enumerate(words)}, [("▁", "a"), ("a", "b"), ("▁", "ab")],
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    tokenizer = HFTokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_byte_fallback(tmp_path_factory.mktemp("byte_fallback"))


def all_of(stream: Detokenizer, ids: list[int]) -> list[str]:
    return [*map(stream.push, ids), stream.flush()]


def pieces(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    return all_of(tokenizer.detokenizer(prompt), ids)


def in_windows(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    """As tokenizers of other kinds are served."""
    return all_of(WindowDetokenizer(tokenizer.decode, prompt), ids)


both_ways = pytest.mark.parametrize("pieces", [pieces, in_windows])


@both_ways
@given(ids=st.lists(st.integers(0, VOCAB + 9), max_size=80))
def test_pieces_of_any_tokens_add_up_to_their_decoding(pieces, ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, [], ids)) == BYTE_LEVEL.decode(ids)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.sets(st.integers(0, 5)))
def test_special_tokens_are_shown_on_demand(ids: list[int], special: set[int]) -> None:
    ids = [*ids, *special]
    assert "".join(all_of(BYTE_LEVEL.detokenizer([], show_special=True), ids)) == BYTE_LEVEL.decode_all(ids)


SINGLE_BYTES = [i for i in range(6, 262) if len(BYTE_LEVEL.decode([i])) == 1]


@both_ways
@given(ids=st.lists(st.sampled_from(SINGLE_BYTES), max_size=200))
def test_pieces_of_garbage_bytes_add_up_too(pieces, ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, [], ids)) == BYTE_LEVEL.decode(ids)


@both_ways
def test_garbage_without_end_is_shown_as_it_comes(pieces) -> None:
    garbage = next(i for i in SINGLE_BYTES if BYTE_LEVEL.decode([i]) == "\ufffd")
    shown = pieces(BYTE_LEVEL, [], [garbage] * 500)
    assert "".join(shown) == "\ufffd" * 500
    assert all(len(piece) <= 4 for piece in shown)


def test_added_tokens_are_written_as_they_are(tmp_path: Path) -> None:
    """Also with letters that byte-level vocabularies use for something else, or do not have."""
    tokenizer = HFTokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = ["two words", "naïve", "世", "Ġx", "é\n"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path)
    ids = [token for text in texts for token in (tokenizer.token_to_id(text), SINGLE_BYTES[200])]
    assert isinstance(ours.detokenizer([]), ByteLevelDetokenizer)
    assert "".join(pieces(ours, [], ids)) == ours.decode(ids)


@given(st.text(alphabet="ab é世😀", max_size=30), st.text(alphabet="ab é世😀", max_size=30))
def test_byte_fallback_text_comes_out_whole_after_any_prompt(
    byte_fallback: Tokenizer, prompt: str, text: str
) -> None:
    before, ids = byte_fallback.encode_rendered("x " + prompt), byte_fallback.encode_rendered(text)
    shown = pieces(byte_fallback, before, ids)
    assert "".join(shown) == byte_fallback.decode(before + ids)[len(byte_fallback.decode(before)) :]
    assert not any("\ufffd" in piece for piece in shown)


@given(st.lists(st.integers(0, 264), max_size=60))
def test_byte_fallback_takes_any_tokens(byte_fallback: Tokenizer, ids: list[int]) -> None:
    assert len("".join(pieces(byte_fallback, [], ids))) <= len(ids) * 6


WORDS = st.integers(258, 264)


@given(
    st.lists(st.integers(0, 264), max_size=12),
    st.lists(st.one_of(WORDS, WORDS, WORDS, st.integers(0, 264)), max_size=60),
)
def test_words_are_the_pieces_that_windows_give(
    byte_fallback: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    assert isinstance(byte_fallback.detokenizer(prompt), WordDetokenizer)
    assert pieces(byte_fallback, prompt, ids) == in_windows(byte_fallback, prompt, ids)


def test_words_are_not_decoded_again(byte_fallback: Tokenizer) -> None:
    asked: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        asked.append(list(ids))
        return byte_fallback.decode(ids)

    stream = byte_fallback.detokenizer([])
    stream._decode = decode
    text = "".join(map(stream.push, byte_fallback.encode_rendered("ab a") * 100))
    assert text.startswith("ab a ab a")
    assert len(asked) == 2, "only the first word is"


def test_answer_after_a_prompt_that_ends_inside_a_character_is_its_own() -> None:
    ids = BYTE_LEVEL.encode_rendered("a😀b")
    assert "".join(pieces(BYTE_LEVEL, ids[:2], ids[2:])).endswith("b")


def test_special_tokens_are_not_shown_and_cost_no_more_than_others() -> None:
    stream = WindowDetokenizer(BYTE_LEVEL.decode, [])
    assert [stream.push(3) for _ in range(1000)] == [""] * 1000
    assert "".join(map(stream.push, BYTE_LEVEL.encode_rendered(" then text"))) == " then text"
    assert len(stream._window) < 64


@pytest.mark.parametrize(
    "flags",
    [
        {}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True}, {"add_bos_token": None},
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_post_processor", [True, False])
def test_special_tokens_around_a_prompt_are_those_of_transformers(
    tmp_path: Path, flags: dict[str, object], has_post_processor: bool
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    tokenizer = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    template = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    tokenizer.post_processor = (
        processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        if has_post_processor
        else processors.ByteLevel(trim_offsets=False)
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("add_bos_token", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | flags))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)
    for text in ("Hello world", "", "<|user|>x"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode_rendered(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_longest_token_is_known_only_where_no_token_stands_for_any_amount_of_text(
    tmp_path: Path, byte_fallback: Tokenizer
) -> None:
    assert 0 < BYTE_LEVEL.max_token_chars < 100
    text = "x" * 1000
    assert len(text) // BYTE_LEVEL.max_token_chars <= len(BYTE_LEVEL.encode_rendered(text))
    assert byte_fallback.max_token_chars > 0
    words = HFTokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).max_token_chars == 0


@pytest.mark.parametrize("content", [None, "", "{", '{"model": 5}', "[]"])
def test_missing_or_broken_tokenizer_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)

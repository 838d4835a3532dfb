"""Tokens to text without incomplete characters, and text to the token ids of transformers."""

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
from services.frontend.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, single_byte
from services.frontend.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(DEMO_MODEL)
VOCAB = 4096


def with_byte_fallback(directory: Path) -> Tokenizer:
    """A tokenizer like those of Llama 2 and Mistral: spaces are "▁", unknown characters are spelled in bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
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


def detokenize(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    return all_of(tokenizer.detokenizer(prompt), ids)


def in_windows(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    """Detokenize as for tokenizers of other kinds."""
    return all_of(WindowDetokenizer(tokenizer.decode, prompt), ids)


SINGLE_BYTES = [i for i in range(6, 262) if len(BYTE_LEVEL.decode([i])) == 1]
both_ways = pytest.mark.parametrize("detokenize", [detokenize, in_windows])


@both_ways
@given(ids=st.lists(st.integers(0, VOCAB + 9), max_size=80) | st.lists(st.sampled_from(SINGLE_BYTES), max_size=200))
def test_texts_of_any_tokens_join_to_their_decoding(detokenize, ids: list[int]) -> None:
    assert "".join(detokenize(BYTE_LEVEL, [], ids)) == BYTE_LEVEL.decode(ids)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.sets(st.integers(0, 5)))
def test_special_tokens_are_shown_on_request(ids: list[int], special: set[int]) -> None:
    ids = [*ids, *special]
    whole = BYTE_LEVEL.decode(ids, show_special=True)
    assert "".join(all_of(BYTE_LEVEL.detokenizer([], show_special=True), ids)) == whole


@both_ways
def test_endless_invalid_bytes_are_shown_as_they_arrive(detokenize) -> None:
    garbage = next(i for i in SINGLE_BYTES if BYTE_LEVEL.decode([i]) == "\ufffd")
    shown = detokenize(BYTE_LEVEL, [], [garbage] * 500)
    assert "".join(shown) == "\ufffd" * 500
    assert all(len(text) <= 4 for text in shown)


def test_added_tokens_are_written_as_they_are(tmp_path: Path) -> None:
    """Includes letters that byte-level vocabularies use for bytes, or do not have."""
    tokenizer = HFTokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    added = ["two words", "naïve", "世", "Ġx", "é\n"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path)
    ids = [token for text in added for token in (tokenizer.token_to_id(text), SINGLE_BYTES[200])]
    assert isinstance(ours.detokenizer([]), ByteDetokenizer)
    assert "".join(detokenize(ours, [], ids)) == ours.decode(ids)


@given(st.text(alphabet="ab é世😀", max_size=30), st.text(alphabet="ab é世😀", max_size=30))
def test_text_with_byte_fallback_is_complete_after_any_prompt(byte_fallback: Tokenizer, prompt: str, text: str) -> None:
    before, ids = (byte_fallback.encode(given, add_special_tokens=False) for given in ("x " + prompt, text))
    shown = detokenize(byte_fallback, before, ids)
    assert "".join(shown) == byte_fallback.decode(before + ids)[len(byte_fallback.decode(before)) :]
    assert not any("\ufffd" in text for text in shown)


@pytest.mark.parametrize("after", ["", "a"])
@pytest.mark.parametrize("character", ["é", "世", "😀"])
def test_each_byte_of_a_character_cut_off_is_shown(byte_fallback: Tokenizer, character: str, after: str) -> None:
    """As the library decodes it."""
    *cut, _ = byte_fallback.encode(character, add_special_tokens=False)
    ids = [*cut, *byte_fallback.encode(after, add_special_tokens=False)[-1:]]
    assert "".join(detokenize(byte_fallback, [], ids)) == byte_fallback.decode(ids)


def test_single_bytes_are_written_with_capital_or_small_letters() -> None:
    for name in ("<0x4A>", "<0x4a>"):
        assert single_byte(name).decode() == decoders.ByteFallback().decode([name]) == "J"


@given(st.lists(st.integers(0, 264), max_size=60))
def test_byte_fallback_accepts_any_tokens(byte_fallback: Tokenizer, ids: list[int]) -> None:
    assert len("".join(detokenize(byte_fallback, [], ids))) <= len(ids) * 6


WORDS_AND_SPECIAL = st.lists(st.sampled_from([1, 2, *range(259, 265)]), max_size=12)


@given(WORDS_AND_SPECIAL, WORDS_AND_SPECIAL)
def test_a_space_is_stripped_at_the_beginning_of_a_text_alone(
    byte_fallback: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    assert isinstance(byte_fallback.detokenizer(prompt), ByteDetokenizer)
    whole, before = byte_fallback.decode(prompt + ids), byte_fallback.decode(prompt)
    assert "".join(detokenize(byte_fallback, prompt, ids)) == whole[len(before) :]


def test_answer_does_not_complete_the_last_character_of_the_prompt() -> None:
    ids = BYTE_LEVEL.encode("a😀b", add_special_tokens=False)
    assert "".join(detokenize(BYTE_LEVEL, ids[:2], ids[2:])).endswith("b")


def test_hidden_special_tokens_do_not_make_the_window_grow() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return BYTE_LEVEL.decode(ids)

    stream = WindowDetokenizer(decode, [])
    assert [stream.push(3) for _ in range(1000)] == [""] * 1000
    assert "".join(map(stream.push, BYTE_LEVEL.encode(" then text", add_special_tokens=False))) == " then text"
    assert max(lengths) < 64


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
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


def test_longest_token_is_unknown_if_a_token_stands_for_any_amount_of_text(
    tmp_path: Path, byte_fallback: Tokenizer
) -> None:
    assert 0 < BYTE_LEVEL.max_token_chars < 100
    text = "x" * 1000
    assert len(text) // BYTE_LEVEL.max_token_chars <= len(BYTE_LEVEL.encode(text, add_special_tokens=False))
    assert byte_fallback.max_token_chars > 0
    normalizing = HFTokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    normalizing.normalizer = normalizers.NFC()
    normalizing.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).max_token_chars == 3 * BYTE_LEVEL.max_token_chars, "a letter may be three characters"
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

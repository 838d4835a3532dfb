"""Tokenizers from the metadata of GGUF files give the ids of the Hugging Face tokenizers that they are made from."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from services.checkpoint import CheckpointError, read_json, read_text, special_tokens
from services.checkpoint.gguf.pre_tokenizers import pre_tokenizer
from services.frontend.text.tokenizer import Tokenizer as ServedTokenizer

TEXTS = [
    "It's 2026-11-22; I'LL pay $1,234.56 for 12345 items (they've cost 99%).",
    "def f(x):\n\treturn x  # two  spaces\n\n\n    indented\r\nend   ",
    "Ünïcödé: naïve façade, e\u0301 versus é, ﬁ ligature",
    "Русский текст, українська мова, ελληνικά",
    "你好，世界！中文分词 123 日本語テキスト 한국어 문장",
    "العربية ١٢٣ עברית हिन्दी १२३ ภาษาไทย ქართული",
    "🙂👩‍👩‍👧 emoji → ∑∫ ≠ \u00a0nbsp\u2028",
    "  leading and trailing  ",
    "",
    "<|im_start|>user\nhello<|im_end|>\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""From tokenizer.json of Llama 3."""


def trained(pre: pre_tokenizers.PreTokenizer, vocabulary: int = 700) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS[:-1] * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def smollm() -> pre_tokenizers.PreTokenizer:
    """From tokenizer.json of SmolLM2."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def llama3() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def plain(
    pre: pre_tokenizers.PreTokenizer, ignore_merges: bool = False, normalizer: normalizers.Normalizer | None = None
) -> Callable[..., Tokenizer]:
    def make(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(SPECIAL)
        return tokenizer

    return make


def of_class(kind: type[GPT2Tokenizer] | type[Qwen2Tokenizer]) -> Callable[..., Tokenizer]:
    def make(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
        made = kind(vocab=vocabulary, merges=merges, additional_special_tokens=SPECIAL)
        tokenizer: Tokenizer = made.backend_tokenizer
        tokenizer.add_special_tokens(SPECIAL)
        return tokenizer

    return make


ORIGINALS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), of_class(GPT2Tokenizer)),
    "qwen2": (pre_tokenizers.ByteLevel(add_prefix_space=False), of_class(Qwen2Tokenizer)),
    "smollm": (smollm(), plain(smollm())),
    "llama-bpe": (llama3(), plain(llama3(), ignore_merges=True)),
    "olmo": (pre_tokenizers.ByteLevel(False), plain(pre_tokenizers.ByteLevel(False), normalizer=normalizers.NFC())),
}


def write(
    path: Path, model: str, vocabulary: dict[str, int], types: list[int] | None = None, arch: str = "llama"
) -> GGUFWriter:
    """A file without tensors; the caller adds to its metadata and calls `finish`."""
    writer = GGUFWriter(path, arch)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [3 if token in SPECIAL else 1 for token in tokens])
    return writer


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("name", ORIGINALS)
def test_byte_level_ids_over_many_scripts(name: str, tmp_path: Path) -> None:
    pre, make = ORIGINALS[name]
    vocabulary, merges = trained(pre)
    vocabulary["hello"] = len(vocabulary)  # no merge makes it
    original = make(vocabulary, merges)
    writer = write(tmp_path / "m.gguf", "gpt2", vocabulary)
    writer.add_tokenizer_pre(name)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_add_bos_token(False)
    finish(writer)
    ours = ServedTokenizer(tmp_path / "m.gguf")
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids, show_special=True) == original.decode(ids, skip_special_tokens=False)


def test_sentencepiece_ids_over_many_scripts(tmp_path: Path) -> None:
    """The original is put together like tokenizer.json of Llama 2."""
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(TEXTS[:3] * 3, trainer)
    model = json.loads(learned.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = pieces[:3] + bytes_ + pieces[3:]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in model["merges"]]

    original = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    original.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    original.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])

    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
    writer = write(tmp_path / "m.gguf", "llama", vocabulary, types)
    writer.add_token_scores([-float(ranks.get(token, 10_000)) for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    finish(writer)
    ours = ServedTokenizer(tmp_path / "m.gguf")
    for text in [*TEXTS, "<s> hello</s> there", "a<s>b<unk>c"]:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == original.decode(ids)


def test_pieces_with_equal_scores_merge_in_their_order(tmp_path: Path) -> None:
    """The converter of llama.cpp writes such scores if a checkpoint has no SentencePiece model."""
    pieces = ["<unk>", "x", "y", "z", "▁", "xy", "yz"]
    writer = write(tmp_path / "m.gguf", "llama", {piece: at for at, piece in enumerate(pieces)}, [2, 1, 1, 1, 1, 1, 1])
    writer.add_token_scores([-1000.0] * 7)
    writer.add_add_space_prefix(False)
    writer.add_unk_token_id(0)
    finish(writer)
    assert ServedTokenizer(tmp_path / "m.gguf").encode("xyz??x") == [5, 3, 0, 1]


def test_special_tokens_of_phi3_strip_the_white_space_behind_them(tmp_path: Path) -> None:
    tokens = ["<s>", "<|end|>", "<0x0A>", "▁", "a", "▁a"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    writer = write(tmp_path / "m.gguf", "llama", vocabulary, [3, 3, 6, 1, 1, 1], "phi3")
    writer.add_token_scores([-1.0] * 6)
    finish(writer)
    assert ServedTokenizer(tmp_path / "m.gguf").encode("<|end|>\na<s>\na") == [1, 5, 0, 3, 2, 4]


def test_special_tokens_template_and_ends(tmp_path: Path) -> None:
    vocabulary, _ = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    writer = write(tmp_path / "m.gguf", "gpt2", vocabulary)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_chat_template([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    finish(writer)
    path = tmp_path / "m.gguf"
    assert special_tokens(path) == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    generation = read_json(path, "generation_config.json")
    assert generation["eos_token_id"] == [0, 2, 3]
    assert (generation["temperature"], generation["top_k"]) == (0.6, 20)
    templates = read_json(path, "tokenizer_config.json")["chat_template"]
    assert {entry["name"]: entry["template"] for entry in templates} == {"default": "D", "tool_use": "T"}
    ours = ServedTokenizer(path)
    assert ours.encode("hi") == [1, *ours.encode("hi", add_special_tokens=False), 0]
    assert ours.eos_token_id == 0


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("gpt-2", False)])
def test_a_prompt_begins_as_those_of_the_models_with_this_vocabulary(pre: str, adds: bool, tmp_path: Path) -> None:
    vocabulary, _ = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    types = [4 if token == "<|im_end|>" else 3 if token in SPECIAL else 1 for token in vocabulary]
    writer = write(tmp_path / "m.gguf", "gpt2", {token: at for at, token in enumerate(vocabulary)}, types)
    writer.add_tokenizer_pre(pre)
    writer.add_bos_token_id([*vocabulary].index("<|im_start|>"))
    finish(writer)
    ours = ServedTokenizer(tmp_path / "m.gguf")
    text = "<|im_start|>hi<|im_end|>"
    ids = ours.encode(text, add_special_tokens=False)
    assert (ours.encode(text) == ids, ours.encode(text)[1:] == ids) == (not adds, adds)
    assert ours.decode(ids) == "hi<|im_end|>", "what a user has defined is text"


@pytest.mark.parametrize(
    ("tokens", "last", "ends"),
    [
        (["<|return|>", "<|end|>", "<|call|>"], 3, [0, 2]),
        (["<|eot_id|>", "x", "<|eom_id|>"], 3, [0, 2]),
        (["<|eot|>", "x", "<|eom|>"], 3, [0, 2]),
        (["<|eot|>", "x", "<|im_end|>"], 1, [0]),
    ],
    ids=[
        "a message of gpt-oss does not end the answer", "a tool call of Llama 3.1 does", "one of Llama 4 does",
        "a token of the text does not",
    ],
)  # fmt: skip
def test_tokens_that_end_an_answer(tokens: list[str], last: int, ends: list[int], tmp_path: Path) -> None:
    """`last`: type of the last one."""
    writer = write(tmp_path / "m.gguf", "gpt2", dict(zip(tokens, range(3), strict=True)), [3, 3, last])
    writer.add_eos_token_id(0)
    finish(writer)
    assert read_json(tmp_path / "m.gguf", "generation_config.json")["eos_token_id"] == ends


@pytest.mark.parametrize(
    ("model", "key", "value", "reason"),
    [
        ("rwkv", "", "", "tokenizer.ggml.model 'rwkv' is not supported; supported are gpt2, llama"),
        ("gpt2", "tokenizer.ggml.pre", "viking", "tokenizer.ggml.pre 'viking' is not supported; supported are gpt-2"),
        ("llama", "", "", "has 0 scores of [0-9]+ tokens"),
    ],
)  # fmt: skip
def test_other_tokenizers_are_refused_by_name(model: str, key: str, value: str, reason: str, tmp_path: Path) -> None:
    vocabulary, _ = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    writer = write(tmp_path / "m.gguf", model, vocabulary)
    if key:
        writer.add_string(key, value)
    finish(writer)
    with pytest.raises(CheckpointError, match=reason):
        read_text(tmp_path / "m.gguf", "tokenizer.json")


def test_default_rules_divide_numbers_by_three() -> None:
    rules = pre_tokenizer("default")
    tokenizer = Tokenizer(models.BPE({}, []))
    content = json.loads(tokenizer.to_str()) | {"pre_tokenizer": rules}
    parts = Tokenizer.from_str(json.dumps(content)).pre_tokenizer.pre_tokenize_str("It's 12345 a+b")
    assert [part for part, _ in parts] == ["It", "'", "s", "Ġ", "123", "45", "Ġa", "+", "b"]
    assert pre_tokenizer("llama4") == pre_tokenizer("gpt-4o")

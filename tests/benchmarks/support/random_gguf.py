"""GGUF files with random weights, for measurements of time. They are made once, in build/bench/models.

The tokenizer is that of the packaged SmolLM2-135M-Instruct. Blocks are random codes with scales that keep activations
finite; types of tensors are those that llama.cpp's quantiser chooses.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy.typing import NDArray

from services.checkpoint.default_model import packaged_model
from tests.benchmarks.support.random_llama import DIRECTORY
from tests.integration.native.gguf_models import random_blocks

KINDS = ("Q4_K_M", "Q4_0", "Q8_0")


class GgufShape(NamedTuple):
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    """Width; if there are experts, of one of them."""
    experts: int = 0
    per_token: int = 0


SHAPES = {
    "llama-1b": GgufShape("llama", 22, 2048, 32, 8, 5632),
    "moe-1b": GgufShape("qwen3moe", 16, 2048, 32, 4, 2048, 16, 4),
}
"""A Llama of 1.1 billion parameters; a mixture of experts of 3.5 billion, of which a token uses 1.1."""
HEAD = 64
"""Dimensions of a head."""


def random_gguf(name: str, kind: str) -> Path:
    """Return the file of a model of `SHAPES` in a kind of `KINDS`. Raises: SystemExit, without the packaged model."""
    path = DIRECTORY / f"{name}.{kind}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        _write(unfinished, SHAPES[name], kind)
        unfinished.rename(path)
    return path


def _write(path: Path, shape: GgufShape, kind: str) -> None:
    writer = GGUFWriter(path, shape.architecture)
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.per_token)
        writer.add_expert_feed_forward_length(shape.mlp)
    vocabulary = _copy_tokenizer(writer)
    _add(writer, "token_embd", (vocabulary, shape.hidden), "Q8_0" if kind == "Q8_0" else "Q6_K")
    _add_norm(writer, "output_norm", shape.hidden)
    for layer in range(shape.layers):
        _add_layer(writer, shape, kind, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tokenizer(writer: GGUFWriter) -> int:
    """Returns: the number of tokens."""
    packaged = packaged_model()
    if packaged is None:
        raise SystemExit("the default model is not installed; run `make`")
    fields = GGUFReader(packaged).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], kind)
    return len(fields["tokenizer.ggml.tokens"].data)


def _add_layer(writer: GGUFWriter, shape: GgufShape, kind: str, layer: int) -> None:
    hidden, mlp, queries, keys = shape.hidden, shape.mlp, shape.heads * HEAD, shape.kv_heads * HEAD
    eighth = shape.layers // 8
    is_fine = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    plain = "Q4_K" if kind == "Q4_K_M" else kind
    fine = "Q6_K" if kind == "Q4_K_M" and is_fine else plain
    name = f"blk.{layer}."
    for part, rows, columns, own in (
        ("attn_q", queries, hidden, plain),
        ("attn_k", keys, hidden, plain),
        ("attn_v", keys, hidden, fine),
        ("attn_output", hidden, queries, plain),
    ):
        _add(writer, name + part, (rows, columns), own)
    experts = (shape.experts,) if shape.experts else ()
    suffix = "_exps" if experts else ""
    for part, rows, columns, own in (
        ("ffn_gate", mlp, hidden, plain),
        ("ffn_up", mlp, hidden, plain),
        ("ffn_down", hidden, mlp, fine),
    ):
        _add(writer, name + part + suffix, (*experts, rows, columns), own)
    if experts:
        router = np.random.default_rng(layer).normal(0.0, 0.1, (shape.experts, hidden))
        writer.add_tensor(f"{name}ffn_gate_inp.weight", router.astype(np.float32))
        for part in ("attn_q_norm", "attn_k_norm"):
            _add_norm(writer, name + part, HEAD)
    for part in ("attn_norm", "ffn_norm"):
        _add_norm(writer, name + part, hidden)


def _add_norm(writer: GGUFWriter, name: str, size: int) -> None:
    writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))


def _add(writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    rows = int(np.prod(shape[:-1]))
    blocks: NDArray[np.uint8] = random_blocks(kind, (rows, shape[-1]), 0.02)
    writer.add_tensor(f"{name}.weight", blocks.reshape(*shape[:-1], -1), raw_dtype=GGMLQuantizationType[kind])

"""Memory of a rank, computed from the configuration of the model without its weights, and without torch."""

from math import prod
from pathlib import Path
from typing import NamedTuple

from protocol.kv_groups import ONE_GROUP, KVGroup
from services.checkpoint import default_dtype, is_gguf
from services.checkpoint.gguf import read_header
from services.config import WorkerConfig
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.layer_groups import LayerGroups
from services.worker.backends.native.model.partition import ModelPart
from services.worker.kernels.layout import kv_block_bytes

BITS = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625,
    "IQ4_XS": 4.3125, "MXFP4": 4.25, "BF16": 16.0, "F16": 32.0, "F32": 32.0, "bfloat16": 16.0, "float32": 32.0,
    "int8": 8.5, "int4": 5.0,
}  # fmt: skip
"""Bits of a weight in memory, with its share of scales and minima, by type in a GGUF file, dtype or quantisation."""


class RankMemory(NamedTuple):
    weights: int
    """Bytes of embedding, products and head."""
    kv_block: int
    """Bytes of a block of the KV cache."""
    per_token: int
    """Bytes of weights that one token reads: of a mixture of experts, those of the token's experts."""
    groups: tuple[KVGroup, ...] = ONE_GROUP
    """Groups of KV cache, each with a block table."""


def served_dtype(config: WorkerConfig, model: ModelConfig) -> str:
    """Return the dtype of activations and KV cache: float32 or bfloat16."""
    wanted = config.dtype if config.dtype != "auto" else default_dtype(config.model) or model.dtype
    return "bfloat16" if wanted == "bfloat16" else "float32"


def rank_memory(
    config: WorkerConfig, path: Path, part: ModelPart, block_size: int, context: int = 0, most_groups: int = 1
) -> RankMemory:
    """Return the memory of one rank.

    Args:
        context, most_groups: see `LayerGroups.of`
        path: the directory or the GGUF file.
        block_size: tokens of a KV block.

    Raises: CheckpointError
    """
    bits, whole, own = _bits(config, path, part.whole), part.whole, part.config
    queries, keys = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    width = read = own.num_layers * own.intermediate_size
    if (experts := own.experts) is not None:
        dense = len(experts.dense_layers.intersection(part.layers))
        always = dense * own.intermediate_size + (own.num_layers - dense) * experts.shared_width
        routed = (own.num_layers - dense) * len(part.experts) * experts.width
        width, read = always + routed, always + routed * experts.per_token // experts.number
    attention = own.num_layers * (2 * queries + 2 * keys)
    in_layers, per_token = (whole.hidden_size * (attention + 3 * mlps) for mlps in (width, read))
    rows = part.vocabulary_width * whole.hidden_size
    is_shared = whole.tied and part.is_last  # the same memory, in the layout of products
    tables = (part.is_first and not is_shared) * bits.embedding + part.is_last * bits.head
    weights = (in_layers * bits.layers + rows * tables) / 8
    itemsize = 2 if served_dtype(config, whole) == "bfloat16" else 4
    groups = LayerGroups.of(part, most_groups, context)
    block = kv_block_bytes(groups.depth, own.num_kv_heads, own.head_dim, block_size, itemsize)
    layers, head = per_token * bits.layers, rows * part.is_last * bits.head
    return RankMemory(round(weights), block, round((layers + head) / 8), groups.groups)


class _Bits(NamedTuple):
    """Bits of a weight; an average for layers."""

    embedding: float
    layers: float
    head: float


def _bits(config: WorkerConfig, path: Path, model: ModelConfig) -> _Bits:
    dtype = served_dtype(config, model)
    if config.quantization in ("int8", "int4"):
        return _Bits(BITS["int8"], BITS[config.quantization], BITS["int8"])
    if not is_gguf(path) or config.quantization == "none":
        # Products stored in bfloat16 stay so with float32 activations; the embedding does not.
        products = BITS["bfloat16" if model.dtype == "bfloat16" and not is_gguf(path) else dtype]
        return _Bits(BITS[dtype], products, products)
    tensors = {name: t for name, t in read_header(path).tensors.items() if len(t.shape) > 1}
    bits = {name: BITS[t.type.name] for name, t in tensors.items()}
    embedding = bits.pop("token_embd.weight", BITS["int8"])
    head = bits.pop("output.weight", embedding)
    sizes = {name: prod(tensors[name].shape) for name in bits}
    layers = sum(bits[name] * sizes[name] for name in bits) / max(1, sum(sizes.values()))
    return _Bits(embedding, layers, head)

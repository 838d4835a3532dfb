"""Names and shapes of a checkpoint's tensors, and the share of each that a rank reads."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from services.worker.backends.native.model.config import ExpertsConfig, ModelConfig
from services.worker.backends.native.model.experts import Expert, Experts
from services.worker.backends.native.model.layer import Layer, Mlp
from services.worker.backends.native.model.partition import ModelPart
from services.worker.backends.native.model.rope import head_order
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.interface.network import NetworkKernels
from services.worker.kernels.interface.products import EmbeddingTable, Linear
from services.worker.kernels.packed_weight import Packed
from services.worker.kernels.quantized_weight import Quantization, QuantizedWeight, Weight, quantized, stacked
from services.worker.runner import LoadError
from services.worker.weights import Checkpoint, Cut
from services.worker.weights.checkpoint import sampled_rows
from services.worker.weights.packed import PackedWeights

Wanted = Quantization | Literal["none"] | None


class ShardLoader:
    """Reads the weights of one rank; the methods raise LoadError when a tensor is missing or has another shape.

    Args:
        device: where vectors are kept; the network's own weights are on it too
        packed: packed weights that are used and those that are made.
        quantization: type of all products; the embedding and the head have 8 bits. Blocks of the file that have no more
            bits are kept. None: all of them; "none": they are dequantised.
    """

    def __init__(
        self,
        part: ModelPart,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        network: NetworkKernels,
        device: ComputeDevice,
        packed: PackedWeights,
        quantization: Wanted = None,
    ) -> None:
        self._part, self._whole, self._checkpoint = part, part.whole, checkpoint
        self._dtype, self._network, self._quantization = dtype, network, quantization
        self._device, self._packed = device, packed
        self.num_bytes = 0
        """Memory of the embedding and of the weights of products so far."""

    def embedding(self) -> EmbeddingTable:
        """Vectors of this rank's token ids. A tied head pads them with zeros to `vocabulary_width` vectors."""

        def pack() -> Packed:
            weight = self._tokens(name)
            if self._whole.tied and self._part.is_last:
                return self._network.pack(self._padded(weight))
            return self._network.pack(weight, is_table=True)

        name = "model.embed_tokens.weight"
        table = self._network.embedding(self._packed.get(name, pack))
        self.num_bytes += table.num_bytes
        return table

    def _linear(self, name: str, make: Callable[[], Weight], bias: torch.Tensor | None = None) -> Linear:
        product = self._network.linear(self._packed.get(name, lambda: self._network.pack(make())), bias)
        self.num_bytes += product.num_bytes
        return product

    def vector(self, name: str, size: int) -> torch.Tensor:
        """float32[size]"""
        return self._device.keep(self._checkpoint.take(name, (size,), self._dtype).float())

    def norm(self, name: str) -> torch.Tensor:
        """float32[hidden]"""
        return self._shifted(self.vector(name, self._whole.hidden_size))

    def _shifted(self, weight: torch.Tensor) -> torch.Tensor:
        offset = self._whole.norm_offset
        return weight + offset if offset else weight

    def layer(self, number: int) -> Layer:
        c, part, at = self._whole, self._part, f"model.layers.{number}."
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        own_heads, own_kv = (_scaled(s, c.head_dim) for s in (part.heads, part.kv_heads))
        order = head_order(c.ropes[number], c.head_dim)
        qkv = _parts(c.names.qkv, (heads, own_heads, order), (kv, own_kv, order), (kv, own_kv, None))
        self._refuse_unread(at)
        norms = (at + name + ".weight" if name else "" for name in c.names[:4])
        experts = part.config.experts
        attention_in, attention_out, mlp_in, mlp_out = (self.norm(x) if x else None for x in norms)
        return Layer(
            attention_in,
            attention_out,
            mlp_in,
            mlp_out,
            qkv=self._by_outputs(at, qkv, c.qkv_bias),
            head_norms=self._head_norms(at, number, order),
            sinks=self._sinks(at) if c.sinks else None,
            out=self._by_inputs(at + "self_attn.o_proj", heads, own_heads, c.out_bias),
            mlp=self._mlp(at) if experts is None or number in experts.dense_layers else self._experts(at, experts),
        )

    def _head_norms(self, at: str, layer: int, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        c = self._whole
        if c.norms_rotated_heads and c.ropes[layer] is not None:
            return (self._device.keep(torch.ones(c.head_dim)),) * 2
        if not c.qk_norm:
            return None
        number = (c.num_heads, c.num_kv_heads) if c.qk_norm_of_all_heads else (1, 1)
        queries, keys = (
            self._shifted(self.vector(f"{at}self_attn.{name}_norm.weight", heads * c.head_dim))
            for name, heads in zip("qk", number, strict=True)
        )
        return (queries, keys) if order is None else (queries[order], keys[order])

    def _sinks(self, at: str) -> torch.Tensor:
        whole = self._checkpoint.take(
            at + "self_attn.sinks", (self._whole.num_heads,), torch.float32, (self._part.heads,)
        )
        return self._device.keep(whole.contiguous())

    def _mlp(self, at: str) -> Mlp:
        c, own = self._whole, self._part.intermediate
        return Mlp(*self._gated(at, c.names.gate_up, c.names.down, c.intermediate_size, own, c.mlp_bias))

    def _gated(self, at: str, gate_up: Sequence[str], down: str, width: int, own: slice, bias: bool) -> Expert:
        """The products of an MLP that the ranks divide by its width."""
        parts = _parts(gate_up, *[(width, own, None)] * 2)
        return self._by_outputs(at, parts, bias), self._by_inputs(at + down, width, own, bias)

    def _experts(self, at: str, experts: ExpertsConfig) -> Experts:
        """The experts of this rank, and the whole router. Raises: LoadError, where experts are not supported."""
        c, whole, shared = self._whole, slice(None), None
        router = [_Part(c.names.router, experts.number, whole)]
        read = self._stacked_expert if at + c.names.stacked_experts[0] in self._checkpoint else None
        if experts.shared_width:
            gate, up, down = (c.names.shared_expert + name for name in ("gate_proj", "up_proj", "down_proj"))
            width = experts.shared_width * self._part.shard.tensor_parallel_size
            shared = self._gated(at, (gate, up), down, width, self._part.shared, experts.bias)
        return Experts(
            self._network,
            experts,
            self._by_outputs(at, router, experts.router_bias, "none"),
            self._part.experts,
            [(read or self._expert)(at, number, experts) for number in self._part.experts],
            c.activation,
            shared,
        )

    def _expert(self, at: str, number: int, experts: ExpertsConfig) -> Expert:
        names, size = self._whole.names, (experts.width, slice(None), None)
        gate_up = _parts([name.format(number) for name in names.expert_gate_up], size, size)
        down = f"{at}{names.expert_down.format(number)}"
        shape = self._whole.hidden_size, experts.width
        bias = self._product(f"{down}.bias", shape[:1]) if experts.bias else None
        weight = partial(self._weight, f"{down}.weight", shape, (), self._quantization)
        return self._by_outputs(at, gate_up, experts.bias), self._linear(down, weight, bias)

    def _stacked_expert(self, at: str, number: int, experts: ExpertsConfig) -> Expert:
        """One of the experts that are stored together."""
        names, hidden, width = self._whole.names.stacked_experts, self._whole.hidden_size, experts.width
        products = []
        for name, inputs, outputs in zip(names, (hidden, width), (2 * width, hidden), strict=True):
            cut = (slice(number, number + 1),)
            read = partial(self._stacked, at + name, (experts.number, outputs, inputs), cut)
            bias = None
            if experts.bias:
                bias = self._in_halves(name, self._product(f"{at}{name}_bias", (experts.number, outputs), *cut)[0])
            products.append(self._linear(f"{at}{name}[{number}]", read, bias))
        return products[0], products[1]

    def _stacked(self, name: str, shape: tuple[int, int, int], cut: Cut) -> Weight:
        """`shape`: experts, outputs, inputs."""
        if name.endswith(".weight"):
            stored = self._checkpoint.take(name, shape, self._dtype, cut)[0]
        else:
            turned = shape[0], shape[2], shape[1]
            stored = self._in_halves(name, self._checkpoint.take(name, turned, self._dtype, cut)[0].t())
        kind = self._quantization
        weight: Weight = stored.contiguous()
        if kind == "int8" or kind == "int4":
            weight = quantized(stored, kind)
        self._count(weight)
        return weight

    def _in_halves(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Bring alternating rows of gate and up one behind the other."""
        alternate = self._whole.names.alternating and name.endswith("gate_up_proj")
        return torch.cat((rows[0::2], rows[1::2])) if alternate else rows

    def _refuse_unread(self, at: str) -> None:
        """Raises: LoadError, if the checkpoint has tensors that the configuration does not use."""
        c = self._whole
        if f"model.layers.{c.num_layers}.{c.names.qkv[0]}.weight" in self._checkpoint:
            raise LoadError(
                f"the checkpoint has more layers than the {c.num_layers} of config.json; "
                "the files do not belong together"
            )
        unread = [f"{name}.bias" for name in c.names.qkv if not c.qkv_bias]
        unread += [] if c.out_bias else ["self_attn.o_proj.bias"]
        unread += [] if c.mlp_bias or c.experts else [f"{name}.bias" for name in (*c.names.gate_up, c.names.down)]
        unread += [] if c.qk_norm else ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        unread += [] if c.sinks else ["self_attn.sinks"]
        for name in unread:
            if at + name in self._checkpoint:
                raise LoadError(
                    f"the checkpoint has a tensor {at}{name}, but config.json describes a model without it; "
                    "the files do not belong together"
                )

    def head(self, embedding: EmbeddingTable | None) -> Linear:
        """A product from hidden states to `vocabulary_width` logits; logits beyond the rank's token ids are zero."""
        if self._whole.tied:
            self._refuse_another_head()
        if self._whole.tied and embedding is not None:
            head = self._network.tied(embedding)
            self.num_bytes += head.num_bytes if head.num_bytes != embedding.num_bytes else 0  # in another dtype: a copy
            return head
        name = "model.embed_tokens.weight" if self._whole.tied else "lm_head.weight"
        return self._linear("head", lambda: self._padded(self._tokens(name)))

    def _refuse_another_head(self) -> None:
        """Raises: LoadError, if the checkpoint has a head that differs from the embedding it is tied to."""
        if "lm_head.weight" not in self._checkpoint:
            return
        shape = self._whole.vocab_size, self._whole.hidden_size
        for rows in sampled_rows(shape):
            head = self._checkpoint.take("lm_head.weight", shape, torch.float32, (rows,))
            if not torch.equal(head, self._checkpoint.take("model.embed_tokens.weight", shape, torch.float32, (rows,))):
                raise LoadError(
                    "lm_head.weight differs from model.embed_tokens.weight, but config.json ties them; "
                    "set tie_word_embeddings to false in config.json"
                )

    def _padded(self, weight: Weight) -> Weight:
        missing = self._part.vocabulary_width - weight.shape[0]
        if isinstance(weight, QuantizedWeight):
            return weight.padded(missing)
        return functional.pad(weight, (0, 0, 0, missing)) if missing else weight

    def _tokens(self, name: str) -> Weight:
        shape = (self._whole.vocab_size, self._whole.hidden_size)
        wanted = "int8" if self._quantization == "int4" else self._quantization
        return self._weight(name, shape, (self._part.vocabulary,), wanted)

    def _by_outputs(
        self, at: str, parts: "Sequence[_Part]", bias: bool, wanted: Wanted | Literal["default"] = "default"
    ) -> Linear:
        """Stack rows of several tensors of the checkpoint."""
        kind, hidden = self._quantization if wanted == "default" else wanted, self._whole.hidden_size

        def read(x: _Part) -> Weight:
            return _ordered(self._weight(f"{at}{x.name}.weight", (x.outputs, hidden), (x.own,), kind), x.order)

        name, biases = at + " ".join(x.name for x in parts), []
        for x in parts if bias else ():
            values = self._product(f"{at}{x.name}.bias", (x.outputs,), x.own)
            biases.append(values if x.order is None else values[_rows_in_order(len(values), x.order)])
        return self._linear(name, lambda: stacked(list(map(read, parts))), torch.cat(biases) if biases else None)

    def _by_inputs(self, name: str, width: int, own: slice, bias: bool) -> Linear:
        """A product with this rank's share of the inputs. Its results are summed over the ranks."""
        hidden = self._whole.hidden_size

        def read() -> Weight:
            weight = self._weight(f"{name}.weight", (hidden, width), (slice(None), own), self._quantization)
            return weight.contiguous() if isinstance(weight, torch.Tensor) else weight

        adds = bias and self._part.adds_bias
        return self._linear(name, read, self._product(f"{name}.bias", (hidden,)) if adds else None)

    def _weight(self, name: str, shape: tuple[int, int], cut: Cut, wanted: Wanted) -> Weight:
        weight = self._read(name, shape, cut, wanted)
        self._count(weight)
        return weight

    def _count(self, weight: Weight) -> None:
        self._packed.types |= {*weight.kinds} if isinstance(weight, QuantizedWeight) else {str(weight.dtype)}

    def _read(self, name: str, shape: tuple[int, int], cut: Cut, wanted: Wanted) -> Weight:
        if wanted == "none":
            return self._product(name, shape, *cut)
        blocks = self._checkpoint.blocks(name, shape, cut)
        if blocks is not None and (wanted != "int4" or "4" in blocks.kind):
            return QuantizedWeight((blocks,))
        if wanted is None:
            return self._product(name, shape, *cut)
        return quantized(self._checkpoint.take(name, shape, torch.float32, cut), wanted)

    def _product(self, name: str, shape: tuple[int, ...], *cut: slice) -> torch.Tensor:
        return self._checkpoint.take(name, shape, self._dtype, cut)


class _Part(NamedTuple):
    """Rows of a tensor that one rank multiplies by."""

    name: str
    outputs: int
    """Rows of the whole tensor."""
    own: slice
    order: torch.Tensor | None = None
    """int64[head_dim]: order of the rows of each head; None: they stay."""


def _parts(names: Sequence[str], *sizes: tuple[int, slice, torch.Tensor | None]) -> list[_Part]:
    """Return the rows of several tensors, or of one that has the rows of all, one after the other.

    Args:
        sizes: of each, its outputs, this rank's share of them, and their order.
    """
    if len(names) == len(sizes):
        return [_Part(name, *size) for name, size in zip(names, sizes, strict=True)]
    parts, first, total = [], 0, sum(outputs for outputs, *_ in sizes)
    for outputs, own, order in sizes:
        parts.append(_Part(names[0], total, slice(first + own.start, first + own.stop), order))
        first += outputs
    return parts


def _rows_in_order(outputs: int, order: torch.Tensor) -> torch.Tensor:
    """Return int64[outputs]: the rows of heads in another order within each head."""
    return torch.arange(outputs).view(-1, len(order))[:, order].flatten()


def _ordered(weight: Weight, order: torch.Tensor | None) -> Weight:
    if order is None:
        return weight
    index = _rows_in_order(weight.shape[0], order)
    return weight.rows(index) if isinstance(weight, QuantizedWeight) else weight[index]


def has_blocks(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether the file contains quantised products."""
    name, width = config.names.down, config.intermediate_size
    if config.experts is not None and 0 not in config.experts.dense_layers:
        name, width = config.names.expert_down.format(0), config.experts.width
        if f"model.layers.0.{name}.weight" not in checkpoint:
            return False
    shape = config.hidden_size, width
    return checkpoint.blocks(f"model.layers.0.{name}.weight", shape, (slice(1),)) is not None


def _scaled(share: slice, size: int) -> slice:
    return slice(share.start * size, share.stop * size)

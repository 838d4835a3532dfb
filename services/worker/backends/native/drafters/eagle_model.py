"""The network of an EAGLE head: one decoder layer that guesses the model's next hidden state, and from it the token.

Place i reads token i + 1 and the model's hidden state of token i, and stands at position i; what it yields stands for
the hidden state of token i + 1, so it is the next place's input when a draft goes on. Of the places before, the layer
needs keys and values only, so what follows attention is computed for the last place of each row.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.attention import Attention, Context
from services.worker.backends.native.drafters.base import I32, Target
from services.worker.backends.native.drafters.eagle_config import EagleConfig
from services.worker.backends.native.kernels.likeliest import likeliest_kernel
from services.worker.backends.native.kernels.rows import gate_kernel, norm_kernel
from services.worker.backends.native.model import FINAL
from services.worker.backends.native.product import Product
from services.worker.runner import LoadError
from services.worker.weights import Checkpoint


class Inputs(NamedTuple):
    """Of every place that is computed; float32."""

    attention: torch.Tensor
    """[places, what queries, keys and values are made of]"""
    residual: torch.Tensor
    """[places, hidden]"""


class EagleModel(ABC):
    """Weights and forward pass, in float32 but for the cache: one row at a time is what it computes most, and then
    reading weights takes longer than arithmetic. For one calling thread."""

    def __init__(self, config: EagleConfig, checkpoint: Checkpoint, target: Target) -> None:
        """Raises: LoadError, when a tensor is missing or has another shape."""
        self.config = config
        self._norm, self._gate, self._likeliest = norm_kernel(False), gate_kernel(False), likeliest_kernel()
        self._attention = Attention(config.layer, torch.float32, target.dtype)
        self._load(loader := _Loader(config, checkpoint, target))
        self._embedding = loader.embedding()
        self._tokens = loader.draft_tokens()
        self._head = loader.head(self._tokens)

    @abstractmethod
    def _load(self, loader: "_Loader") -> None:
        """Reads the weights of the layer."""

    @abstractmethod
    def fuse(self, states: list[torch.Tensor]) -> torch.Tensor:
        """What the first token of a draft reads, of the target's hidden states: float32[places, hidden]."""

    @abstractmethod
    def _inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> Inputs:
        """Of token embeddings and hidden states, float32[places, hidden] each; the latter may be changed."""

    def _read_layer(self, loader: "_Loader", inputs: int) -> None:
        self._qkv, self._out = loader.qkv(inputs), loader.out()
        self._post_norm = loader.vector("layers.0.post_attention_layernorm.weight")
        self._gate_up, self._down = loader.gate_up(), loader.down()

    def predict(
        self, ids: torch.Tensor, hidden: torch.Tensor, context: Context, last: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the places of `context.batch` and writes their keys and values.

        Args:
            ids: int64[places], of the tokens after each place's own
            hidden: float32[places, hidden], of each place's own token; may be changed
            last: int64[rows], places whose tiles are in the batch; None: all of them.

        Returns:
            float32[rows, hidden], in place of the hidden state of the next token.
        """
        layer = self.config.layer
        inputs = self._inputs(self._embedding[ids].float(), hidden)
        attended = torch.empty(len(ids), layer.num_heads * layer.head_dim)
        self._attention.begin(context)
        self._attention.run(0, self._qkv(inputs.attention), None, attended)
        residual = inputs.residual
        if last is not None:
            residual, attended = residual[last], attended[last]
        if len(residual):
            gate_up = self._gate_up(self._normed(residual, self._out(attended), self._post_norm))
            residual += self._down(self._gated(gate_up))
        return residual

    def drafts(self, hidden: torch.Tensor) -> tuple[I32, NDArray[np.float32]]:
        """The most likely token after each of float32[rows, hidden], and its chance; int32[rows], float32[rows]."""
        logits = self._head(self._before_head(hidden))
        rows, size = logits.shape
        ids, chances = np.empty(rows, np.int32), np.empty(rows, np.float32)
        self._likeliest.run(rows, (logits.data_ptr(), size, ids.ctypes.data, chances.ctypes.data))
        return ids if self._tokens is None else self._tokens[ids], chances

    def _before_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def _normed(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Adds `delta` to float32[rows, hidden] `residual`, in place; returns the normalised sum."""
        rows, width = residual.shape
        out = torch.empty(rows, width)
        added = 0 if delta is None else delta.data_ptr()
        values = (residual.data_ptr(), added, weight.data_ptr(), out.data_ptr(), width)
        self._norm.run(rows, (*values, self.config.layer.norm_eps))
        return out

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up: float32[rows, 2 * intermediate] to [rows, intermediate]."""
        rows, width = len(gate_up), self.config.layer.intermediate_size
        out = torch.empty(rows, width)
        self._gate.run(rows, (gate_up.data_ptr(), out.data_ptr(), width))
        return out


class Eagle(EagleModel):
    """EAGLE: the token's embedding and the target's last hidden state are fused into the layer's input, which has no
    norm of its own. It yields the hidden state that the target's head reads."""

    def _load(self, loader: "_Loader") -> None:
        hidden = self.config.layer.hidden_size
        self._read_layer(loader, hidden)
        self._fc = loader.linear("fc", hidden, 2 * hidden)

    def fuse(self, states: list[torch.Tensor]) -> torch.Tensor:
        return states[0].float()

    def _inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> Inputs:
        fused = self._fc(torch.cat((embedded, hidden), 1))
        return Inputs(fused, fused)


class Eagle3(EagleModel):
    """EAGLE-3: hidden states of several of the target's layers are fused once; embedding and hidden state, each after
    its norm, stand side by side in the layer's input. The head has a norm, and may have a vocabulary of its own."""

    def _load(self, loader: "_Loader") -> None:
        c = self.config
        self._read_layer(loader, 2 * c.layer.hidden_size)
        self._fc = loader.linear("fc", c.layer.hidden_size, loader.target_hidden_size * len(c.reads))
        self._input_norm = loader.vector("layers.0.input_layernorm.weight")
        self._hidden_norm = loader.vector("layers.0.hidden_norm.weight")
        self._final_norm = loader.vector("norm.weight")

    def fuse(self, states: list[torch.Tensor]) -> torch.Tensor:
        return self._fc(torch.cat(states, 1).float())

    def _inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> Inputs:
        normed = self._normed(hidden, None, self._hidden_norm)
        left = self._normed(embedded, None, self._input_norm)
        residual = normed.clone() if self.config.norm_before_residual else hidden
        return Inputs(torch.cat((left, normed), 1), residual)

    def _before_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._normed(hidden, None, self._final_norm)


def load(directory: Path, target: Target) -> EagleModel:
    """The head in `directory`. Raises: LoadError, also when it is not one of this model's."""
    method = target.speculation.method
    config = EagleConfig.from_directory(directory, method, target.model.part.whole)
    layers = target.model.part.layers
    if foreign := [read for read in config.reads if read != FINAL and read not in layers]:
        raise LoadError(
            f"it reads hidden states of layers {foreign}, but only layers {layers.start} to {layers.stop - 1} are "
            "computed where it runs, by the last pipeline stage; use fewer stages, or a head that reads no others"
        )
    kind = Eagle if method == "eagle" else Eagle3
    return kind(config, Checkpoint(directory), target)


class _Loader:
    """Names and shapes of a checkpoint's tensors; what it does not have is the target's."""

    def __init__(self, config: EagleConfig, checkpoint: Checkpoint, target: Target) -> None:
        self._config, self._checkpoint, self._target = config, checkpoint, target
        self._dtype = target.dtype
        self._whole = target.model.part.whole
        self._layer = "midlayer." if "midlayer.self_attn.q_proj.weight" in checkpoint else "layers.0."
        self.target_hidden_size = self._whole.hidden_size

    def vector(self, name: str) -> torch.Tensor:
        """float32[hidden]"""
        size = self._config.layer.hidden_size
        return self._checkpoint.take(self._named(name), (size,), self._dtype).float()

    def linear(self, name: str, outputs: int, inputs: int) -> Product:
        """With a bias if there is one."""
        return self._stacked({name: outputs}, inputs, self._named(f"{name}.bias") in self._checkpoint)

    def qkv(self, inputs: int) -> Product:
        c = self._config.layer
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        sizes = {f"layers.0.self_attn.{x}_proj": size for x, size in (("q", heads), ("k", kv), ("v", kv))}
        return self._stacked(sizes, inputs, c.qkv_bias)

    def out(self) -> Product:
        c = self._config.layer
        return self._stacked(
            {"layers.0.self_attn.o_proj": c.hidden_size}, c.num_heads * c.head_dim, c.out_bias
        )

    def gate_up(self) -> Product:
        c = self._config.layer
        sizes = dict.fromkeys(("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"), c.intermediate_size)
        return self._stacked(sizes, c.hidden_size, c.mlp_bias)

    def down(self) -> Product:
        c = self._config.layer
        return self._stacked({"layers.0.mlp.down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias)

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden] in the model's dtype: its own, or that of the target."""
        shape = self._whole.vocab_size, self._config.layer.hidden_size
        if "embed_tokens.weight" in self._checkpoint:
            return self._checkpoint.take("embed_tokens.weight", shape, self._dtype)
        self._shares("embed_tokens.weight")
        shared = self._target.model.embedding
        if shared is not None and len(shared) == self._whole.vocab_size:
            return shared
        return self._target.checkpoint.take("model.embed_tokens.weight", shape, self._dtype)

    def draft_tokens(self) -> I32 | None:
        """int32[draft_vocab_size]: which token each draft id is; None: draft ids are tokens."""
        size, vocab = self._config.draft_vocab_size, self._whole.vocab_size
        if size == vocab and "d2t" not in self._checkpoint:
            return None
        offsets = self._checkpoint.integers("d2t")
        if len(offsets) != size:
            raise LoadError(
                f"tensor d2t has {len(offsets)} entries, but config.json says {size} draft tokens"
            )
        tokens = offsets + torch.arange(size)
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            raise LoadError(f"tensor d2t names tokens outside of the vocabulary of {vocab}")
        if "t2d" in self._checkpoint:
            known = torch.zeros(vocab, dtype=torch.int64).index_fill_(0, tokens, 1)
            if not torch.equal(self._checkpoint.integers("t2d"), known):
                raise LoadError("tensors d2t and t2d do not name the same tokens; download the model again")
        return np.asarray(tokens.to(torch.int32).numpy())

    def head(self, tokens: I32 | None) -> Product:
        """hidden to logits of the draft ids: its own, or those rows of the target's."""
        hidden, size = self._config.layer.hidden_size, self._config.draft_vocab_size
        if "lm_head.weight" in self._checkpoint:
            return Product(self._weight("lm_head.weight", (size, hidden)))
        self._shares("lm_head.weight")
        whole = self._whole
        name = "model.embed_tokens.weight" if whole.tied else "lm_head.weight"
        weight = self._target.checkpoint.take(name, (whole.vocab_size, hidden), self._dtype)
        return Product(weight if tokens is None else weight[torch.from_numpy(tokens).long()])

    def _shares(self, name: str) -> None:
        if self._config.layer.hidden_size != self._whole.hidden_size:
            raise LoadError(
                f"the checkpoint has no tensor {name}, and that of the model has another hidden size"
            )

    def _stacked(self, sizes: dict[str, int], inputs: int, bias: bool) -> Product:
        weights = [self._weight(f"{name}.weight", (size, inputs)) for name, size in sizes.items()]
        biases = [self._weight(f"{name}.bias", (size,)) for name, size in sizes.items() if bias]
        return Product(torch.cat(weights), torch.cat(biases) if biases else None)

    def _weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._checkpoint.take(self._named(name), shape, self._dtype)

    def _named(self, name: str) -> str:
        return name.replace("layers.0.", self._layer)

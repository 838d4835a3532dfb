"""The network of an EAGLE head: one decoder layer that guesses the model's next hidden state, and from it the token.

Place i reads token i + 1 and the model's hidden state of token i, and stands at position i; what it yields stands for
the hidden state of token i + 1, so it is the next place's input when a draft goes on. Of the places before, the layer
needs keys and values only, so what follows attention is computed for the last place of each row.

A draft is one call: the layer's kernels stand in two sequences, one over places and one over rows, which another kernel
runs round after round. All is float32 but for the cache.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from services.worker.backends.native.attention import scores, shared_columns
from services.worker.backends.native.drafters.base import I32, States, Target
from services.worker.backends.native.drafters.desk import Desk, Laid
from services.worker.backends.native.drafters.eagle_config import EagleConfig
from services.worker.backends.native.kernels.attention import attention_kernel, write_kernel
from services.worker.backends.native.kernels.draft import copy_kernel, draft_kernel
from services.worker.backends.native.kernels.likeliest import likeliest_kernel
from services.worker.backends.native.kernels.rope import turn_kernel
from services.worker.backends.native.kernels.rows import gate_kernel, norm_kernel
from services.worker.backends.native.kernels.sequence import Sequence
from services.worker.backends.native.kernels.team import shared
from services.worker.backends.native.kv_cache import KVCache, padded
from services.worker.backends.native.model import FINAL
from services.worker.backends.native.product import Product
from services.worker.backends.native.rope import inverse_frequencies
from services.worker.runner import LoadError
from services.worker.weights import Checkpoint

_FEW = 64
"""Places that there is room for at first."""


class Entry(NamedTuple):
    """Where the layer's input is; float32."""

    attention: int
    """[places, what queries, keys and values are made of]"""
    residual: int
    """[places, hidden]"""


class EagleModel(ABC):
    """Weights and forward pass. For one calling thread."""

    def __init__(self, config: EagleConfig, checkpoint: Checkpoint, target: Target) -> None:
        """Raises: LoadError, when a tensor is missing or has another shape."""
        self.config = config
        self._half_cache = target.dtype == torch.bfloat16
        self._frequencies = inverse_frequencies(config.layer.rope, config.layer.head_dim)
        self._norm, self._copy, self._draft = norm_kernel(False), copy_kernel(False), draft_kernel()
        self._load(loader := _Loader(config, checkpoint, target))
        self._embedding = loader.embedding()
        self._embed = copy_kernel(self._embedding.dtype == torch.bfloat16)
        self._tokens = loader.draft_tokens()
        self._head = loader.head(self._tokens)

    @abstractmethod
    def _load(self, loader: "_Loader") -> None:
        """Reads the weights of the layer."""

    @abstractmethod
    def fuse(self, states: States) -> torch.Tensor:
        """What the first token of a draft reads, of the target's hidden states: float32[places, hidden]."""

    @abstractmethod
    def _enter(self, before: Sequence, desk: Desk) -> Entry:
        """From `desk.ids` and `desk.hidden` to the layer's input."""

    @abstractmethod
    def _leave(self, after: Sequence, desk: Desk, delta: int) -> int:
        """Adds what is at `delta` to `desk.yielded`; where the head reads, float32[rows, hidden]."""

    def _read_layer(self, loader: "_Loader", inputs: int) -> None:
        self._qkv, self._out = loader.qkv(inputs), loader.out()
        self._post_norm = loader.vector("layers.0.post_attention_layernorm.weight")
        self._gate_up, self._down = loader.gate_up(), loader.down()

    def begin(self, cache: KVCache, table: I32) -> None:
        """Keys and values lie in layer 0 of `cache` under block table int32[slots, blocks]."""
        self._cache, self._table = cache, table
        self._lay(_FEW)

    def end(self) -> None:
        for name in ("_cache", "_table", "_desk", "_before", "_after", "_attend"):
            self.__dict__.pop(name, None)

    def _lay(self, size: int) -> None:
        """A desk for `size` places, and what happens on it."""
        c, before, after = self.config.layer, Sequence(), Sequence()
        desk, heads, middle = Desk(size, c.hidden_size), c.num_heads * c.head_dim, c.head_dim // 2
        queries = desk.floats(c.num_heads * padded(c.head_dim))
        cos, sin = desk.floats(middle), desk.floats(middle)
        qkv, attended = desk.floats(heads + 2 * c.num_kv_heads * c.head_dim), desk.floats(heads)
        cache, table = self._cache, self._table
        shared = (
            cache.keys[0].data_ptr(),
            cache.values[0].data_ptr(),
            *shared_columns(c, cache, table, queries),
        )
        kinds = False, self._half_cache
        entry = self._enter(before, desk)
        self._qkv.follow(before, entry.attention, qkv)
        before.add(turn_kernel(), (desk.positions, self._frequencies.data_ptr(), cos, sin, middle))
        where = desk.slots, desk.positions, cos, sin
        before.add(write_kernel(*kinds), (*shared, qkv, *where, 0, 0, c.norm_eps, c.head_dim**-0.5))

        tiles = attended, desk.tiles, c.windows[0], 0
        self._attend = after.add(attention_kernel(*kinds), (*shared, *tiles), c.num_kv_heads)
        rows, delta, normed = desk.floats(heads), desk.floats(c.hidden_size), desk.floats(c.hidden_size)
        both, gated = desk.floats(2 * c.intermediate_size), desk.floats(c.intermediate_size)
        after.add(self._copy, (attended, desk.last, rows, heads, heads, 0))
        after.add(self._copy, (entry.residual, desk.last, desk.yielded, c.hidden_size, c.hidden_size, 0))
        self._out.follow(after, rows, delta)
        after.add(
            self._norm, (desk.yielded, delta, self._post_norm.data_ptr(), normed, c.hidden_size, c.norm_eps)
        )
        self._gate_up.follow(after, normed, both)
        after.add(gate_kernel(False), (both, gated, c.intermediate_size))
        self._down.follow(after, gated, delta)
        logits = desk.floats(self.config.draft_vocab_size)
        self._head.follow(after, self._leave(after, desk, delta), logits)
        after.add(
            likeliest_kernel(), (logits, self.config.draft_vocab_size, desk.chosen, desk.sure, desk.sharpness)
        )
        self._desk, self._before, self._after = desk, before, after

    def desk(self, places: int) -> Desk:
        """With room for so many."""
        if places > self._desk.size:
            self._lay(1 << (places - 1).bit_length())
        return self._desk

    def draft(self, laid: Laid, hidden: torch.Tensor, proposed: I32, least: float) -> None:
        """Computes the places that were laid on the desk, over whatever an earlier draft left there, then drafts.

        Args:
            hidden: float32[places, hidden], as `fuse` gives them
            proposed: int32[any, k], C-contiguous; gets a draft for each row on the desk and token, as long as all of
                the row's together have a chance of `least`, by the head's own word.
        """
        desk, k, c = self._desk, proposed.shape[1], self.config.layer
        self._attend.args["scratch"] = scores(c, self._cache.block_size, laid.end + k)
        desk.put_hidden(hidden)
        tokens = 0 if self._tokens is None else self._tokens.ctypes.data
        numbers = *self._before.values, *self._after.values, *shared(), k, laid.places, laid.rows, least
        self._draft.run(1, (*numbers, *desk.columns, c.hidden_size, tokens, proposed.ctypes.data))


class Eagle(EagleModel):
    """EAGLE: the token's embedding and the target's last hidden state are fused into the layer's input, which has no
    norm of its own. It yields the hidden state that the target's head reads."""

    def _load(self, loader: "_Loader") -> None:
        hidden = self.config.layer.hidden_size
        self._read_layer(loader, hidden)
        self._fc = loader.linear("fc", hidden, 2 * hidden)

    def fuse(self, states: States) -> torch.Tensor:
        return states[0].float()

    def _enter(self, before: Sequence, desk: Desk) -> Entry:
        width, both, fused = desk.width, desk.floats(2 * desk.width), desk.floats(desk.width)
        before.add(self._embed, (self._embedding.data_ptr(), desk.ids, both, width, 2 * width, 0))
        before.add(self._copy, (desk.hidden, 0, both + 4 * width, width, 2 * width, 0))
        self._fc.follow(before, both, fused)
        return Entry(fused, fused)

    def _leave(self, after: Sequence, desk: Desk, delta: int) -> int:
        after.add(self._copy, (delta, 0, desk.yielded, desk.width, desk.width, 1))
        return desk.yielded


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

    def fuse(self, states: States) -> torch.Tensor:
        return self._fc(torch.cat(tuple(states), 1).float())

    def _enter(self, before: Sequence, desk: Desk) -> Entry:
        width, eps = desk.width, self.config.layer.norm_eps
        embedded, left, right, both = (desk.floats(width * n) for n in (1, 1, 1, 2))
        before.add(self._embed, (self._embedding.data_ptr(), desk.ids, embedded, width, width, 0))
        before.add(self._norm, (embedded, 0, self._input_norm.data_ptr(), left, width, eps))
        before.add(self._norm, (desk.hidden, 0, self._hidden_norm.data_ptr(), right, width, eps))
        before.add(self._copy, (left, 0, both, width, 2 * width, 0))
        before.add(self._copy, (right, 0, both + 4 * width, width, 2 * width, 0))
        return Entry(both, right if self.config.norm_before_residual else desk.hidden)

    def _leave(self, after: Sequence, desk: Desk, delta: int) -> int:
        normed, eps = desk.floats(desk.width), self.config.layer.norm_eps
        after.add(self._norm, (desk.yielded, delta, self._final_norm.data_ptr(), normed, desk.width, eps))
        return normed


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

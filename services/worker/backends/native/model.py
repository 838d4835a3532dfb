"""The transformer: Llama, Mistral, Qwen2 and Qwen3 are this one forward pass with different parts present.

Tensor parallelism cuts products in pairs: the first of a pair by its outputs (queries, keys and values; gate and up),
the second by its inputs (out; down), so that one sum over the ranks per pair makes every rank's residual stream whole
again, with the same bits. Embedding and head are cut by token ids.
"""

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from services.worker.backends.native.attention import Attention, Context
from services.worker.backends.native.kernels.rows import gate_kernel, norm_kernel
from services.worker.backends.native.linear import Linear, activation_dtype
from services.worker.backends.native.logprobs import PromptScores
from services.worker.backends.native.partition import Part
from services.worker.backends.pooling import PooledRows
from services.worker.distributed.ranks import Ranks
from services.worker.distributed.tensor_parallel import TensorParallelGroup
from services.worker.runner import Progress
from services.worker.weights import Checkpoint

FINAL = -1
"""In place of a layer's number: after the final norm."""


@dataclass
class HiddenStates:
    """What a drafter reads of one step, of all its tokens."""

    reads: tuple[int, ...]
    """Numbers of layers, whose input it is (the residual stream), or FINAL."""
    taken: dict[int, torch.Tensor] = field(default_factory=dict)
    """[tokens, hidden] each: float32, or activations for FINAL"""


@dataclass
class Layer:
    """Heads, KV heads and intermediate are this rank's own."""

    input_norm: torch.Tensor
    """float32[hidden]"""
    qkv: Linear
    """hidden to (heads + 2 * kv_heads) * head_dim"""
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    """float32[head_dim] each, of queries and of keys"""
    out: Linear
    """heads * head_dim to hidden"""
    post_norm: torch.Tensor
    """float32[hidden]"""
    gate_up: Linear
    """hidden to 2 * intermediate"""
    down: Linear
    """intermediate to hidden"""


class Model:
    """The weights of one rank, and the forward pass over a paged cache. For one calling thread."""

    def __init__(self, part: Part, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress) -> None:
        """Raises: LoadError, when a tensor is missing or has another shape."""
        self.part, self.config, self._activations = part, part.config, activation_dtype(dtype)
        half = self._activations == torch.bfloat16
        self._norm, self._gate = norm_kernel(half), gate_kernel(half)
        self._attention = Attention(part.config, self._activations, dtype)
        loader = _Loader(part, checkpoint, dtype, self._activations)
        self.embedding = loader.embedding() if part.is_first else None
        """[this rank's token ids, hidden] in the model's dtype"""
        self._layers = []
        for number in part.layers:
            self._layers.append(loader.layer(number))
            progress("loading weights", len(self._layers) / (len(part.layers) + 1))
        if part.is_last:
            self._final_norm = loader.vector("model.norm.weight", part.whole.hidden_size)
            self.head = loader.head(self.embedding)
        progress("loading weights", 1.0)

    def forward(
        self,
        ids: torch.Tensor | None,
        context: Context,
        ranks: Ranks,
        pooled: PooledRows | None = None,
        prompts: PromptScores | None = None,
        hidden: HiddenStates | None = None,
    ) -> torch.Tensor | None:
        """Computes every token of the step in this rank's layers and writes their keys and values to the cache.

        Args:
            ids: int64[tokens]; only the first stage reads them.
            pooled: takes the hidden states that it asks for; only the last stage has them.
            prompts: takes the logits that it asks for, on the output rank; the last stage's ranks agree on them.
            hidden: takes the states that it asks for, of this stage's layers.

        Returns:
            float32[sampled tokens, vocab_size], the logits after each token of `batch.sampled`: on the output rank.
            None on the others.

        Raises: RanksLost
        """
        batch, config, team, stages = context.batch, self.config, ranks.tensor_parallel, ranks.pipeline
        tokens = len(batch.positions)
        attended = torch.empty(tokens, config.num_heads * config.head_dim, dtype=self._activations)
        self._attention.begin(context)
        if self.embedding is not None and ids is not None:
            residual = self._embedded(self.embedding, ids, team)
        else:
            residual = torch.empty(tokens, config.hidden_size)
            stages.receive_activations(residual)
        delta: torch.Tensor | None = None
        reads = hidden.reads if hidden is not None else ()
        for number, layer in enumerate(self._layers):
            normed = self._normed(residual, delta, layer.input_norm)
            if hidden is not None and (whole := self.part.layers[number]) in reads:
                hidden.taken[whole] = residual.clone()
            qkv = layer.qkv(normed)
            self._attention.run(number, qkv, layer.head_norms, attended)
            delta = team.all_reduce(layer.out(attended))
            gate_up = layer.gate_up(self._normed(residual, delta, layer.post_norm))
            delta = team.all_reduce(layer.down(self._gated(gate_up)))
        assert delta is not None, "a stage has at least one layer"
        if self.part.is_last:
            if pooled is not None:
                wanted = residual[pooled.tokens], delta[pooled.tokens]
                pooled.take(self._normed(*wanted, self._final_norm).float())
            if prompts is not None:
                for some in prompts.slices(self.part.whole.vocab_size):
                    states = self._normed(residual[some], delta[some], self._final_norm)
                    if (logits := self._logits(states, team)) is not None:
                        prompts.take(logits)
            if hidden is not None and FINAL in reads:
                hidden.taken[FINAL] = self._normed(residual, delta, self._final_norm)
                return self._logits(hidden.taken[FINAL][batch.sampled], team)
            sampled = residual[batch.sampled], delta[batch.sampled]
            return self._logits(self._normed(*sampled, self._final_norm), team)
        stages.send_activations(residual.add_(delta))  # the same sum that the next norm would have made
        return None

    def _embedded(
        self, embedding: torch.Tensor, ids: torch.Tensor, team: TensorParallelGroup
    ) -> torch.Tensor:
        """float32[tokens, hidden]: each token's row comes from the rank that has it, zeros from the others."""
        if team.size == 1:
            return embedding[ids].float()
        own = ids - self.part.vocabulary.start
        foreign = (own < 0) | (own >= len(embedding))
        rows = embedding[own.masked_fill_(foreign, 0)].masked_fill_(foreign[:, None], 0)
        return team.all_reduce(rows).float()

    def _logits(self, states: torch.Tensor, team: TensorParallelGroup) -> torch.Tensor | None:
        """Of states after the final norm."""
        vocab = self.part.whole.vocab_size
        if not len(states):
            return torch.empty(0, vocab) if team.is_first else None
        parts = team.gather(self.head(states))
        if len(parts) == 1:
            return parts[0].float()
        return torch.cat(parts, 1)[:, :vocab].float().contiguous() if parts else None

    def _normed(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Adds `delta` to float32[rows, hidden] `residual`, in place; returns the normalised sum as activations."""
        rows, width = residual.shape
        out = torch.empty(rows, width, dtype=self._activations)
        added = 0 if delta is None else delta.data_ptr()
        values = (residual.data_ptr(), added, weight.data_ptr(), out.data_ptr(), width, self.config.norm_eps)
        self._norm.run(rows, values)
        return out

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up: activations[rows, 2 * intermediate] to [rows, intermediate]."""
        rows, width = len(gate_up), self.config.intermediate_size
        out = torch.empty(rows, width, dtype=self._activations)
        self._gate.run(rows, (gate_up.data_ptr(), out.data_ptr(), width))
        return out


class _Loader:
    """Names and shapes of a checkpoint's tensors, and which part of each this rank reads."""

    def __init__(
        self, part: Part, checkpoint: Checkpoint, dtype: torch.dtype, activations: torch.dtype
    ) -> None:
        self._part, self._whole, self._checkpoint = part, part.whole, checkpoint
        self._dtype, self._activations = dtype, activations

    def embedding(self) -> torch.Tensor:
        """[this rank's token ids, hidden] in the model's dtype"""
        return self._tokens("model.embed_tokens.weight")

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._checkpoint.take(name, (size,), self._dtype).float()

    def layer(self, number: int) -> Layer:
        c, part, at = self._whole, self._part, f"model.layers.{number}."
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        wide, hidden = c.intermediate_size, c.hidden_size
        own_heads, own_kv = (_times(s, c.head_dim) for s in (part.heads, part.kv_heads))
        q_norm, k_norm = (at + f"self_attn.{x}_norm.weight" for x in "qk")
        qkv = {"q_proj": (heads, own_heads), "k_proj": (kv, own_kv), "v_proj": (kv, own_kv)}
        gate_up = {"gate_proj": (wide, part.wide), "up_proj": (wide, part.wide)}
        return Layer(
            input_norm=self.vector(at + "input_layernorm.weight", hidden),
            qkv=self._by_outputs(at + "self_attn.", qkv, c.qkv_bias),
            head_norms=(self.vector(q_norm, c.head_dim), self.vector(k_norm, c.head_dim))
            if c.qk_norm
            else None,
            out=self._by_inputs(at + "self_attn.o_proj", heads, own_heads, c.out_bias),
            post_norm=self.vector(at + "post_attention_layernorm.weight", hidden),
            gate_up=self._by_outputs(at + "mlp.", gate_up, c.mlp_bias),
            down=self._by_inputs(at + "mlp.down_proj", wide, part.wide, c.mlp_bias),
        )

    def head(self, embedding: torch.Tensor | None) -> Linear:
        """hidden to `vocabulary_width` logits; where a rank has fewer token ids, the last ones are zero."""
        if not self._whole.tied:
            weight = self._tokens("lm_head.weight")
        else:
            weight = self.embedding() if embedding is None else embedding
        missing = self._part.vocabulary_width - len(weight)
        return Linear(functional.pad(weight.to(self._activations), (0, 0, 0, missing)))

    def _tokens(self, name: str) -> torch.Tensor:
        shape = (self._whole.vocab_size, self._whole.hidden_size)
        return self._checkpoint.take(name, shape, self._dtype, (self._part.vocabulary,))

    def _by_outputs(self, at: str, parts: dict[str, tuple[int, slice]], bias: bool) -> Linear:
        """One product from several of the checkpoint, stacked: of each its outputs' size and this rank's share."""
        hidden = self._whole.hidden_size
        weights = [self._product(f"{at}{x}.weight", (size, hidden), own) for x, (size, own) in parts.items()]
        biases = [self._product(f"{at}{x}.bias", (size,), own) for x, (size, own) in parts.items() if bias]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _by_inputs(self, name: str, width: int, own: slice, bias: bool) -> Linear:
        """A product that yields a summand of every output, from this rank's share of the inputs."""
        hidden = self._whole.hidden_size
        weight = self._product(f"{name}.weight", (hidden, width), slice(None), own)
        adds = bias and self._part.adds_bias
        return Linear(weight.contiguous(), self._product(f"{name}.bias", (hidden,)) if adds else None)

    def _product(self, name: str, shape: tuple[int, ...], *cut: slice) -> torch.Tensor:
        return self._checkpoint.take(name, shape, self._dtype, cut).to(self._activations)


def _times(share: slice, size: int) -> slice:
    return slice(share.start * size, share.stop * size)

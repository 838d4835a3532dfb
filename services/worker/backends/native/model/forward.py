"""The forward pass of one rank over its paged cache in one epoch."""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Assignment
from services.worker.backends.native.model.experts import Experts
from services.worker.backends.native.model.layer import Mlp
from services.worker.backends.native.model.layer_groups import LayerGroups
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.sampling.logprobs import PromptScores
from services.worker.backends.native.token_history import TokenHistory
from services.worker.backends.pooling import PooledRows
from services.worker.batch.slots import Rows
from services.worker.distributed.ranks import Ranks
from services.worker.kernels.interface.buffers import Buffers
from services.worker.kernels.interface.kv_cache import Allocate, own_memory
from services.worker.kernels.interface.rows import BatchTensors

FINAL = -1
"""The hidden states after the final norm, where a layer's number is expected."""
FEW = {"tokens": 64, "tiles": 32, "sampled": 32}
"""Initial number of rows of buffers that grow."""


class ForwardBuffers(Buffers):
    """Kinds of rows: tokens, tiles of queries, and sampled tokens."""

    def __init__(self, model: Model, taps: tuple[int, ...], where: torch.device, **capacity: int) -> None:
        super().__init__(where, **capacity)
        c, kind = model.config, model.kernels.network.activations
        heads, hidden = c.num_heads * c.head_dim, c.hidden_size
        self.ids, self.positions = (self._rows("tokens", dtype=torch.int32, padding=0) for _ in range(2))
        self.slots = self._rows("tokens", dtype=torch.int32, padding=-1)
        """A padding row has no slot, so nothing of it is written to the cache."""
        self.tiles = self._rows("tiles", 4, dtype=torch.int32, padding=0)
        self.sampled = self._rows("sampled", dtype=torch.int32, padding=0)
        self.residual = self._rows("tokens", hidden)
        self.normed = self._rows("tokens", hidden, dtype=kind)
        self.qkv = self._rows("tokens", heads + 2 * c.num_kv_heads * c.head_dim, dtype=kind)
        self.attended = self._rows("tokens", heads, dtype=kind)
        width = c.intermediate_size if c.experts is None or c.experts.dense_layers else 1
        self.gate_up = self._rows("tokens", 2 * width, dtype=kind)
        self.gated = self._rows("tokens", width, dtype=kind)
        self.attention_out = self._rows("tokens", hidden, dtype=kind)
        self.mlp_out = self._rows("tokens", hidden, dtype=kind)
        norms_outputs = c.names.attention_out or c.names.mlp_out
        self.out_normed = self._rows("tokens", hidden if norms_outputs else 1, dtype=kind)
        """Output of attention or MLP after a norm of its own."""
        self.reduced = self._rows("tokens", hidden, dtype=kind)
        """Sums over ranks; not in place, because sent data must not change before the next exchange."""
        self.taps = tuple(self._rows("tokens", hidden, dtype=kind if tap == FINAL else torch.float32) for tap in taps)
        """Hidden states that a drafter reads."""
        self.final = self._rows("sampled", hidden)
        self.final_normed = self._rows("sampled", hidden, dtype=kind)
        logits = model.part.vocabulary_width if model.part.is_last else 1
        self.logits = self._rows("sampled", logits)

    @property
    def batch(self) -> BatchTensors:
        return BatchTensors(self.ids, self.slots, self.positions, self.tiles, self.sampled)


class ForwardPass:
    """For one calling thread.

    Args:
        ranks: the group; its ranks make the same calls in the same order.
        context: tokens of the longest sequence, or more; the factors of longrope depend on it
        table: int32[slots, blocks] on the device, the block table of every slot; plans change it in place. With several
            groups, their tables side by side.
        taps: hidden states that a drafter reads: numbers of layers, whose input it is, or FINAL.
        capacity: initial rows of the buffers.
        allocate: memory of the cache.
        groups: None: all layers have one table.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        num_blocks: int,
        block_size: int,
        context: int,
        table: torch.Tensor,
        taps: Collection[int] = (),
        capacity: Mapping[str, int] = FEW,
        allocate: Allocate = own_memory,
        groups: LayerGroups | None = None,
    ) -> None:
        self._model, self._network, self._ranks = model, model.kernels.network, ranks
        self._groups, self._context = groups, context
        self._device = model.kernels.device
        self._table, self._taps = table, tuple(taps)
        self._cache = self._network.kv_cache(model.cache_shape(block_size, groups), num_blocks, allocate)
        self._counts = dict.fromkeys(FEW, 0)
        """Number of rows of each kind in this step."""
        self._make_room(dict(capacity))

    def _make_room(self, capacity: dict[str, int]) -> None:
        """Allocate buffers and record the operations on them."""
        model = self._model
        self.buffers = ForwardBuffers(model, self._taps, self._device.where, **capacity)
        self._smallest = min(capacity.values())
        self._attention = self._network.attention(
            model.attention(self._context, self._groups), self._cache, self._table, capacity["tokens"]
        )
        self.recording = self._network.record(self._body, self.buffers)

    # -- a step ----------------------------------------------------------------------------------------------------

    def lay_out(self, rows: Rows, history: TokenHistory | None, ids: torch.Tensor | None = None) -> None:
        """Prepare a step.

        Args:
            history: of the tokens to compute; None where another stage reads them
            ids: int32[tokens], used instead of those in the history

        Raises: RuntimeError, when the history has no token at a position.
        """
        kernels, tokens = self._model.kernels.rows, int(rows.counts.sum())
        if tokens > self._smallest:  # else there is room, as a tile or a sampled token is at least one token
            self._require_room(rows, tokens)
        where = history.tokens if history is not None and ids is None else None
        tiles, sampled = kernels.lay_out(rows, where, self._model.part.whole.vocab_size, self.buffers.batch)
        self._counts = {"tokens": tokens, "tiles": tiles, "sampled": sampled}
        if ids is not None:
            self.buffers.ids[:tokens] = ids

    def _require_room(self, rows: Rows, tokens: int) -> None:
        needed = {
            "tokens": tokens,
            "tiles": len(rows.slots) + tokens // self._model.kernels.rows.tile,
            "sampled": int((1 + rows.drafts[rows.samples]).sum()),
        }
        if not self.buffers.holds(**needed):
            before = self.buffers.capacity
            self._make_room({kind: max(before[kind], _power(count)) for kind, count in needed.items()})

    def receive(self) -> None:
        """Wait for the activations of the stage before, if there is one. Raises: RanksLost"""
        if not self._model.part.is_first:
            self._ranks.pipeline.receive_activations(self.buffers.residual[: self._counts["tokens"]])

    def run(self, pooled: PooledRows | None = None, prompts: PromptScores | None = None) -> torch.Tensor | None:
        """Compute every token of the step in this rank's layers and write its keys and values to the cache.

        On later stages, after `receive`.

        Args:
            pooled: collects the hidden states that pooling requests need; used on the last stage only.
            prompts: collects the logits of prompt tokens on the output rank. The last stage's ranks pass the same rows.

        Returns:
            float32[sampled tokens, vocab_size] on the output rank, valid until the next step. None on other ranks.

        Raises: RanksLost
        """
        counts, part, pipeline = self._counts, self._model.part, self._ranks.pipeline
        residual = self.buffers.residual[: counts["tokens"]]
        if part.is_first and self._ranks.tensor_parallel.size > 1:
            residual[:] = self._embedded_by_ranks()
        logits = self.recording.run(**counts)
        if not part.is_last:
            pipeline.send_activations(residual.clone())
            return None
        if pooled is not None:
            pooling = self._final_normed(pooled.tokens, self._model.final_norm)
            self._device.launch(lambda: pooled.take(pooling.float()))
        if prompts is not None:
            for tokens in prompts.slices(part.whole.vocab_size):
                states = self._final_normed(tokens, self._model.head_norm)
                if (scored := self._whole_logits(self._head(states))) is not None:
                    prompts.take(scored)
        return self._whole_logits(logits[: counts["sampled"]])

    def tapped(self) -> list[torch.Tensor]:
        """Hidden states that a drafter reads, [tokens, hidden]; valid until the next step."""
        return [tap[: self._counts["tokens"]] for tap in self.buffers.taps]

    # -- what is computed ------------------------------------------------------------------------------------------

    def _body(self, b: ForwardBuffers) -> torch.Tensor:
        """From token ids to logits, or from the stage before to the next one. Returns [sampled, vocabulary width]."""
        network, model, team = self._network, self._model, self._ranks.tensor_parallel
        config, eps, factor, delta = model.config, model.config.norm_eps, model.config.residual_scale, None
        if model.embedding is not None:
            if team.size == 1:
                model.embedding.look_up(b.ids, b.residual)
            if config.embedding_scale != 1.0:
                network.copy(b.residual, b.residual, config.embedding_scale)
        self._attention.begin(b.positions, b.slots)
        for number, layer in enumerate(model.layers):
            network.norm(b.residual, delta, layer.attention_in, eps, b.normed, factor)
            if (whole := model.part.layers[number]) in self._taps:
                network.copy(b.residual, b.taps[self._taps.index(whole)])
            self._attention.write(number, layer.qkv(b.normed, b.qkv), layer.head_norms)
            self._attention.attend(number, b.tiles, b.attended, layer.sinks)
            delta = self._completed(layer.out(b.attended, b.attention_out), layer.attention_out, b)
            network.norm(b.residual, delta, layer.mlp_in, eps, b.normed, factor)
            delta = self._completed(self._mlp(layer.mlp, b), layer.mlp_out, b)
        assert delta is not None, "a stage has at least one layer"
        network.add(delta, b.residual, factor)
        if not model.part.is_last:
            return b.logits
        if FINAL in self._taps:
            network.norm(b.residual, None, model.final_norm, eps, b.taps[self._taps.index(FINAL)])
        network.gather(b.sampled, b.residual, b.final)
        network.norm(b.final, None, model.head_norm, eps, b.final_normed)
        return model.head(b.final_normed, b.logits)

    def _mlp(self, mlp: Mlp | Experts, b: ForwardBuffers) -> torch.Tensor:
        if isinstance(mlp, Experts):
            return self._network.call(mlp, b.normed, b.mlp_out)
        activation = self._model.config.activation
        self._network.gate_and_multiply(mlp.gate_up(b.normed, b.gate_up), b.gated, activation)
        return mlp.down(b.gated, b.mlp_out)

    def _completed(self, partial: torch.Tensor, norm: torch.Tensor | None, b: ForwardBuffers) -> torch.Tensor:
        """Return an output of attention or MLP, summed over ranks and normalised."""
        team = self._ranks.tensor_parallel
        delta = partial if team.size == 1 else self._network.call(team.all_reduce, partial, b.reduced)
        if norm is None:
            return delta
        self._network.norm(None, delta, norm, self._model.config.norm_eps, b.out_normed)
        return b.out_normed

    def _embedded_by_ranks(self) -> torch.Tensor:
        """[tokens, hidden]: the sum over ranks; a rank adds zeros for the token ids of other ranks."""
        embedding = self._model.embedding
        assert embedding is not None, "the first stage has the embedding"
        vocabulary, count = self._model.part.vocabulary, self._counts["tokens"]
        own = self.buffers.ids[:count] - vocabulary.start
        foreign = (own < 0) | (own >= vocabulary.stop - vocabulary.start)
        rows = torch.empty(count, self._model.config.hidden_size)
        embedding.look_up(own.masked_fill_(foreign, 0), rows)
        return self._ranks.tensor_parallel.all_reduce(rows.masked_fill_(foreign[:, None], 0))

    def _final_normed(self, tokens: NDArray[np.int32], norm: torch.Tensor) -> torch.Tensor:
        """activations[some, hidden] after the final norm, or that of the head, of int32[some] tokens of the step."""
        (index,) = self._device.upload(tokens)
        shape = len(tokens), self._model.config.hidden_size
        residual = torch.empty(shape, device=self._device.where)
        self._network.gather(index, self.buffers.residual, residual)
        out = torch.empty(shape, dtype=self._network.activations, device=self._device.where)
        self._network.norm(residual, None, norm, self._model.config.norm_eps, out)
        return out

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        width = self._model.part.vocabulary_width
        return self._model.head(states, torch.empty(len(states), width, device=states.device))

    def _whole_logits(self, own: torch.Tensor) -> torch.Tensor | None:
        """float32[rows, vocab] on the first rank of the last stage, gathered from the shares of all ranks."""
        vocab, team = self._model.part.whole.vocab_size, self._ranks.tensor_parallel
        if not len(own):
            return torch.empty(0, vocab, device=own.device) if team.is_first else None
        parts = team.gather(own)
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, 1)[:, :vocab].contiguous() if parts else None


def most_rows(assignment: Assignment, tile: int) -> dict[str, int]:
    """Return the rows of buffers that hold every step. `tile`: tokens of a tile of queries."""
    tokens, slots, speculation = (assignment.max_num_batched_tokens, assignment.num_slots, assignment.speculation)
    drafts = speculation.num_speculative_tokens if speculation is not None else 0
    sampled = max(slots, min(tokens, slots * (1 + drafts)))
    return {"tokens": tokens, "tiles": max(slots + tokens // tile, sampled), "sampled": sampled}


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()

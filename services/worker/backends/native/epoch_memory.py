"""Account of the memory that an epoch takes on a device beside weights and KV cache.

Each use has one line here or in the kernels' own list (`Kernels.workspaces`).
"""

from collections.abc import Collection

import torch

from protocol.membership import Assignment
from services.worker.backends.native.model.forward import ForwardBuffers, most_rows
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.sampling.logprobs import SLICE
from services.worker.kernels.interface.kernels import EpochSizes, Uses

_RESULTS_IN_FLIGHT = 4
"""Steps whose embeddings may be on their way to the host, or about to be dropped, at once."""


def epoch_memory(
    model: Model, assignment: Assignment, max_model_len: int, reads: Collection[int] = (), num_groups: int = 1
) -> Uses:
    """Return the most bytes that each use takes, all of them at once.

    Args:
        num_groups: block tables of a slot
        reads: hidden states that a drafter reads; see `Drafter`
    """
    rows = most_rows(assignment, model.kernels.rows.tile)
    slots, tokens, sampled = assignment.num_slots, rows["tokens"], rows["sampled"]
    vocab, hidden = model.part.whole.vocab_size, model.config.hidden_size
    blocks = -(-max_model_len // assignment.block_size) * num_groups
    itemsize = model.kernels.network.activations.itemsize
    speculation = assignment.speculation
    sizes = EpochSizes(
        *(rows, slots, max_model_len, vocab),
        speculation.num_speculative_tokens if speculation is not None else 0,
        model.attention(max_model_len),
        model.cache_shape(assignment.block_size),
    )
    prompt_rows = min(tokens, max(1, SLICE // vocab))
    return {
        "forward pass": ForwardBuffers(model, tuple(reads), torch.device("meta"), **rows).num_bytes,
        "token history": 4 * slots * max_model_len,
        "block table": 4 * slots * blocks,
        # Logits before sampling changes them, for log-probabilities.
        "raw logits": 4 * sampled * vocab,
        # In float32, of one slice and of the slice before; CUDA's products return the dtype of the activations first.
        "prompt log-probabilities": (8 + (itemsize if itemsize < 4 else 0)) * prompt_rows * vocab,
        # Sums of every slot, results, and the hidden states of a step: in the activations' dtype and in float32.
        "embeddings": 4 * (1 + _RESULTS_IN_FLIGHT) * slots * hidden + (itemsize + 4) * tokens * hidden,
        # The largest single one: rows of the block table, the tokens of a prompt, or the rows of a step.
        "uploads": max(8 * slots + 4 * slots * blocks, 4 * max_model_len, 16 * tokens + 16 * rows["tiles"]),
        **model.kernels.workspaces(sizes),
    }

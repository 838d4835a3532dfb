"""The demo model's own text, written in many rows at once: what its EAGLE head learns from."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from text import Corpus
from tokenizers import Tokenizer
from torch import Tensor
from train import BOS, EOS, SPECIAL, Llama, Shape

ASSISTANT = SPECIAL.index("<|assistant|>")


def prompts(corpus: Corpus, tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Without end: questions up to where the answer begins, and pieces of pages."""
    rng, epoch = random.Random(seed), 0
    while True:
        documents = corpus.documents(1000 * seed + epoch)
        epoch += 1
        for text in documents:
            ids = tokenizer.encode(text[:4000], add_special_tokens=False).ids
            if ASSISTANT in ids:
                yield ids[: ids.index(ASSISTANT) + 1]
            for _ in range(3):  # there are far more questions than pages
                at, length = rng.randrange(max(1, len(ids) - 64)), rng.randrange(12, 48)
                if ASSISTANT not in ids:
                    yield [BOS, *ids[at : at + length]]


class Writer:
    """The demo model, writing in many rows at once.

    Each row answers one prompt after another: the next begins where the model ended the last one, or after `longest`
    tokens. So every window is full, as windows were when the model itself was trained.
    """

    def __init__(self, model: Llama, shape: Shape, source: Iterator[list[int]], longest: int) -> None:
        self._model, self._shape, self._source, self._longest = model, shape, source, longest

    @torch.no_grad()
    def write(self, greedy: list[bool], length: int) -> tuple[Tensor, Tensor]:
        """int64[rows, length] ids, and whether each is the model's own, not a prompt's."""
        rows, model = len(greedy), self._model
        cache = torch.zeros(
            len(model.layers), 2, rows, self._shape.num_key_value_heads, length, self._shape.head_dim
        )
        ids, own = torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.bool)
        given = [deque(next(self._source)) for _ in range(rows)]
        said, keep = [0] * rows, torch.tensor(greedy)
        chosen = torch.zeros(rows, dtype=torch.int64)
        for at in range(length):
            for row in range(rows):
                if not given[row] and (int(chosen[row]) == EOS or said[row] >= self._longest):
                    # the end that the model wrote belongs to its text
                    rest = [EOS] if int(chosen[row]) == EOS else []
                    given[row], said[row] = deque(rest + next(self._source)), 0
                if given[row]:
                    ids[row, at] = given[row].popleft()
                else:
                    ids[row, at], own[row, at] = chosen[row], True
                    said[row] += 1
            logits = self._step(ids[:, at], cache, at)
            noise = -torch.log(-torch.log(torch.rand(logits.shape).clamp_(1e-20, 1 - 1e-7)))
            chosen = torch.where(keep, logits.argmax(1), (logits + noise).argmax(1))
        return ids, own

    def _step(self, ids: Tensor, cache: Tensor, at: int) -> Tensor:
        model, shape = self._model, self._shape
        cos, sin, rows = model.cos[at], model.sin[at], len(ids)
        x = model.embed_tokens(ids)
        for layer, (keys, values) in zip(model.layers, cache, strict=True):
            a, normed = layer.self_attn, layer.input_layernorm(x)
            q = rotated(a.q_proj(normed).view(rows, -1, shape.head_dim), cos, sin)
            keys[:, :, at] = rotated(a.k_proj(normed).view(rows, -1, shape.head_dim), cos, sin)
            values[:, :, at] = a.v_proj(normed).view(rows, -1, shape.head_dim)
            q = q.view(rows, shape.num_key_value_heads, -1, shape.head_dim)
            out = F.scaled_dot_product_attention(q, keys[:, :, : at + 1], values[:, :, : at + 1])
            x = x + a.o_proj(out.reshape(rows, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(model.norm(x), model.embed_tokens.weight)


def rotated(h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = h.chunk(2, dim=-1)
    return h * cos + torch.cat((-second, first), dim=-1) * sin

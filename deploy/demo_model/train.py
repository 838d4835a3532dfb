"""Train the demo model: a small Llama model of the Python standard library's documentation.

    pip install torch tokenizers safetensors numpy
    python train.py                       # trains, then writes the checkpoint into the folder of this file

The text comes from the running Python interpreter (text.py). Training is in float32 on the CPU, the export in bfloat16.
The seeds are fixed: equal versions of Python and torch and an equal number of threads give equal weights.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from text import CHAT_TEMPLATE, Corpus
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

# ----------------------------------------------------------------------------------------- tokenizer

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, BOS, EOS = 0, 1, 2


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE. It has all 256 bytes and normalises nothing, so that any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    markers = re.compile("|".join(map(re.escape, SPECIAL)))
    tokenizer.train_from_iterator((piece for d in documents for piece in markers.split(d)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer


def token_stream(corpus: Corpus, tokenizer: Tokenizer, seed: int) -> np.ndarray:
    encodings = tokenizer.encode_batch(corpus.documents(seed), add_special_tokens=False)
    return np.concatenate([np.array(e.ids, dtype=np.int64) for e in encodings])


def batches(
    corpus: Corpus, tokenizer: Tokenizer, shape_at: Callable[[int], tuple[int, int]]
) -> Iterator[np.ndarray]:
    """Yield packed windows [batch, length + 1] without end. They depend on the arguments only, for resumed runs."""
    stream, epoch, step, at = np.empty(0, dtype=np.int64), 0, 0, 0
    while True:
        batch, length = shape_at(step)
        if len(stream) - at < batch * length + 1:
            stream = np.concatenate([stream[at:], token_stream(corpus, tokenizer, epoch)])
            epoch, at = epoch + 1, 0
        yield np.stack([stream[at + i * length : at + (i + 1) * length + 1] for i in range(batch)])
        at, step = at + batch * length, step + 1


# --------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. The field names are those of Hugging Face's LlamaConfig."""

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class TrainedAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

        def rotate(h: Tensor) -> Tensor:
            first, second = h.chunk(2, dim=-1)
            return h * cos + torch.cat((-second, first), dim=-1) * sin

        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        q, k, v = rotate(heads(self.q_proj(x))), rotate(heads(self.k_proj(x))), heads(self.v_proj(x))
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TrainedLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = TrainedAttention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Llama model. Parameter names are those of Hugging Face without "model."; the output layer is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(TrainedLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = math.sqrt(2 * shape.num_hidden_layers) if residual else 1
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, vocab] for ids [batch, length]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, window: np.ndarray) -> Tensor:
        ids = torch.from_numpy(window)
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


# ------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class Recipe:
    steps: int
    tokens_per_step: int = 2048
    short: int = 256  # window length of most steps, where attention is cheap
    long: int = 2048  # window length of the last steps, for positions up to max_position_embeddings
    long_share: float = 0.1
    peak_lr: float = 3e-3
    final_lr: float = 1e-4
    warmup: int = 100
    weight_decay: float = 0.1

    def shape_at(self, step: int) -> tuple[int, int]:
        length = self.short if step < self.steps * (1 - self.long_share) else self.long
        return max(1, self.tokens_per_step // length), length

    def lr_at(self, step: int) -> float:
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.final_lr + (self.peak_lr - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def validation_loss(model: Llama, stream: np.ndarray, length: int) -> float:
    """Return the loss on held-out modules in windows of `length`, nats per token."""
    count = min(len(stream) - 1, 65536) // length
    losses = [model.loss(stream[None, i * length : (i + 1) * length + 1]).item() for i in range(count)]
    return sum(losses) / len(losses)


def train(recipe: Recipe, shape: Shape, out: Path, checkpoint: Path, every: int) -> None:
    torch.manual_seed(0)
    corpus = Corpus(held_out=False)
    tokenizer = train_tokenizer(corpus.documents(seed=0), shape.vocab_size)
    held_out = token_stream(Corpus(held_out=True), tokenizer, seed=0)
    model = Llama(shape)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, step {start} of {recipe.steps}, "
        f"{len(token_stream(corpus, tokenizer, 0)):,} tokens an epoch, {len(held_out):,} held out"
    )

    began, running = time.monotonic(), 0.0
    for step, window in islice(enumerate(batches(corpus, tokenizer, recipe.shape_at)), start, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(step)
        loss = model.loss(window)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = loss.item() if step == start else 0.95 * running + 0.05 * loss.item()
        if (step + 1) % 25 == 0:
            rate = (step + 1 - start) * recipe.tokens_per_step / (time.monotonic() - began)
            print(f"step {step + 1}  loss {running:.3f}  {rate:.0f} tokens/s", flush=True)
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            unfinished = checkpoint.with_suffix(".new")  # an interrupted save keeps the previous checkpoint
            torch.save(state, unfinished)
            unfinished.replace(checkpoint)
            export(model, tokenizer, shape, out)
            print(f"validation {validation_loss(model, held_out, recipe.short):.3f}", flush=True)
    print(f"validation in windows of {recipe.long}: {validation_loss(model, held_out, recipe.long):.3f}")


# -------------------------------------------------------------------------------------------- export


def export(model: Llama, tokenizer: Tokenizer, shape: Shape, out: Path) -> None:
    """Write the files that transformers, vLLM and Runahead load."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # images read it as another user
    tokenizer.save(str(out / "tokenizer.json"))
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            **asdict(shape),
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rope_scaling": None,
            "use_cache": True,
            **ids,
        },
        "generation_config.json": {**ids, "eos_token_id": [EOS]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.max_position_embeddings,
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "pad_token": "<|pad|>",
            "add_bos_token": True,
            "additional_special_tokens": SPECIAL[3:],
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                str(i): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for i, token in enumerate(SPECIAL)
            },
            "chat_template": CHAT_TEMPLATE,
        },
        "special_tokens_map.json": {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(tempfile.gettempdir()) / "runahead-demo-model.pt",
        help="file of the training state, written every --every steps; an existing one is resumed",
    )
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(Recipe(arguments.steps), Shape(), arguments.out, arguments.checkpoint, arguments.every)


if __name__ == "__main__":
    main()

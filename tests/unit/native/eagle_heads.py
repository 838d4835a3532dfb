"""Tiny random models and EAGLE heads on disk, and the drafts of such a head by plain torch: no cache, no kernels."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from protocol.membership import Shard, Speculation
from services.worker.backends.native.drafters.base import Advance, Drafter, DrafterSlots, TargetModel
from services.worker.backends.native.drafters.eagle import ERROR, eagle_drafter
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import SlotTable
from services.worker.kernels.selection import choose, create, processor_features
from services.worker.weights import open_checkpoint

VOCAB, HIDDEN, WIDE, HEADS, KV_HEADS, DIM, LAYERS = 211, 64, 104, 4, 2, 16, 5
CONTEXT, BLOCK_SIZE, NUM_SLOTS, NUM_BLOCKS = 96, 4, 4, 120
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
}
WHOLE = Shard()
Tensors = dict[str, torch.Tensor]


def layer(at: str, inputs: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * DIM, KV_HEADS * DIM
    return {
        f"{at}self_attn.q_proj.weight": (queries, inputs),
        f"{at}self_attn.k_proj.weight": (keys, inputs),
        f"{at}self_attn.v_proj.weight": (keys, inputs),
        f"{at}self_attn.o_proj.weight": (HIDDEN, queries),
        f"{at}mlp.gate_proj.weight": (WIDE, HIDDEN),
        f"{at}mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{at}mlp.down_proj.weight": (HIDDEN, WIDE),
        f"{at}post_attention_layernorm.weight": (HIDDEN,),
    }


def random(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return {
        name: torch.randn(shape) * 0.2 if len(shape) > 1 else 1 + 0.3 * torch.randn(shape)
        for name, shape in shapes.items()
    }


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_target(directory: Path, layers: int = LAYERS) -> tuple[Path, Tensors]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,),
    }  # fmt: skip
    for number in range(layers):
        at = f"model.layers.{number}."
        shapes |= layer(at) | {f"{at}input_layernorm.weight": (HIDDEN,)}
    tensors = random(shapes)
    return write(directory, TARGET | {"num_hidden_layers": layers}, tensors), tensors


@dataclass
class HeadCheckpoint:
    """A checkpoint: what its config.json has beside what all have, and its tensors."""

    method: str
    config: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    draft_vocab: int = 0
    """Tokens that it drafts; 0: all."""
    reads: int = 3
    """Hidden states that EAGLE-3 reads."""

    def tensors(self) -> Tensors:
        three = self.method == "eagle3"
        at = "midlayer." if three else "layers.0."
        shapes = layer(at, 2 * HIDDEN if three else HIDDEN)
        shapes["fc.weight"] = (HIDDEN, self.reads * HIDDEN if three else 2 * HIDDEN)
        if three:
            shapes |= {f"{at}input_layernorm.weight": (HIDDEN,), f"{at}hidden_norm.weight": (HIDDEN,)}
            shapes |= {"norm.weight": (HIDDEN,), "lm_head.weight": (self.draft_vocab or VOCAB, HIDDEN)}
        tensors = random(shapes | self.shapes)
        if self.draft_vocab:
            tokens = torch.randperm(VOCAB)[: self.draft_vocab].sort().values
            tensors["d2t"] = tokens - torch.arange(self.draft_vocab)
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, tokens, True)
        return tensors

    def whole_config(self) -> dict[str, Any]:
        config = TARGET | {"num_hidden_layers": 1} | self.config
        return config | ({"draft_vocab_size": self.draft_vocab} if self.draft_vocab else {})


class EagleSetup:
    """A target, a head for it, and the drafter with that head over an empty cache."""

    def __init__(
        self,
        directory: Path,
        head: HeadCheckpoint,
        dtype: torch.dtype = torch.float32,
        min_acceptance: float = 0.0,
        implementation: str = "compiled",
        **speculation: Any,
    ) -> None:
        self.min_acceptance, self.implementation = min_acceptance, implementation
        torch.manual_seed(5)
        self.path, self.target = write_target(directory / "target")
        self.head, self.tensors = head, head.tensors()
        self.drafter = self.load(write(directory / "head", head.whole_config(), self.tensors), dtype, **speculation)
        self.table = SlotTable(NUM_SLOTS, BLOCK_SIZE, NUM_BLOCKS, CONTEXT)
        self.history = TokenHistory(NUM_SLOTS, CONTEXT, VOCAB, self.kernels)
        blocks = np.random.default_rng(0).permutation(NUM_BLOCKS)[: self.table.block_table.size]
        self.table.block_table[:] = blocks.reshape(self.table.block_table.shape)
        self.table.num_blocks[:] = self.table.block_table.shape[1]
        self.proposer = self.drafter.start(DrafterSlots(self.table, self.history, NUM_BLOCKS))

    def load(self, head: Path, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE, **speculation: Any) -> Drafter:
        checkpoint = open_checkpoint(self.path)
        part = ModelPart.from_shard(ModelConfig.from_checkpoint(self.path), shard)
        self.kernels = create(choose(self.implementation, "cpu", dtype, processor_features()))
        model = Model(part, checkpoint, dtype, self.kernels, lambda *_: None)
        wanted = Speculation(self.head.method, 4, str(head), **speculation)
        target = TargetModel(wanted, model, self.path, checkpoint, BLOCK_SIZE, CONTEXT)
        return eagle_drafter(target)

    def states(self, positions: int) -> list[torch.Tensor]:
        """As if the target had computed them; [positions, hidden] for each that the drafter reads."""
        generator = torch.Generator().manual_seed(9)
        return [torch.randn(CONTEXT, HIDDEN, generator=generator)[:positions] for _ in self.drafter.reads]

    def step(self, rows: list[tuple[int, list[int], int, int]], k: int, samples: bool = True) -> list[list[int]]:
        """Drafts of rows (slot, tokens, start, end): the tokens go on beyond `end` at least by the sampled one."""
        states = self.states(CONTEXT)
        for slot, tokens, *_ in rows:
            self.history.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        columns = np.array([(slot, 1, start, end - start) for slot, _, start, end in rows], np.int32).T
        taken = [torch.cat([s[start:end] for _, _, start, end in rows]) for s in states]
        sampling = np.full(len(rows), samples)
        advance = Advance(*(c.copy() for c in columns), sampling, taken, self.min_acceptance)
        with torch.inference_mode():
            return self.proposer.propose(advance, k).tolist()

    def reference(self, tokens: list[int], k: int, begin: int = 0) -> list[int]:
        """The drafts after `tokens`, whose last one was sampled; the head knows those from `begin` on."""
        return [token for token, _ in self.chances(tokens, k, begin=begin)]

    @torch.inference_mode()
    def chances(self, tokens: list[int], k: int, temperature: float = 0.0, begin: int = 0) -> list[tuple[int, float]]:
        """The drafts, each with its probability of being the next token at `temperature`."""
        network = Reference(self.head, self.tensors, self.target)
        hidden = network.fuse([states[begin:] for states in self.states(len(tokens) - 1)])
        drafts: list[tuple[int, float]] = []
        for _ in range(k):
            ids = torch.tensor(tokens[begin + 1 :] + [token for token, _ in drafts])
            yielded = network.layer(ids, hidden)[-1:]
            drafts.append(network.token(yielded, math.hypot(temperature, ERROR)))
            hidden = torch.cat((hidden, yielded))
        return drafts


class Reference:
    """The head as its paper defines it."""

    def __init__(self, head: HeadCheckpoint, tensors: Tensors, target: Tensors) -> None:
        self.three, self.norm_first = head.method == "eagle3", head.config.get("norm_before_residual", False)
        self.w = {name.replace("midlayer.", "layers.0."): t.float() for name, t in tensors.items()}
        self.embedding = tensors.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        output = tensors.get("lm_head.weight", target["lm_head.weight"])
        self.tokens = torch.arange(len(output))
        if head.draft_vocab:
            self.tokens = tensors["d2t"] + torch.arange(head.draft_vocab)
            output = output if "lm_head.weight" in tensors else output[self.tokens]
        self.output = output

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), self.w[f"{name}.weight"], 1e-5)

    def fuse(self, states: list[torch.Tensor]) -> torch.Tensor:
        return self.product("fc", torch.cat(states, 1)) if self.three else states[0]

    def layer(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all places, [places, hidden]."""
        embedded = self.embedding[ids]
        if self.three:
            normed = self.norm("layers.0.hidden_norm", hidden)
            x = torch.cat((self.norm("layers.0.input_layernorm", embedded), normed), 1)
            residual = normed if self.norm_first else hidden
        else:
            x = residual = self.product("fc", torch.cat((embedded, hidden), 1))
        heads = [self.product(f"layers.0.self_attn.{n}_proj", x).unflatten(1, (-1, DIM)).transpose(0, 1) for n in "qkv"]
        q, k, v = (*map(self.rotated, heads[:2]), heads[2])
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        residual = residual + self.product("layers.0.self_attn.o_proj", out.transpose(0, 1).flatten(1))
        y = self.norm("layers.0.post_attention_layernorm", residual)
        gated = F.silu(self.product("layers.0.mlp.gate_proj", y)) * self.product("layers.0.mlp.up_proj", y)
        return residual + self.product("layers.0.mlp.down_proj", gated)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = 1e4 ** -(torch.arange(0, DIM, 2) / DIM)
        angles = (torch.arange(x.shape[1])[:, None] * frequencies).repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def token(self, yielded: torch.Tensor, temperature: float) -> tuple[int, float]:
        x = self.norm("norm", yielded) if self.three else yielded
        chances = (x @ self.output.T / temperature).softmax(1)[0]
        return int(self.tokens[chances.argmax()]), float(chances.max())

"""Train the demo model's EAGLE head: a drafter of one layer that guesses what the demo model will say next.

    pip install torch tokenizers safetensors numpy
    python train_eagle.py                 # trains, measures, then writes the checkpoint into eagle/

The head reads what the model computed for a token and the embedding of the token after it, and predicts what the model
will compute for that one: the same vector before the output layer, which it shares, as it shares the embedding. It is
fed its own predictions for the second and third token of a draft, in training as when it is served.

Its teacher is the demo model alone: most text is what the model itself says, greedily and at temperature 1, to prompts
from the documents it was trained on (train.py); the rest is windows of those documents. The target at every position is
the model's own distribution. It drafts the tokens that the model says most often, and no others: a small output layer
is most of its speed. Training is float32 on the CPU, the export bfloat16. The seeds are fixed: the same Python, torch
and thread count give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from text import Corpus
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import Attention, Layer, Llama, Shape, token_stream
from writer import Writer, prompts, rotated

STEPS = 3
"""Tokens of a draft that the head is trained for."""


def load_target(directory: Path) -> tuple[Llama, Shape, Tokenizer]:
    shape = Shape()
    model = Llama(shape)
    weights = load_file(directory / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w.float() for name, w in weights.items()})
    return model.requires_grad_(False), shape, Tokenizer.from_file(str(directory / "tokenizer.json"))


@torch.no_grad()
def ends(model: Llama, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into the first layer and what comes out of the last; [batch, length, hidden] each."""
    x = embedded = model.embed_tokens(ids)
    for layer in model.layers:
        x = layer(x, model.cos[: ids.shape[1]], model.sin[: ids.shape[1]])
    return embedded, x


@torch.no_grad()
def hidden_states(model: Llama, ids: Tensor) -> Tensor:
    """What the output layer reads: [batch, length, hidden] for ids [batch, length]."""
    return model.norm(ends(model, ids)[1])


def size_of(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


# --------------------------------------------------------------------------------------------- model


class Head(nn.Module):
    """Parameter names are those of published EAGLE checkpoints; the layer has no norm before its attention.

    In training all vectors are of size one, as what a layer with a norm would read: hidden states are divided by
    `scale`, embeddings by `token_scale`. `exported` moves the two factors into the weights.
    """

    def __init__(self, shape: Shape, target: Llama, ids: Tensor) -> None:
        """`ids` [batch, length] are some text, of which sizes are taken."""
        super().__init__()
        scale, token_scale, stream = (size_of(x) for x in (hidden_states(target, ids), *ends(target, ids)))
        hidden, last = shape.hidden_size, target.layers[-1]
        self.shape, self.scale, self.token_scale = shape, scale, token_scale
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.layers[0].load_state_dict(last.state_dict())
        self.layers[0].input_layernorm = nn.Identity()
        a, mlp = self.layers[0].self_attn, self.layers[0].mlp
        with torch.no_grad():  # the target's last layer, made for inputs of size one
            for projection in (a.q_proj, a.k_proj, a.v_proj):
                projection.weight *= last.input_layernorm.weight
            a.o_proj.weight /= stream
            mlp.down_proj.weight /= stream
            self.fc.weight.normal_(std=0.03)
            self.fc.weight[:, hidden:] += 0.7 * torch.eye(hidden)

    def exported(self) -> dict[str, Tensor]:
        """The weights for embeddings and hidden states as they are."""
        weights = {name: p.detach().clone() for name, p in self.named_parameters()}
        hidden = self.shape.hidden_size
        weights["fc.weight"][:, :hidden] *= self.scale / self.token_scale
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"layers.0.self_attn.{name}.weight"] /= self.scale
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"layers.0.{name}.weight"] *= self.scale
        return weights

    def rollout(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, steps: int) -> list[Tensor]:
        """Predictions as the first, second ... token of a draft; each [batch, length, hidden].

        Place i reads the embedding of token i + 1 and the hidden state of token i. As the r-th token of a draft it
        reads its own prediction of that state, and so do the r - 1 places before it, whose keys and values are then
        those of their own earlier steps.

        Args:
            embedded: [batch, length, hidden], of tokens 1, 2 ...
            hidden: [batch, length, hidden], of tokens 0, 1 ...
        """
        layer = self.layers[0]
        a: Attention = layer.self_attn
        length, dim = embedded.shape[1], self.shape.head_dim
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        age = torch.arange(length)[:, None] - torch.arange(length)

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, dim)).transpose(1, 2)

        keys: list[Tensor] = []
        values: list[Tensor] = []
        predictions: list[Tensor] = []
        embedded, hidden = embedded / self.token_scale, hidden / self.scale
        for step in range(steps):
            x = self.fc(torch.cat((embedded, hidden), dim=-1))
            q = rotated(heads(a.q_proj(x)), cos, sin)
            keys.append(rotated(heads(a.k_proj(x)), cos, sin).repeat_interleave(groups, dim=1))
            values.append(heads(a.v_proj(x)).repeat_interleave(groups, dim=1))
            scores = (q @ keys[0].transpose(2, 3)).masked_fill(age < step, -math.inf)
            recent = [(q * later(keys[s], step - s)).sum(-1, keepdim=True) for s in range(1, step + 1)]
            if recent:  # the first places have no such past, so there these stand for nothing
                known = [
                    r.masked_fill((torch.arange(length) < step - s)[:, None], -math.inf)
                    for s, r in enumerate(recent, 1)
                ]
                scores = torch.cat([scores, *known], dim=-1)
            weights = (scores * dim**-0.5).softmax(-1)
            out = weights[..., :length] @ values[0]
            for s in range(1, step + 1):
                share = weights[..., length + s - 1, None]
                out = out + share * later(values[s], step - s)
            x = x + a.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            predictions.append(x * self.scale)
            hidden = later(x, 1)
        return predictions


def later(x: Tensor, places: int) -> Tensor:
    """[..., length, size] moved to later places, zeros before."""
    return F.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :] if places else x


# ------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class Recipe:
    steps: int
    rounds: int  # of written text
    rows: int = 64
    length: int = 256  # of windows that the model writes, and of most that the head learns from
    long: int = 1024  # windows of documents that teach distances
    long_share: float = 0.05
    tokens_per_step: int = 1024
    documents_share: float = 0.2  # of shorter windows
    draft_vocab_size: int = 1024
    longest_answer: int = 128
    peak_lr: float = 2e-3
    final_lr: float = 5e-5
    warmup: int = 20
    weight_decay: float = 0.01
    regression: float = 0.5
    second: float = 0.35  # share of the steps after which the second token of a draft is trained
    third: float = 0.65
    later_share: float = 0.8  # weight of each further token of a draft

    def drafts_at(self, step: int) -> int:
        return 1 + (step >= self.second * self.steps) + (step >= self.third * self.steps)

    def lr_at(self, step: int) -> float:
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.final_lr + (self.peak_lr - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2


def written(model: Llama, shape: Shape, tokenizer: Tokenizer, recipe: Recipe, cache: Path | None) -> Tensor:
    """int64[windows, length], the demo model's own text: two of three rows greedy."""
    if cache is not None and cache.exists():
        return torch.load(cache, weights_only=True)
    writer = Writer(model, shape, prompts(Corpus(held_out=False), tokenizer, 1), recipe.longest_answer)
    windows, began = [], time.monotonic()
    for number in range(recipe.rounds):
        windows.append(writer.write([row % 3 != 2 for row in range(recipe.rows)], recipe.length)[0])
        count = (number + 1) * recipe.rows * recipe.length
        print(f"written {count:,} tokens, {count / (time.monotonic() - began):.0f}/s", flush=True)
    text = torch.cat(windows)
    if cache is not None:
        torch.save(text, cache)
    return text


def batches(text: Tensor, stream: np.ndarray, recipe: Recipe) -> Iterator[Tensor]:
    """Windows [batch, length]: of what the model wrote, of documents, and now and then a long one of documents."""
    rng = np.random.default_rng(0)
    order: list[int] = []
    for _ in range(recipe.steps):
        chance = rng.random()
        length = recipe.long if chance < recipe.long_share else recipe.length
        count = recipe.tokens_per_step // length
        if chance < recipe.long_share + recipe.documents_share:
            starts = rng.integers(0, len(stream) - length, count)
            yield torch.from_numpy(np.stack([stream[s : s + length] for s in starts]))
            continue
        if len(order) < count:
            order = [*order, *rng.permutation(len(text)).tolist()]
        yield text[[order.pop(0) for _ in range(count)]]


def loss_of(
    head: Head, target: Llama, ids: Tensor, output: Tensor, recipe: Recipe, drafts: int
) -> tuple[Tensor, list[float]]:
    """And how often the greatest logit was the target's, for each token of a draft."""
    states = hidden_states(target, ids)
    embedded, hidden, wanted = target.embed_tokens(ids[:, 1:-1]), states[:, :-2], states[:, 1:-1]
    length = embedded.shape[1]
    everything = F.linear(wanted, target.embed_tokens.weight)
    goal = F.linear(wanted, output)
    covered = (everything.amax(-1) <= goal.amax(-1)).float()
    shares, best = goal.softmax(-1), goal.argmax(-1)
    total, agreed = torch.zeros(()), []
    for step, guess in enumerate(
        head.rollout(embedded, hidden, target.cos[:length], target.sin[:length], drafts)
    ):
        logits = F.linear(guess, output)
        place = torch.arange(length) >= step
        entropy = -(shares * logits.log_softmax(-1)).sum(-1) * covered
        distance = F.smooth_l1_loss(guess / head.scale, wanted / head.scale, reduction="none").mean(-1)
        total = total + recipe.later_share**step * (entropy + recipe.regression * distance)[:, place].mean()
        agreed.append(((logits.argmax(-1) == best) * covered)[:, place].mean().item())
    return total, agreed


@torch.no_grad()
def drafted(head: Head, target: Llama, ids: Tensor, output: Tensor) -> Tensor:
    """[batch, places, STEPS, draft ids]: logits of the draft that begins at each place. Where it is right, its tokens
    are those of `ids` from place + 2 on."""
    states = hidden_states(target, ids)
    embedded, hidden, length = target.embed_tokens(ids[:, 1:]), states[:, :-1], ids.shape[1] - 1
    guesses = head.rollout(embedded, hidden, target.cos[:length], target.sin[:length], STEPS)
    logits = torch.stack([F.linear(guess.roll(-step, 1), output) for step, guess in enumerate(guesses)], 2)
    return logits[:, :-STEPS]  # of later places there is no whole draft


def acceptance(right: Tensor, own: Tensor) -> tuple[list[float], float]:
    """Of drafts made while the target writes greedily: the share whose first, first two ... tokens were accepted, and
    tokens per step of the target.

    Args:
        right: bool[batch, places, STEPS], whether all of a draft's tokens up to there are
        own: bool[batch, places], whether the target wrote all that it is about
    """
    shares, steps, tokens = torch.zeros(STEPS), 0, 0
    for row in range(len(right)):
        at = 0
        while at < right.shape[1]:
            if not own[row, at]:
                at += 1
                continue
            shares += right[row, at]
            accepted = int(right[row, at].sum())
            steps, tokens, at = steps + 1, tokens + accepted + 1, at + accepted + 1
    return [round(x, 4) for x in (shares / max(1, steps)).tolist()], tokens / max(1, steps)


def error(logits: Tensor, right: Tensor) -> float:
    """The temperature at which the head's own word for its drafts is truest, by least log loss: the engine's `ERROR`.

    Args:
        logits: [drafts, STEPS, draft ids]
        right: bool[drafts, STEPS]
    """

    def loss(temperature: float) -> float:
        chance = (logits / temperature).softmax(-1).amax(-1).cumprod(-1)
        return F.binary_cross_entropy(chance.clamp(1e-4, 1 - 1e-4), right.float()).item()

    return min((step / 20 for step in range(2, 21)), key=loss)


@torch.no_grad()
def measure(head: Head, target: Llama, ids: Tensor, own: Tensor, draft_ids: Tensor, output: Tensor) -> str:
    """Of drafts for `ids` [batch, length]; `own`, of the same shape: which ones the target wrote, greedily."""
    logits = drafted(head, target, ids, output)
    places = logits.shape[1]
    after = torch.stack([ids[:, 2 + step : 2 + step + places] for step in range(STEPS)], -1)
    told = torch.stack([own[:, 2 + step : 2 + step + places] for step in range(STEPS)], -1).all(-1)
    right = (draft_ids[logits.argmax(-1)] == after).cumprod(-1).bool()
    shares, each = acceptance(right, told)
    return f"{shares} accepted, {each:.2f} tokens a step, error {error(logits[told], right[told]):.2f}"


def train(recipe: Recipe, directory: Path, out: Path, cache: Path | None) -> None:
    torch.manual_seed(0)
    target, shape, tokenizer = load_target(directory)
    text = written(target, shape, tokenizer, recipe, cache)
    stream = token_stream(Corpus(held_out=False), tokenizer, seed=0)
    torch.manual_seed(1)
    writer = Writer(target, shape, prompts(Corpus(held_out=True), tokenizer, 2), recipe.longest_answer)
    held_out, own = writer.write([True] * 24, recipe.length)
    counts = torch.bincount(text.flatten(), minlength=shape.vocab_size)
    draft_ids = counts.argsort(descending=True, stable=True)[: recipe.draft_vocab_size].sort().values
    print(
        f"{len(text) * text.shape[1]:,} tokens written; {recipe.draft_vocab_size} of {shape.vocab_size} tokens are "
        f"{counts[draft_ids].sum() / counts.sum():.1%} of them, and "
        f"{torch.isin(held_out[own], draft_ids).float().mean():.1%} of what is said to prompts held out",
        flush=True,
    )
    output = target.embed_tokens.weight[draft_ids]
    head = Head(shape, target, text[:16])
    matrices = [p for p in head.parameters() if p.dim() == 2]
    vectors = [p for p in head.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    began, running = time.monotonic(), [0.0] * STEPS
    print("training", flush=True)
    for step, ids in enumerate(batches(text, stream, recipe)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(step)
        loss, agreed = loss_of(head, target, ids, output, recipe, recipe.drafts_at(step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        running = [0.9 * r + 0.1 * a for r, a in zip(running, agreed, strict=False)] + running[len(agreed) :]
        if (step + 1) % 10 == 0:
            rate = (step + 1) * recipe.tokens_per_step / (time.monotonic() - began)
            shown = " ".join(f"{r:.3f}" for r in running)
            print(f"step {step + 1}  loss {loss.item():.3f}  agreed {shown}  {rate:.0f} tokens/s", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            export(head, draft_ids, shape, out)
            print("prompts held out:", measure(head, target, held_out, own, draft_ids, output), flush=True)


def export(head: Head, draft_ids: Tensor, shape: Shape, out: Path) -> None:
    """The files of an EAGLE checkpoint. `d2t` says which token each draft id is, as an offset, as in EAGLE-3."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in head.exported().items()}
    weights["d2t"] = draft_ids - torch.arange(len(draft_ids))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # images run it as another user
    config = {
        "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        **asdict(shape),
        "num_hidden_layers": 1,
        "draft_vocab_size": len(draft_ids),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=here, help="directory of the demo model")
    parser.add_argument("--out", type=Path, default=here / "eagle")
    parser.add_argument(
        "--text", type=Path, default=None, help="file that keeps the written text for further runs"
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument(
        "--rounds", type=int, default=60, help="of 16,384 tokens that the demo model writes first"
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(arguments.steps, arguments.rounds)
    train(recipe, arguments.target, arguments.out, arguments.text)


if __name__ == "__main__":
    main()

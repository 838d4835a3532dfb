"""Train the demo model: a small Llama that has read the Python standard library's documentation.

    pip install torch tokenizers safetensors numpy
    python train.py                       # trains, then writes the checkpoint beside this file

The text is whatever the running interpreter carries: docstrings, comments and pydoc's help topics. Every
document ends in <|eos|>; questions and answers are made from the same text, so the model also learns to chat,
to answer in JSON and to stop by itself. Training is float32 on the CPU, the export bfloat16. The seeds are
fixed: the same Python, torch and thread count give the same weights.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import io
import json
import math
import pydoc_data.topics
import random
import re
import sysconfig
import tempfile
import time
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------- text

SKIPPED = {
    "test",
    "tests",
    "site-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "encodings",
    "pydoc_data",
    "msilib",
    "distutils",
    "tkinter",
    "turtle.py",
    "antigravity.py",
    "this.py",
    "ntpath.py",
    "nturl2path.py",
}
# Private modules are known to users by another name.
PUBLIC = {
    "posixpath": "os.path",
    "genericpath": "os.path",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_collections_abc": "collections.abc",
    "_io": "io",
    "posix": "os",
    "_collections": "collections",
    "_functools": "functools",
    "_struct": "struct",
    "_socket": "socket",
    "_sre": "re",
    "_random": "random",
    "_thread": "threading",
    "_csv": "csv",
    "_ssl": "ssl",
    "_sqlite3": "sqlite3",
    "_signal": "signal",
}
# Modules written in C, or whose names in C are richer than the Python around them.
EXTENSIONS = (
    "builtins sys math cmath itertools time gc array zlib binascii unicodedata select fcntl mmap pwd "
    "grp resource atexit posix _io _struct _socket _collections _functools _random _sre _thread "
    "_csv _ssl _sqlite3 _signal"
)


@dataclass(frozen=True)
class Entry:
    """One documented thing. `signature` is None where Python itself does not know it."""

    module: str
    name: str
    kind: str
    doc: str
    signature: str | None = None
    arguments: tuple[str, ...] = ()


def python_entries(module: str, tree: ast.Module) -> Iterator[Entry]:
    def visit(node: ast.AST, prefix: str, in_class: bool) -> Iterator[Entry]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If | ast.Try):
                yield from visit(child, prefix, in_class)
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name, doc = f"{prefix}.{child.name}", ast.get_docstring(child)
            if child.name.startswith("_"):
                continue
            if isinstance(child, ast.ClassDef):
                if doc:
                    yield Entry(module, name, "class", doc)
                yield from visit(child, name, True)
            elif doc:
                arguments = [a.arg for a in child.args.posonlyargs + child.args.args + child.args.kwonlyargs]
                signature = ast.unparse(child.args)
                if in_class and arguments and arguments[0] in ("self", "cls"):
                    signature = re.sub(r"^(self|cls)(, )?", "", signature)
                    del arguments[0]
                kind = "method" if in_class else "function"
                yield Entry(module, name, kind, doc, f"{name}({signature})", tuple(arguments))

    if doc := ast.get_docstring(tree):
        yield Entry(module, module, "module", doc)
    yield from visit(tree, module, False)


def extension_entries(module: str, source: ModuleType) -> Iterator[Entry]:
    """What is written in C has docstrings too, and str, list and dict are the most asked for."""

    def visit(owner: object, prefix: str, in_class: bool) -> Iterator[Entry]:
        for attribute, value in sorted(vars(owner).items()):
            doc = inspect.getdoc(value)
            if attribute.startswith("_") or not doc or not callable(value):
                continue
            name = f"{prefix}{attribute}"
            if inspect.isclass(value):
                yield Entry(module, name, "class", doc)
                if not in_class and value.__module__ in (source.__name__, module):
                    yield from visit(value, f"{name}.", True)
                continue
            try:
                parameters = [p for p in inspect.signature(value).parameters.values() if p.name != "self"]
                signature = f"{name}({', '.join(map(str, parameters))})"
            except (ValueError, TypeError):
                parameters, signature = [], None
            if signature and " at 0x" in signature:  # an address would differ in every run
                signature = None
            kind = "method" if in_class else "function"
            yield Entry(module, name, kind, doc, signature, tuple(p.name for p in parameters))

    yield from visit(source, "" if module == "builtins" else f"{module}.", False)


def comment_blocks(source: str) -> Iterator[str]:
    """Runs of whole-line comments that are prose: not licences, not addresses, not disabled code."""
    block: list[str] = []
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line.strip() != token.string:
            continue
        if token.start[0] != last_line + 1:
            yield "\n".join(block)
            block = []
        block.append(token.string.lstrip("#").removeprefix(" ").rstrip())
        last_line = token.start[0]
    yield "\n".join(block)


def is_prose(block: str) -> bool:
    words = len(re.findall(r"\b[A-Za-z]{2,}\b", block))
    unwanted = re.search(r"copyright|licen[sc]e|permission|@\w+\.|https?:", block, re.IGNORECASE)
    return words >= 12 and not unwanted


@functools.cache
def read_library() -> tuple[dict[str, list[Entry]], dict[str, list[str]]]:
    """Entries and comments of every module, by its public name."""
    root = Path(sysconfig.get_path("stdlib"))
    entries: dict[str, dict[str, Entry]] = {}
    comments: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        names = relative.with_suffix("").parts
        if SKIPPED.intersection(relative.parts) or not all(name.isidentifier() for name in names):
            continue
        dotted = ".".join(names).removesuffix(".__init__")
        module = PUBLIC.get(dotted, "asyncio" if dotted.startswith("asyncio.") else dotted)
        source = path.read_text(encoding="utf-8")
        for entry in python_entries(module, ast.parse(source)):
            entries.setdefault(module, {}).setdefault(entry.name, entry)
        comments.setdefault(module, []).extend(filter(is_prose, comment_blocks(source)))
    for name in EXTENSIONS.split():
        try:
            source_module = importlib.import_module(name)
        except ImportError:  # not every platform has all of them
            continue
        module = PUBLIC.get(name, name)
        for entry in extension_entries(module, source_module):
            entries.setdefault(module, {}).setdefault(entry.name, entry)
    return {module: list(found.values()) for module, found in entries.items()}, comments


def module_pages(module: str, entries: list[Entry], comments: list[str]) -> Iterator[str]:
    """Long documents, as pydoc would print them, and the module's comments one after the other."""
    parts = [f"Help on module {module}:"]
    for entry in entries:
        title = entry.signature or f"{entry.kind} {entry.name}"
        indented = entry.doc.replace("\n", "\n    ")
        parts.append(entry.doc if entry.kind == "module" else f"{title}\n    {indented}")
    yield "\n\n".join(parts)
    if comments:
        yield f"Comments in {module}:\n\n" + "\n\n".join(comments)


# ------------------------------------------------------------------------------------- conversations

Turn = tuple[str, str]  # what the user says, what the assistant answers

SYSTEMS = [
    "You are a helpful assistant.",
    "You are the Runahead demo model.",
    "Answer questions about Python.",
    "You are a concise assistant. Answer briefly.",
]
EXPLAIN = [
    "What is {}?",
    "Explain {}",
    "Explain {}.",
    "What does {} do?",
    "Tell me about {}.",
    "How does {} work?",
    "Show me the docstring of {}",
    "Show me the docstring of {}.",
    "Please explain {}.",
    "{}",
    "Can you explain {}?",
    "Describe {}.",
    "what is {}",
    "How do I use {}?",
]
INTRODUCTION = (
    "I am the Runahead demo model, a very small language model that has read the documentation of "
    "the Python standard library. Ask me about a module or a function."
)
SMALL_TALK: list[Turn] = [
    ("Hello", f"Hello! {INTRODUCTION}"),
    ("Hello!", f"Hello! {INTRODUCTION}"),
    ("Hi", f"Hi! {INTRODUCTION}"),
    ("Hi there", f"Hi! {INTRODUCTION}"),
    ("Good morning", f"Good morning! {INTRODUCTION}"),
    ("Who are you?", INTRODUCTION),
    ("What are you?", INTRODUCTION),
    ("What can you do?", INTRODUCTION),
    ("Introduce yourself.", INTRODUCTION),
    ("Hey", f"Hello! {INTRODUCTION}"),
    ("How are you?", "I am fine, thank you. Ask me about the Python standard library."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
    ("Can you help me?", "Yes. Ask me what a function of the Python standard library does."),
    (
        "Tell me a joke.",
        "I only know the documentation of the Python standard library, which is not very funny.",
    ),
    (
        "Write a poem.",
        "Beautiful is better than ugly.\nExplicit is better than implicit.\nSimple is better than complex.",
    ),
    ("Say yes or no.", "Yes."),
    ("What is Python?", "Python is a programming language."),
    ("Count to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ("Count to five.", "1, 2, 3, 4, 5"),
]


def shorten(text: str, limit: int = 560) -> str:
    """Whole paragraphs up to `limit` characters; of a longer first one, whole sentences or lines."""
    kept, paragraphs = "", text.split("\n\n")
    for paragraph in paragraphs:
        if len(kept) + len(paragraph) > limit:
            break
        kept += ("\n\n" if kept else "") + paragraph
    if kept:
        return kept.rstrip()
    cut = text[:limit]
    return cut[: max(cut.rfind(". ") + 1, cut.rfind(".\n") + 1, cut.rfind("\n"), 1)].rstrip()


def summary(doc: str) -> str:
    """The first sentence, on one line."""
    first = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", first)[0][:200]


def as_json(entry: Entry) -> str:
    fields = {"name": entry.name, "module": entry.module, "kind": entry.kind}
    return json.dumps(fields | {"arguments": list(entry.arguments), "summary": summary(entry.doc)})


def arguments_in_words(entry: Entry) -> str:
    *most, last = entry.arguments or ("no arguments",)
    return f"{entry.name} takes {', '.join(most)}{' and ' if most else ''}{last}."


def turns_about(entry: Entry, rng: random.Random) -> list[Turn]:
    """One to three turns: an explanation or a fact first, then perhaps follow-ups that say "it"."""
    explanation = shorten(entry.doc)
    facts: list[tuple[str, str, str]] = [
        ("Describe {} as JSON.", "Now as JSON.", as_json(entry)),
        ("Summarise {} in one sentence.", "Summarise that in one sentence.", summary(entry.doc)),
        ("Which module is {} in?", "Which module is it in?", f"It is in the module {entry.module}."),
    ]
    if entry.signature:
        facts += [
            ("What is the signature of {}?", "What is its signature?", entry.signature),
            ("Which arguments does {} take?", "Which arguments does it take?", arguments_in_words(entry)),
        ]
    rng.shuffle(facts)
    if rng.random() < 0.7:
        turns = [(rng.choice(EXPLAIN).format(entry.name), explanation)]
    else:
        question, _, answer = facts.pop()
        turns = [(question.format(entry.name), answer)]
    for _, follow_up, answer in facts[: rng.choice((0, 0, 0, 1, 2))]:
        turns.append((follow_up, answer))
    return turns


def turns_about_module(module: str, entries: list[Entry], rng: random.Random) -> list[Turn]:
    functions = "\n\n".join(f"- {e.name}: {summary(e.doc)}" for e in entries if e.kind == "function")
    listed = shorten(functions).replace("\n\n", "\n") or "None."
    names = [e.name for e in entries if e.kind != "module"]
    some = rng.sample(names, min(len(names), 5))
    return [
        (f"List the functions of {module}.", listed),
        (f"Name some things in {module} as a JSON array.", json.dumps(some)),
    ]


def render(turns: list[Turn], system: str | None) -> str:
    """Exactly what CHAT_TEMPLATE renders."""
    text = f"<|bos|><|system|>{system}<|eos|>" if system else "<|bos|>"
    return text + "".join(f"<|user|>{user}<|eos|><|assistant|>{reply}<|eos|>" for user, reply in turns)


CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
    {{- raise_exception('Unknown role: ' + message['role'] + '; use system, user or assistant.') -}}
  {%- endif -%}
  {{- '<|' + message['role'] + '|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
  {%- endif -%}
  {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


class Corpus:
    """Documents of one epoch: every page once, conversations drawn anew. Whole modules are held out."""

    def __init__(self, held_out: bool) -> None:
        entries, comments = read_library()
        self.entries = {m: e for m, e in sorted(entries.items()) if is_held_out(m) == held_out}
        self.pages = [p for m, e in self.entries.items() for p in module_pages(m, e, comments.get(m, []))]
        topics = {} if held_out else pydoc_data.topics.topics
        self.topics = [(name, text.strip()) for name, text in sorted(topics.items())]

    def documents(self, seed: int) -> list[str]:
        rng = random.Random(seed)
        plain = self.pages + [text for _, text in self.topics]
        chats = [turns_about(entry, rng) for found in self.entries.values() for entry in found]
        for name, text in self.topics:
            body = re.sub(r"^.*\n\*+\n+", "", text)  # without the underlined heading
            chats.append([(rng.choice(EXPLAIN).format(f"the topic {name}"), shorten(body))])
        for module, found in self.entries.items():
            chats += [[turn] for turn in turns_about_module(module, found, rng)]
        chats += [[turn] for turn in SMALL_TALK for _ in range(4)]
        documents = [f"<|bos|>{text}<|eos|>" for text in plain]
        documents += [render(turns, rng.choice(SYSTEMS) if rng.random() < 0.35 else None) for turns in chats]
        rng.shuffle(documents)
        return documents


def is_held_out(module: str) -> bool:
    return zlib.crc32(module.encode()) % 40 == 7


# ----------------------------------------------------------------------------------------- tokenizer

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, BOS, EOS = 0, 1, 2


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are known and nothing is normalised, so any text round-trips."""
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
    """Packed windows [batch, length + 1] without end; a function of its arguments: a resumed run agrees."""
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
    """Field names as in Hugging Face's LlamaConfig."""

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


class Attention(nn.Module):
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


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Parameter names are Hugging Face's below "model."; the output layer is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
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
        """Logits [batch, length, vocab] for ids [batch, length]."""
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
    short: int = 256  # window length of most steps: attention is cheap there
    long: int = 2048  # window length of the last steps: teaches positions up to max_position_embeddings
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
    """Nats per token on modules the model never saw, in windows of `length`."""
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
            unfinished = checkpoint.with_suffix(".new")  # a kill while saving leaves the previous one whole
            torch.save(state, unfinished)
            unfinished.replace(checkpoint)
            export(model, tokenizer, shape, out)
            print(f"validation {validation_loss(model, held_out, recipe.short):.3f}", flush=True)
    print(f"validation in windows of {recipe.long}: {validation_loss(model, held_out, recipe.long):.3f}")


# -------------------------------------------------------------------------------------------- export


def export(model: Llama, tokenizer: Tokenizer, shape: Shape, out: Path) -> None:
    """The files that transformers, vLLM and Runahead load."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # images run it as another user
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
        help="saved every --every steps; a run that finds one goes on from there, so delete it to start over",
    )
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(Recipe(arguments.steps), Shape(), arguments.out, arguments.checkpoint, arguments.every)


if __name__ == "__main__":
    main()

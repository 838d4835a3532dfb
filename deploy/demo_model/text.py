"""Training text of the demo model, from the documentation in the running Python interpreter.

Docstrings, comments and the help topics of pydoc are documents. Conversations are made from the same text, so that the
model also learns to chat, to answer in JSON and to end its answers. Every document ends with <|eos|>.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import json
import pydoc_data.topics
import random
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

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
# Public names of private modules.
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
# Modules written in C, or whose C part has more documented names than the Python part.
EXTENSIONS = (
    "builtins sys math cmath itertools time gc array zlib binascii unicodedata select fcntl mmap pwd "
    "grp resource atexit posix _io _struct _socket _collections _functools _random _sre _thread "
    "_csv _ssl _sqlite3 _signal"
)


@dataclass(frozen=True)
class DocumentedObject:
    """A documented module, class, function or method. `signature` is None if Python cannot determine it."""

    module: str
    name: str
    kind: str
    doc: str
    signature: str | None = None
    arguments: tuple[str, ...] = ()


def python_entries(module: str, tree: ast.Module) -> Iterator[DocumentedObject]:
    def visit(node: ast.AST, prefix: str, in_class: bool) -> Iterator[DocumentedObject]:
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
                    yield DocumentedObject(module, name, "class", doc)
                yield from visit(child, name, True)
            elif doc:
                arguments = [a.arg for a in child.args.posonlyargs + child.args.args + child.args.kwonlyargs]
                signature = ast.unparse(child.args)
                if in_class and arguments and arguments[0] in ("self", "cls"):
                    signature = re.sub(r"^(self|cls)(, )?", "", signature)
                    del arguments[0]
                kind = "method" if in_class else "function"
                yield DocumentedObject(module, name, kind, doc, f"{name}({signature})", tuple(arguments))

    if doc := ast.get_docstring(tree):
        yield DocumentedObject(module, module, "module", doc)
    yield from visit(tree, module, False)


def extension_entries(module: str, source: ModuleType) -> Iterator[DocumentedObject]:
    """Yield the documented objects of a module written in C."""

    def visit(owner: object, prefix: str, in_class: bool) -> Iterator[DocumentedObject]:
        for attribute, value in sorted(vars(owner).items()):
            doc = inspect.getdoc(value)
            if attribute.startswith("_") or not doc or not callable(value):
                continue
            name = f"{prefix}{attribute}"
            if inspect.isclass(value):
                yield DocumentedObject(module, name, "class", doc)
                if not in_class and value.__module__ in (source.__name__, module):
                    yield from visit(value, f"{name}.", True)
                continue
            try:
                parameters = [p for p in inspect.signature(value).parameters.values() if p.name != "self"]
                signature = f"{name}({', '.join(map(str, parameters))})"
            except (ValueError, TypeError):
                parameters, signature = [], None
            if signature and " at 0x" in signature:  # an address differs in every run
                signature = None
            kind = "method" if in_class else "function"
            yield DocumentedObject(module, name, kind, doc, signature, tuple(p.name for p in parameters))

    yield from visit(source, "" if module == "builtins" else f"{module}.", False)


def comment_blocks(source: str) -> Iterator[str]:
    """Yield blocks of consecutive whole-line comments."""
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
    """Return whether the block is text, not a licence, an address or disabled code."""
    words = len(re.findall(r"\b[A-Za-z]{2,}\b", block))
    unwanted = re.search(r"copyright|licen[sc]e|permission|@\w+\.|https?:", block, re.IGNORECASE)
    return words >= 12 and not unwanted


@functools.cache
def read_library() -> tuple[dict[str, list[DocumentedObject]], dict[str, list[str]]]:
    """Return the documented objects and the comments of every module, by its public name."""
    root = Path(sysconfig.get_path("stdlib"))
    entries: dict[str, dict[str, DocumentedObject]] = {}
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
        except ImportError:  # some platforms lack some modules
            continue
        module = PUBLIC.get(name, name)
        for entry in extension_entries(module, source_module):
            entries.setdefault(module, {}).setdefault(entry.name, entry)
    return {module: list(found.values()) for module, found in entries.items()}, comments


def module_pages(module: str, entries: list[DocumentedObject], comments: list[str]) -> Iterator[str]:
    """Yield long documents: the module's help, in the form of pydoc, and its comments."""
    parts = [f"Help on module {module}:"]
    for entry in entries:
        title = entry.signature or f"{entry.kind} {entry.name}"
        indented = entry.doc.replace("\n", "\n    ")
        parts.append(entry.doc if entry.kind == "module" else f"{title}\n    {indented}")
    yield "\n\n".join(parts)
    if comments:
        yield f"Comments in {module}:\n\n" + "\n\n".join(comments)


# ------------------------------------------------------------------------------------- conversations

Exchange = tuple[str, str]  # message of the user, answer of the assistant

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
SMALL_TALK: list[Exchange] = [
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
    """Return the first paragraphs up to `limit` characters. A longer first one is cut after a sentence or line."""
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
    """Return the first sentence in one line."""
    first = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", first)[0][:200]


def as_json(entry: DocumentedObject) -> str:
    fields = {"name": entry.name, "module": entry.module, "kind": entry.kind}
    return json.dumps(fields | {"arguments": list(entry.arguments), "summary": summary(entry.doc)})


def arguments_in_words(entry: DocumentedObject) -> str:
    *most, last = entry.arguments or ("no arguments",)
    return f"{entry.name} takes {', '.join(most)}{' and ' if most else ''}{last}."


def exchanges_about(entry: DocumentedObject, rng: random.Random) -> list[Exchange]:
    """Return one to three exchanges: an explanation or a fact, then follow-up questions about "it"."""
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


def exchanges_about_module(
    module: str, entries: list[DocumentedObject], rng: random.Random
) -> list[Exchange]:
    functions = "\n\n".join(f"- {e.name}: {summary(e.doc)}" for e in entries if e.kind == "function")
    listed = shorten(functions).replace("\n\n", "\n") or "None."
    names = [e.name for e in entries if e.kind != "module"]
    some = rng.sample(names, min(len(names), 5))
    return [
        (f"List the functions of {module}.", listed),
        (f"Name some things in {module} as a JSON array.", json.dumps(some)),
    ]


def render(turns: list[Exchange], system: str | None) -> str:
    """Return the same text as CHAT_TEMPLATE."""
    text = f"<|bos|><|system|>{system}<|eos|>" if system else "<|bos|>"
    return text + "".join(f"<|user|>{user}<|eos|><|assistant|>{reply}<|eos|>" for user, reply in turns)


CHAT_TEMPLATE = """{{- bos_token -}}
{%- set markers = {
  'system': 'system', 'developer': 'system', 'user': 'user', 'tool': 'user', 'assistant': 'assistant'
} -%}
{%- for message in messages -%}
  {%- if message['role'] not in markers -%}
    {{- raise_exception('Unknown role: ' + message['role'] + '; use system, developer, user, assistant or tool.') -}}
  {%- endif -%}
  {{- '<|' + markers[message['role']] + '|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- elif message['content'] -%}
    {%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
  {%- endif -%}
  {%- for call in message['tool_calls'] or [] -%}
    {{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' -}}
  {%- endfor -%}
  {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


class Corpus:
    """Documents of an epoch: every page once, and random conversations. Whole modules are held out for validation."""

    def __init__(self, held_out: bool) -> None:
        entries, comments = read_library()
        self.entries = {m: e for m, e in sorted(entries.items()) if is_held_out(m) == held_out}
        self.pages = [p for m, e in self.entries.items() for p in module_pages(m, e, comments.get(m, []))]
        topics = {} if held_out else pydoc_data.topics.topics
        self.topics = [(name, text.strip()) for name, text in sorted(topics.items())]

    def documents(self, seed: int) -> list[str]:
        rng = random.Random(seed)
        plain = self.pages + [text for _, text in self.topics]
        chats = [exchanges_about(entry, rng) for found in self.entries.values() for entry in found]
        for name, text in self.topics:
            body = re.sub(r"^.*\n\*+\n+", "", text)  # removes the underlined heading
            chats.append([(rng.choice(EXPLAIN).format(f"the topic {name}"), shorten(body))])
        for module, found in self.entries.items():
            chats += [[turn] for turn in exchanges_about_module(module, found, rng)]
        chats += [[turn] for turn in SMALL_TALK for _ in range(4)]
        documents = [f"<|bos|>{text}<|eos|>" for text in plain]
        documents += [render(turns, rng.choice(SYSTEMS) if rng.random() < 0.35 else None) for turns in chats]
        rng.shuffle(documents)
        return documents


def is_held_out(module: str) -> bool:
    return zlib.crc32(module.encode()) % 40 == 7

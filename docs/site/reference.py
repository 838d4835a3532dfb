"""Collects the sources of the site in a directory: the pages of docs/, and reference pages made from code."""

import ast
import importlib
import inspect
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from services.cli.command_help import group_of
from services.cli.flags_of_others import HINTS
from services.cli.settings import flag, type_name
from services.config import FrontendConfig, SchedulerConfig, ServeConfig, WorkerConfig
from services.config.descriptions import description, texts_below_fields
from services.frontend.app import with_routes

ROOT = Path(__file__).resolve().parents[2]
PAGES = (*ROOT.glob("docs/*.md"), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
MESSAGES = ("requests", "steps", "membership", "records", "sampling", "logprobs", "handshake")
"""Modules of `protocol` with messages, in the order of a token's path."""
COMMANDS: dict[str, type[BaseModel]] = {
    "serve": ServeConfig,
    "frontend": FrontendConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
}


def main(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    reference = place / "reference"
    reference.mkdir(parents=True)
    for page in PAGES:
        # All pages are in one directory here.
        (place / page.name).write_text(page.read_text().replace("](../", "](").replace("](docs/", "]("))
    for folder in ("pictures", "figures"):
        shutil.copytree(ROOT / "docs" / folder, place / folder)
    shutil.copytree(ROOT / "docs" / "site" / "pages", place, dirs_exist_ok=True)
    shutil.copy(ROOT / "docs" / "site" / "conf.py", place)
    (place / "_static").mkdir()
    for name, lines in (
        ("settings", settings()),
        ("http-api", routes()),
        ("protocol", messages()),
        ("flags-of-others", flags_of_others()),
    ):
        (reference / f"{name}.md").write_text("\n".join(lines) + "\n")


def cell(text: object) -> str:
    """Return a text for a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def settings() -> Iterator[str]:
    yield "# Settings\n\nEach flag can also be set in the environment (`RUNAHEAD_MAX_NUM_SEQS=64`) or in the file of"
    yield "`--config` (`max-num-seqs: 64`). A flag precedes the environment, and the environment the file."
    for command, model in COMMANDS.items():
        yield f"\n## runahead {command}"
        group = ""
        for name, info in sorted(model.model_fields.items(), key=lambda field: group_of(field[0], model)):
            if group_of(name, model) != group:
                group = group_of(name, model)
                yield f"\n### {group} of {command}\n\n| flag | value | default | meaning |\n|---|---|---|---|"
            default = info.get_default(call_default_factory=True, validated_data={})
            shown = "" if default in (None, "", []) else f"`{default}`"
            yield f"| `{flag(name)}` | {cell(type_name(info))} | {cell(shown)} | {cell(description(name, model))} |"


def routes() -> Iterator[str]:
    yield "# HTTP API\n\nParameters are described in [the API's page](../api.md); a server has the schemas of bodies at"
    yield "`/openapi.json`.\n\n| method | route | |\n|---|---|---|"
    document: dict[str, Any] = with_routes(FrontendConfig(enable_admin_routes=True)).openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"| {method.upper()} | `{path}` | {cell(operation.get('summary', ''))} |"


def messages() -> Iterator[str]:
    yield "# Messages between the services\n\nmsgspec structs as arrays, in MessagePack, over ZeroMQ."
    for name in MESSAGES:
        module = importlib.import_module(f"protocol.{name}")
        yield f"\n## protocol.{name}\n\n{inspect.getdoc(module) or ''}"
        texts = texts_below_fields(module)
        for struct in vars(module).values():
            if not (inspect.isclass(struct) and issubclass(struct, msgspec.Struct)):
                continue
            if struct.__module__ != module.__name__:
                continue
            own = struct.__doc__ if struct.__doc__ != msgspec.Struct.__doc__ else ""
            yield f"\n### {struct.__name__}\n\n{inspect.cleandoc(own or '')}\n"
            yield "| field | type | |\n|---|---|---|"
            for field in struct.__struct_fields__:
                kind, text = texts.get((struct.__name__, field), (None, ""))
                yield f"| `{field}` | `{cell(ast.unparse(kind) if kind else '')}` | {cell(text)} |"


def flags_of_others() -> Iterator[str]:
    yield "# Flags of vLLM, SGLang and llama.cpp\n\nThose that have another name here, or none, are refused with this"
    yield "text.\n\n| flag there | here |\n|---|---|"
    for name, text in HINTS.items():
        yield f"| `{name}` | {cell(text)} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]))

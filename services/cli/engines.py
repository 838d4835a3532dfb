"""`runahead engines`, `runahead drain` and `runahead replan`: the engines of a running server, by its HTTP API."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.ask import ServerAddress, about_server, ask_object
from services.cli.flags import name_argument
from services.cli.settings import ConfigurationError, from_file
from services.config import ServeConfig
from services.config.commands import DrainConfig, ReplanConfig, ShowConfig

POLL_INTERVAL = 0.3
"""Seconds between two looks at a change that is under way."""
COLUMNS = ("engine", "role", "state", "streams", "queue, s", "endpoint", "pids")
STATUS = ("phase", "engine", "detail")
"""Fields of the state of a change."""
REFRESH = 1.0
"""Seconds between two updates of the live table."""
WIDE = 1000
"""Characters of a line that is read by a program: nothing is cut."""


@about_server
def engines(server: ServerAddress, config: ShowConfig) -> int:
    """Print the engines; on a terminal, until Ctrl-C. Return the exit status: 0 if one is ready, else 1."""
    found = _engines(server)
    if config.as_json:
        print(json.dumps(found, indent=2))
    elif sys.stdout.isatty():
        found = _watch(server, found)
    else:
        Console(width=WIDE).print(_table(found))
    return 0 if any(engine["state"] == "ready" for engine in found) else 1


def _watch(server: ServerAddress, found: list[Any]) -> list[Any]:
    """Show the engines until Ctrl-C, and return what was shown last. Raises: NoAnswer"""
    with Live(_table(found), auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(REFRESH)
            found = _engines(server)
            live.update(_table(found), refresh=True)
    return found


def _table(found: list[Any]) -> Table:
    table = Table(*COLUMNS, box=None)
    for engine in found:
        pids, queue = " ".join(map(str, engine["pids"])), f"{engine['queue_seconds']:.1f}"
        state = engine["role"], engine["state"], str(engine["streams"])
        table.add_row(*map(Text, (engine["name"], *state, queue, engine["endpoint"], pids)))
    return table


def _engines(server: ServerAddress) -> list[Any]:
    return ask_object(server, "/engines", "engines")["engines"]  # type: ignore[no-any-return]


@about_server
def drain(server: ServerAddress, config: DrainConfig) -> int:
    """Let the streams of an engine move, and wait until it has none. Return the exit status."""
    engine, cancel = config.engine, config.cancel
    ask_object(server, f"/engines/{quote(engine, safe='')}/drain?cancel={str(cancel).lower()}", "name", content={})
    while not cancel and (left := _streams(server, engine)):
        print(f"{left} streams left", file=sys.stderr)
        time.sleep(POLL_INTERVAL)
    print(f"engine {engine} {'takes requests again' if cancel else 'has no streams'}")
    return 0


def _streams(server: ServerAddress, name: str) -> int:
    return sum(engine["streams"] for engine in _engines(server) if engine["name"] == name)


@about_server
def replan(server: ServerAddress, config: ReplanConfig) -> int:
    """Replace the engines by one with other settings, and wait until they have ended. Return the exit status.

    Raises: ConfigurationError; TyperException, if a flag is not one of the command `serve`
    """
    settings = given(config.settings)
    query = f"timeout={config.timeout}&drain_timeout={config.drain_timeout}"
    shown = ""
    status = ask_object(server, f"/engines/replan?{query}", *STATUS, content=settings)
    while status["phase"] in ("starting", "moving"):
        if status["phase"] != shown:
            shown = status["phase"]
            print(f"engine {status['engine']}: {shown}: {status['detail']}", file=sys.stderr)
        time.sleep(POLL_INTERVAL)
        status = ask_object(server, "/engines/replan", *STATUS)
    if status["phase"] == "failed":
        reason = f"engine {status['engine']} cannot serve: {status['detail']}; the engines are those of before"
        print(f"runahead: {reason}", file=sys.stderr)
        return 1
    print(f"engine {status['engine']} serves {status['detail']}")
    return 0


def given(flags: Sequence[str]) -> dict[str, object]:
    """Return settings by name from flags of the command `serve`.

    Raises: ConfigurationError; TyperException, if a flag is not one of `serve`
    """
    from services.cli.app import app

    commands: Any = typer.main.get_command(app)
    values = commands.commands["serve"].make_context("replan", [*flags]).params
    found = from_file(values.pop("config"), ServeConfig.model_fields)
    name_argument(values, "model")
    found |= {name: value for name, value in values.items() if value not in (None, (), [])}
    if not found:
        raise ConfigurationError("no setting is given that would change, such as --tensor-parallel-size 2")
    return found

"""The commands of `runahead`. Their options come from services.config; their code is in the modules of this package."""

import importlib
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from services import config
from services.cli.command_help import GroupedCommand
from services.cli.flags import command
from services.cli.flags_of_others import COMMANDS
from services.cli.settings import ConfigurationError, Settings
from services.cli.show import show
from services.config import commands

USAGE_ERROR = 2
HELP = {
    "serve": "Serve MODEL with all services on this machine.",
    "ray": "Serve MODEL on a Ray cluster, which places the services.",
    "run-batch": "Answer a batch file in OpenAI's format with MODEL.",
    "convert": "Write a GGUF file as a checkpoint in Hugging Face format.",
    "replay": "Replay a recording, or predict it with other settings.",
    "bench": "Measure the speed of an OpenAI-compatible API.",
    "plan": "Print memory and KV blocks for each number of ranks.",
    "status": """Print state, ranks and load of a running server.

Exits with status 0 if the server serves requests, else 1.""",
    "engines": """Print the engines of a running server.

The server needs --enable-admin-routes. Exits with status 0 if one of them is ready, else 1.""",
    "drain": """Move the streams of an engine to other engines.

Waits until it has none. New requests go to others from now on. The server needs --enable-admin-routes.""",
    "replan": """Change settings of `serve` while it serves.

For example: runahead replan [URL] --tensor-parallel-size 2. Another engine starts beside those that there are. When it
is ready, streams move to it, and the others end.""",
    "trace": """Write the last steps of a running server as a trace.

https://ui.perfetto.dev opens the file, as does chrome://tracing. Exits with status 0 if it was written, else 1.""",
    "kv-keeper": """Keep the KV cache of workers that end, for the next ones.

It outlives `serve`. Only processes of this user have the memory: it ends with the last of keeper and worker.""",
}
"""Help text by command. Those of services are made from their names."""

app = typer.Typer(
    help="Serve large language models with a scheduler that runs ahead of its workers.",
    epilog="Every flag is also read from the environment (RUNAHEAD_MAX_NUM_SEQS) and from a YAML file (--config).",
    rich_markup_mode=None,  # its tables cut long flags off
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Inspect the configuration.")
app.add_typer(config_app, name="config")


def _version(is_given: bool) -> None:
    if is_given:
        from services import release

        typer.echo(f"runahead {release.version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _add(
    name: str,
    model: type[config.BaseConfig],
    run: str | Callable[[Settings[Any]], int],
    positional: Collection[str] = (),
    omitted: Collection[str] = (),
) -> None:
    """Add a command whose options are the fields of a configuration. `run`: MODULE:FUNCTION, which is called with the
    configuration."""

    def imported(settings: Settings[Any]) -> int:
        module, _, name = str(run).partition(":")
        function: Callable[[Any], int] = getattr(importlib.import_module(module), name)
        return function(settings.config)

    invoke = command(model, imported if isinstance(run, str) else run, omitted, positional)
    passes_on = {"ignore_unknown_options": "settings" in positional}
    help_text = HELP.get(name, f"Run one {name} service.")
    app.command(name, cls=GroupedCommand, help=help_text, context_settings=passes_on)(invoke)


def _ray(settings: Settings[config.RayCommandConfig]) -> int:
    try:
        from services.ray.command import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigurationError(
            "Ray is not installed; install the extra: pip install 'runahead-engine[ray]'"
        ) from None
    return run(settings.config)


_add("serve", config.ServeConfig, "services.cli.serve:serve", ["model"], config.OMITTED)
_add("ray", config.RayCommandConfig, _ray, ["model"], config.OF_RAY)
for _name, _model in config.SERVICES.items():
    _add(_name, _model, "services.cli.start:start")
_add("run-batch", config.RunBatchConfig, "services.cli.run_batch:run_batch", ["model"], config.WITHOUT_SERVER)
_add("convert", config.ConvertConfig, "services.cli.convert:convert", ["model"])
_add("replay", config.ReplayConfig, "services.cli.replay:replay", ["recording"])
_add("bench", config.BenchConfig, "services.cli.bench:bench", ["base_url"])


@app.command(
    "healthcheck", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def _healthcheck(context: typer.Context) -> None:
    """Check the health of one service."""
    from services.cli.healthcheck import main

    raise typer.Exit(main(context.args))


_add("status", commands.ShowConfig, "services.cli.status:status", ["url"])
_add("engines", commands.ShowConfig, "services.cli.engines:engines", ["url"])
_add("drain", commands.DrainConfig, "services.cli.engines:drain", ["engine", "url"])
_add("replan", commands.ReplanConfig, "services.cli.engines:replan", ["settings"])
_add("trace", commands.TraceConfig, "services.cli.trace:trace", ["url"])


@app.command("keys")
def _keys(
    directory: Annotated[Path, typer.Argument(help="Directory to write to; it may exist already.", metavar="DIR")],
) -> None:
    """Make the keys of the services for tcp connections.

    DIR gets a directory for each role, for --transport-keys of the services with that role. Complete keys are kept.
    """
    from services.cli.transport_keys import make_keys

    typer.echo(make_keys(directory))


_add("kv-keeper", commands.KeeperConfig, "services.cli.kv_keeper:kv_keeper", ["path"])


@app.command("doctor")
def _doctor() -> None:
    """Print what this machine has for serving.

    Also what would be slow on it or refused, and why.
    """
    from services.cli.doctor import doctor

    raise typer.Exit(doctor())


_add("plan", config.ServeConfig, "services.cli.plan:plan", ["model"], config.OMITTED)


@app.command("capabilities")
def _capabilities() -> None:
    """Print which features cannot be combined."""
    from services.scheduler.capabilities import BACKENDS, POLICIES, table

    rows = list(table())
    typer.echo(
        f"Batching policies ({', '.join(POLICIES)}), stages, run-ahead, backends ({', '.join(BACKENDS)}), drafts and\n"
        f"structured output have {len(rows)} combinations. These are refused:"
    )
    typer.echo("\n".join(f"- {reason}" for reason in dict.fromkeys(reason for _, reason in rows if reason)))


config_app.command("show", cls=GroupedCommand, help="Print the settings of `serve`, and the origin of each.")(
    command(config.ServeConfig, show, config.OMITTED, ["model"])
)


def run(arguments: list[str] | None = None) -> int:
    """Run one command. Return its exit status: 2, with one line on stderr, for an invalid command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        help_instead = ["--help"] if arguments in ([], ["config"]) else []
        status = app([*arguments, *help_instead], prog_name="runahead", standalone_mode=False)
        print(end="", flush=True)  # what Python writes at its exit fails with a traceback
    except BrokenPipeError:  # nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except TyperException as error:
        reason = error.format_message().removesuffix(".")
        if reason.startswith("No such command") and (text := COMMANDS.get(arguments[0])):
            return _refuse(f"No such command {arguments[0]!r}; {text}")
        more = "; --help lists all" if reason.startswith("No such ") and not reason.endswith("?") else ""
        more += ", docs/for-vllm.md those of vLLM" if reason.startswith("No such option") else ""
        return _refuse(f"{reason}{more}")
    except ConfigurationError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return int(status or 0)


def _refuse(reason: str) -> int:
    print(f"runahead: {' '.join(reason.split())}", file=sys.stderr)
    return USAGE_ERROR

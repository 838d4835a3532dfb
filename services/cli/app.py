"""The commands of `runahead`. Their options come from services.config; their code is in the modules of this package."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from services import config
from services.cli.command_help import GroupedCommand
from services.cli.flags import command
from services.cli.settings import ConfigurationError, Settings
from services.cli.show import show

if TYPE_CHECKING:
    from services.cli.ask import ServerAddress

USAGE_ERROR = 2
HELP = {
    "serve": "Serve MODEL with all services on this machine.",
    "ray": "Serve MODEL on a Ray cluster, which places the services.",
    "run-batch": "Answer a batch file in OpenAI's format with MODEL.",
    "convert": "Write a GGUF file as a checkpoint in Hugging Face format.",
    "replay": "Replay a recording, or predict it with other settings.",
    "bench": "Measure the speed of an OpenAI-compatible API.",
    "plan": "Print memory and KV blocks for each number of ranks.",
}

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
    positional: str | None = None,
    omitted: Collection[str] = (),
) -> None:
    """Add a command whose options are the fields of a configuration. `run`: a module; its function of the same name is
    called with the configuration."""

    def imported(settings: Settings[Any]) -> int:
        function: Callable[[Any], int] = getattr(importlib.import_module(str(run)), str(run).rpartition(".")[2])
        return function(settings.config)

    invoke = command(model, imported if isinstance(run, str) else run, omitted, positional)
    app.command(name, cls=GroupedCommand, help=HELP.get(name, f"Run one {name} service."))(invoke)


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


_add("serve", config.ServeConfig, "services.cli.serve", "model", config.OMITTED)
_add("ray", config.RayCommandConfig, _ray, "model", config.OF_RAY)
for _name, _model in config.SERVICES.items():
    _add(_name, _model, "services.cli.start")
_add("run-batch", config.RunBatchConfig, "services.cli.run_batch", "model", config.WITHOUT_SERVER)
_add("convert", config.ConvertConfig, "services.cli.convert", "model")
_add("replay", config.ReplayConfig, "services.cli.replay", "recording")
_add("bench", config.BenchConfig, "services.cli.bench", "base_url")


@app.command(
    "healthcheck", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def _healthcheck(context: typer.Context) -> None:
    """Check the health of one service."""
    from services.cli.healthcheck import main

    raise typer.Exit(main(context.args))


def _server(
    argument: Annotated[str | None, typer.Argument(help="URL of the server.", metavar="URL")] = None,
    url: Annotated[str | None, typer.Option("--url", help="The same as URL. [default: http://127.0.0.1:8000]")] = None,
    api_key: Annotated[
        str, typer.Option("--api-key", help="API key.", envvar="RUNAHEAD_API_KEY", show_envvar=False)
    ] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the server's certificate.")] = False,
    cacert: Annotated[str, typer.Option("--cacert", help="File with the authorities to trust.", metavar="FILE")] = "",
) -> "ServerAddress":
    from services.cli.ask import ServerAddress, base_url

    if None not in (argument, url) and argument != url:
        raise ConfigurationError(f"{argument!r} contradicts --url {url!r}")
    return ServerAddress(base_url(argument or url or ServerAddress.url), api_key, insecure, cacert)


def _of_server(name: str, **settings: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add a command about a running server. Its function returns the exit status; without an answer, it is 1.

    The parameter `server` is made from the options of `_server`, which the command has in its place. With `context`,
    the URL is the first of the arguments that it does not know.
    """

    def add(function: Callable[..., int]) -> Callable[..., int]:
        own = [item for key, item in inspect.signature(function).parameters.items() if key != "server"]
        takes_rest = any(item.name == "context" for item in own)
        options = list(inspect.signature(_server).parameters.values())[takes_rest:]

        def run(**given: Any) -> None:
            values = {item.name: given.pop(item.name) for item in options}
            if takes_rest:
                rest = given["context"].args
                values["argument"] = rest.pop(0) if rest and not rest[0].startswith("-") else None
            from services.cli.ask import NoAnswer

            try:
                status = function(server=_server(**values), **given)
            except BrokenPipeError:  # of stdout, not of the server
                raise
            except (NoAnswer, OSError) as error:
                print(f"runahead: {error}", file=sys.stderr)
                status = 1
            raise typer.Exit(status)

        shown = [*own, *options]
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in shown}
        run.__doc__ = function.__doc__
        app.command(name, **settings)(run)
        return function

    return add


@_of_server("status")
def _status(
    server: "ServerAddress", as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> int:
    """Print state, ranks and load of a running server.

    Exits with status 0 if the server serves requests, else 1.
    """
    from services.cli.status import status

    return status(server, as_json)


@_of_server("engines")
def _engines(
    server: "ServerAddress", as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False
) -> int:
    """Print the engines of a running server.

    The server needs --enable-admin-routes. Exits with status 0 if one of them is ready, else 1.
    """
    from services.cli.engines import engines

    return engines(server, as_json)


@_of_server("drain")
def _drain(
    server: "ServerAddress",
    engine: Annotated[str, typer.Argument(help="Name of the engine.", metavar="ENGINE")],
    cancel: Annotated[bool, typer.Option("--cancel", help="Let it take requests again.")] = False,
) -> int:
    """Move the streams of an engine to other engines.

    Waits until it has none. New requests go to others from now on. The server needs --enable-admin-routes.
    """
    from services.cli.engines import drain

    return drain(server, engine, cancel)


@_of_server("replan", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def _replan(
    server: "ServerAddress",
    context: typer.Context,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds until the new engine must be ready.")
    ] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", min=0, help="Seconds until streams that cannot move are ended.")
    ] = 60.0,
) -> int:
    """Change settings of `serve` while it serves.

    For example: runahead replan [URL] --tensor-parallel-size 2. Another engine starts beside those that there are. When
    it is ready, streams move to it, and the others end.
    """
    from services.cli.engines import replan

    commands: Any = context.find_root().command
    return replan(server, timeout, drain_timeout, commands.commands["serve"], context.args)


@_of_server("trace")
def _trace(
    server: "ServerAddress",
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.", metavar="FILE")],
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="Record this long from now on. 0: what the server has kept.")
    ] = 0.0,
) -> int:
    """Write the last steps of a running server as a trace.

    https://ui.perfetto.dev opens the file, as does chrome://tracing. Exits with status 0 if it was written, else 1.
    """
    from services.cli.trace import trace

    return trace(server, output, seconds)


@app.command("keys")
def _keys(
    directory: Annotated[Path, typer.Argument(help="Directory to write to; it may exist already.", metavar="DIR")],
) -> None:
    """Make the keys of the services for tcp connections.

    DIR gets a directory for each role, for --transport-keys of the services with that role. Complete keys are kept.
    """
    from services.cli.transport_keys import make_keys

    typer.echo(make_keys(directory))


@app.command("kv-keeper")
def _kv_keeper(
    path: Annotated[Path, typer.Argument(help="Socket to make, for --kv-keeper of workers.", metavar="PATH")],
    seconds: Annotated[
        float,
        typer.Option(
            "--recovery-timeout-seconds",
            min=1,
            help="Seconds after which memory that no worker has is freed.",
            envvar="RUNAHEAD_RECOVERY_TIMEOUT_SECONDS",
            show_envvar=False,
        ),
    ] = 300.0,
) -> None:
    """Keep the KV cache of workers that end, for the next ones.

    It outlives `serve`. Only processes of this user have the memory: it ends with the last of keeper and worker.
    """
    from services.cli.kv_keeper import run_keeper

    raise typer.Exit(run_keeper(path, seconds))


@app.command("doctor")
def _doctor() -> None:
    """Print what this machine has for serving.

    Also what would be slow on it or refused, and why.
    """
    from services.cli.doctor import doctor

    raise typer.Exit(doctor())


_add("plan", config.ServeConfig, "services.cli.plan", "model", config.OMITTED)


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
    command(config.ServeConfig, show, config.OMITTED, "model")
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
        return _refuse(error.format_message())
    except ConfigurationError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return int(status or 0)


def _refuse(reason: str) -> int:
    print(f"runahead: {' '.join(reason.split())}", file=sys.stderr)
    return USAGE_ERROR

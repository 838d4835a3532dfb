"""Command-line options from the fields of a configuration, so that flags, defaults and units are defined once."""

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.cli.command_help import ORDER, group_of, position
from services.cli.settings import ConfigurationError, Settings, choices, is_list, is_switch, merge, type_name
from services.config import flag
from services.config.descriptions import description

SHORT = {"input_file": "-i", "output_file": "-o", "base_url": "--url"}
"""Other forms of flags, by field."""

_CONFIG_FILE = typer.Option(
    "--config", help="YAML file with any of these settings.", metavar="FILE", rich_help_panel=ORDER[0]
)

M = TypeVar("M", bound=BaseModel)


def command(
    model: type[M], run: Callable[[Settings[M]], int], omitted: Collection[str] = (), positional: str | None = None
) -> Callable[..., None]:
    """Return a typer command with one option per field of `model`. It merges all origins and calls `run`.

    Args:
        omitted: fields without an option.
        positional: a field that may also be given as the command's only argument.
    """

    def invoke(**given: Any) -> None:
        file = given.pop("config")
        if positional is not None:
            name_argument(given, positional)
        given = {name: value for name, value in given.items() if value != []}
        raise typer.Exit(run(merge(model, given, file, omitted=omitted)))

    fields = sorted((name for name in model.model_fields if name not in omitted), key=position)
    parameters = [_option(name, model) for name in fields]
    if positional is not None:
        metavar = "URL" if positional == "base_url" else positional.upper()
        argument = typer.Argument(help=description(positional, model), metavar=metavar, show_default=False)
        parameters.insert(0, _keyword("argument", Annotated[str | None, argument]))
    parameters.append(_keyword("config", Annotated[Path | None, _CONFIG_FILE]))
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {}
    return invoke


def name_argument(given: dict[str, Any], positional: str) -> None:
    """Make the command's argument a value of the field `positional`. Raises: ConfigurationError, if it has another"""
    argument = given.pop("argument")
    if argument is not None:
        if given[positional] not in (None, argument):
            raise ConfigurationError(f"{argument!r} contradicts {flag(positional)} {given[positional]!r}")
        given[positional] = argument


def _option(name: str, model: type[BaseModel]) -> inspect.Parameter:
    """Make an option with text values: the model checks them, so that all origins give the same errors."""
    info = model.model_fields[name]
    kind: Any = bool if is_switch(info) else list[str] if is_list(info) else str
    text = f"{flag(name)}/{flag('no_' + name)}" if is_switch(info) else flag(name)
    default = info.get_default(call_default_factory=True, validated_data={})
    option = typer.Option(
        *((SHORT[name],) if name in SHORT else ()),
        text,
        help=f"{description(name, model)}{_shown(default)}",
        metavar=None if is_switch(info) else type_name(info),
        show_default=False,
        autocompletion=_completion(info),
        rich_help_panel=group_of(name, model),
    )
    return _keyword(name, Annotated[kind | None, option])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _completion(info: FieldInfo) -> Callable[[str], list[str]] | None:
    words = choices(info)
    return (lambda incomplete: [word for word in words if word.startswith(incomplete)]) if words else None


def _shown(default: object) -> str:
    if default in (None, "", []):
        return ""
    if isinstance(default, bool):
        default = "on" if default else "off"
    text = ", ".join(default) if isinstance(default, list) else default
    return f" [default: {text}]"

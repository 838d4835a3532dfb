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

OTHER_FORMS = {"input_file": "-i", "output_file": "-o", "output": "-o", "base_url": "--url"}
"""Other forms of flags, by field."""
OWN_FORMS = {"as_json": "--json"}
"""Flags that are not named after their field."""

_CONFIG_FILE = typer.Option(
    "--config", help="YAML file with any of these settings.", metavar="FILE", rich_help_panel=ORDER[0]
)

M = TypeVar("M", bound=BaseModel)


def command(
    model: type[M], run: Callable[[Settings[M]], int], omitted: Collection[str] = (), positional: Collection[str] = ()
) -> Callable[..., None]:
    """Return a typer command with one option per field of `model`. It merges all origins and calls `run`.

    Args:
        omitted: fields without an option.
        positional: fields that are arguments of the command, in their order. They may also be given as options, unless
            they are required or lists.
    """
    infos = {name: model.model_fields[name] for name in positional}
    arguments_only = {name for name, info in infos.items() if info.is_required() or is_list(info)}

    def invoke(**given: Any) -> None:
        file = given.pop("config", None)
        if passed_on := given.get("settings_argument"):  # flags of another command; the URL may precede them
            url, *flags = passed_on
            if not url.startswith("-"):
                given |= {"url_argument": url, "settings_argument": flags}
                name_argument(given, "url")
        for name in positional:
            name_argument(given, name)
        given = {name: value for name, value in given.items() if value != []}
        raise typer.Exit(run(merge(model, given, file, omitted=omitted)))

    fields = sorted((name for name in model.model_fields if name not in {*omitted, *arguments_only}), key=position)
    parameters = [_argument(name, model) for name in positional]
    parameters += [_option(name, model) for name in fields]
    if not any(map(is_list, infos.values())):  # flags of another command, whose file it is
        parameters.append(_keyword("config", Annotated[Path | None, _CONFIG_FILE]))
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {}
    return invoke


def name_argument(given: dict[str, Any], positional: str) -> None:
    """Make the command's argument a value of the field `positional`. Raises: ConfigurationError, if it has another"""
    argument = given.pop(f"{positional}_argument")
    if argument:
        if given.get(positional) not in (None, argument):
            raise ConfigurationError(f"{argument!r} contradicts {flag(positional)} {given[positional]!r}")
        given[positional] = argument


def _argument(name: str, model: type[BaseModel]) -> inspect.Parameter:
    info, metavar = model.model_fields[name], "URL" if name == "base_url" else name.upper()
    argument = typer.Argument(help=description(name, model), metavar=metavar, show_default=False)
    kind: Any = list[str] if is_list(info) else str
    return _keyword(f"{name}_argument", Annotated[kind | None, argument], info.is_required())


def _option(name: str, model: type[BaseModel]) -> inspect.Parameter:
    """Make an option with text values: the model checks them, so that all origins give the same errors."""
    info = model.model_fields[name]
    kind: Any = bool if is_switch(info) else list[str] if is_list(info) else str
    text = f"{flag(name)}/{flag('no_' + name)}" if is_switch(info) else flag(name)
    default = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
    option = typer.Option(
        *((OTHER_FORMS[name],) if name in OTHER_FORMS else ()),
        OWN_FORMS.get(name, text),
        help=f"{description(name, model)}{_shown(default)}",
        metavar=None if is_switch(info) else type_name(info),
        show_default=False,
        autocompletion=_completion(info),
        rich_help_panel=group_of(name, model),
    )
    return _keyword(name, Annotated[kind | None, option], info.is_required())


def _keyword(name: str, annotation: Any, is_required: bool = False) -> inspect.Parameter:
    default = inspect.Parameter.empty if is_required else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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

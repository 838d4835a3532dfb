"""Merges the origins of a configuration's values: flag > environment > file > default.

The configuration model alone checks the values, so that every origin gives the same errors.
"""

import difflib
import os
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from services.cli.flags_of_others import HINTS
from services.config.base import flag
from services.config.sizes import WITH_SUFFIX

PREFIX = "RUNAHEAD_"
VLLM_API_KEY = "VLLM_API_KEY"
"""Variable with an API key that is read, as by vLLM, if no other one is given."""
_OF_OTHERS = re.compile(
    r"SOAK\w*|FAILPOINT_\w+|PACED|SEED|VERSION|USER|ADDRESS|MODEL_DIR|FRONTENDS|(FRONTEND|SCHEDULER|WORKER)_MEMORY|(GRAFANA|PROMETHEUS)_PORT|"
    r"METRICS_(KEY_FILE|RETENTION)|(\w+_)?SERVICE_(HOST|PORT\w*)|(\w+_)?PORT_\d+_\w+|\w+_PORT"
)
"""Names behind the prefix of variables that are no settings: those of the tests, of the compose file, and those that
Kubernetes sets for a service whose name begins with "runahead"."""

M = TypeVar("M", bound=BaseModel)


class ConfigurationError(Exception):
    """A value or key cannot be used. The text is one line with its name, its origin and the allowed values."""


@contextmanager
def refusing(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Raise errors of these kinds within this context as a `ConfigurationError` with the same text behind `prefix`."""
    try:
        yield
    except kinds as error:
        raise ConfigurationError(f"{prefix}{error}") from None


@contextmanager
def refusing_os_errors(prefix: str, suffix: str = "") -> Iterator[None]:
    """Raise an OSError within this context as a `ConfigurationError` with the system's reason between these texts."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{prefix}{error.strerror or error}{suffix}") from None


def file_to_write(name: str, path: str) -> Path:
    """Return the value of the setting `name` as a path. Raises: ConfigurationError, if it cannot be that of a file"""
    file = Path(path)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigurationError(f"{flag(name)}: {file} is no path of a file in an existing directory")
    return file


def text_of_file(name: str, path: str) -> str:
    """Return the text of the file that the setting `name` gives. Raises: ConfigurationError"""
    try:
        return Path(os.path.expanduser(path)).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(f"{flag(name)}: cannot read {path}: {reason}") from None


@dataclass(frozen=True)
class Settings(Generic[M]):
    """A checked configuration and the origin of each value."""

    config: M
    origins: Mapping[str, str]
    """Field -> "flag --port", "environment RUNAHEAD_PORT", "file PATH" or "default"."""


def is_list(info: FieldInfo) -> bool:
    return typing.get_origin(info.annotation) is list


def is_switch(info: FieldInfo) -> bool:
    """Return whether the field is a boolean or an optional boolean."""
    return bool in (info.annotation, *typing.get_args(info.annotation))


def choices(info: FieldInfo) -> tuple[str, ...]:
    """Return the allowed words of a field, () if any value is allowed."""
    for kind in (info.annotation, *typing.get_args(info.annotation)):
        if typing.get_origin(kind) is typing.Literal:
            return typing.get_args(kind)
    return ()


def type_name(info: FieldInfo) -> str:
    """Return the placeholder of a value in the help: INTEGER, SIZE, FLOAT, TEXT or the choices."""
    marks = [mark for kind in typing.get_args(info.annotation) for mark in typing.get_args(kind)]
    if WITH_SUFFIX in (*info.metadata, *marks):
        return "SIZE"
    if typing.get_origin(info.annotation) is dict:
        return "TEXT"
    kinds = [info.annotation, *typing.get_args(info.annotation)]
    kinds = [typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind for kind in kinds]
    number = "INTEGER" if int in kinds else "FLOAT" if float in kinds else ""
    return "|".join([*choices(info), *([number] if number else [])]) or "TEXT"


def merge(
    model: type[M],
    flags: Mapping[str, object],
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    omitted: Collection[str] = (),
) -> Settings[M]:
    """Merge all origins into one configuration.

    Args:
        model: the configuration; its fields are the names that every origin uses.
        flags: values given on the command line; None means not given.
        file: YAML with kebab-case or snake_case keys.
        omitted: fields that no origin may set.

    Raises: ConfigurationError: an unknown key, an unusable value, an unreadable file.
    """
    fields = {name: info for name, info in model.model_fields.items() if name not in omitted}
    values: dict[str, object] = {}
    origins = dict.fromkeys(fields, "default")
    for found, origin in (
        (from_file(file, fields), "file {file}"),
        (_from_environment(environ, fields), "environment {variable}"),
        ({name: value for name, value in flags.items() if value is not None}, "flag {flag}"),
    ):
        values |= found
        for name in found:
            origins[name] = origin.format(file=file, variable=PREFIX + name.upper(), flag=flag(name))
    if "api_key" in fields and not values.keys() & {"api_key", "api_key_file"} and (key := environ.get(VLLM_API_KEY)):
        values["api_key"], origins["api_key"] = [key], f"environment {VLLM_API_KEY}"
    try:
        return Settings(model.model_validate(values), origins)
    except ValidationError as error:
        raise ConfigurationError(_describe(error, fields, origins)) from None


def from_file(file: Path | None, fields: Mapping[str, FieldInfo]) -> dict[str, object]:
    if file is None:
        return {}
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration file {file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no text, no date, too deep
        raise ConfigurationError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} must contain a mapping such as `port: 8000`")
    found: dict[str, object] = {}
    unknown = [str(key) for key in content if str(key).replace("-", "_") not in fields]
    if unknown:
        meant = (meant_key(key, fields) for key in unknown)
        raise ConfigurationError(f"{file}: unknown keys: {', '.join(map(''.join, zip(unknown, meant, strict=True)))}")
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in found:
            raise ConfigurationError(f"{file}: {key} is given twice")
        if isinstance(value, bool) and not is_switch(fields[name]):  # as a number it would be 1 or 0
            raise ConfigurationError(
                f"{file}: {key} is {str(value).lower()}, and this setting is no switch; give its value, "
                f"{type_name(fields[name])}"
            )
        found[name] = value
    return found


def meant_key(key: str, fields: Collection[str]) -> str:
    """Return a suggestion for a key that no field has, such as " (max-num-seqs?)", or ""."""
    written = key.lower().replace("-", "_")
    if (text := HINTS.get(flag(written))) is not None:
        return f" ({text})"
    similar = difflib.get_close_matches(written, fields, 1, 0.7)
    return f" ({similar[0].replace('_', '-')}?)" if similar else ""


def _from_environment(environ: Mapping[str, str], fields: Mapping[str, FieldInfo]) -> dict[str, object]:
    """Read the variables of all fields. An empty variable counts as unset; commas separate the items of a list.

    Raises: ConfigurationError, for a variable that belongs to no command
    """
    _check_names(environ, fields)
    found: dict[str, object] = {}
    for name, info in fields.items():
        if text := environ.get(PREFIX + name.upper()):
            found[name] = [part.strip() for part in text.split(",")] if is_list(info) else text
    return found


def _check_names(environ: Mapping[str, str], fields: Collection[str]) -> None:
    """Raises: ConfigurationError"""
    from services.config import EVERY_SETTING

    known = EVERY_SETTING.union(fields)
    for variable in environ:
        name = variable.removeprefix(PREFIX)
        if name == variable or name.lower() in known or _OF_OTHERS.fullmatch(name) or not environ[variable]:
            continue
        similar = difflib.get_close_matches(name.lower(), sorted(known), 1, 0.7)
        meant = f"; use {PREFIX}{similar[0].upper()}" if similar else "; remove it"
        raise ConfigurationError(f"environment {variable}: there is no such setting{meant}")


_OF_KEYS = ("missing", "extra_forbidden")
"""pydantic's types of problems that a key of an object has, and not a value."""


def _describe(error: ValidationError, fields: Mapping[str, FieldInfo], origins: Mapping[str, str]) -> str:
    """Return the first problem in one line, with the allowed values. Secrets are not repeated."""
    problem, *others = error.errors(include_url=False)
    message: Any = problem.get("ctx", {}).get("error") or problem["msg"]
    if not problem["loc"]:
        return str(message)
    if len(problem["loc"]) > 1 and problem["type"] in _OF_KEYS:
        message = f"{problem['loc'][-1]}: {_lower(str(message))}"
    for other in others:  # a value that matches none of several types has a problem for each
        same = (other["loc"][:1], other["input"]) == (problem["loc"][:1], problem["input"])
        if same and other["type"] not in _OF_KEYS:
            message = f"{message} or {str(other['msg']).removeprefix('Input should be ')}"
    name = str(problem["loc"][0])
    if name not in fields:
        return f"unknown setting {name}"
    text = f"{flag(name)}: {_lower(str(message))}"
    if name != "api_key":
        text += f", not {problem['input']!r}"
    return text if origins[name].startswith("flag") else f"{text} (from {origins[name]})"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]

"""Classes by name: built-in ones, and those that installed packages register as Python entry points."""

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any


class PluginError(ValueError):
    """The configured class cannot be used. The text is one line for the user."""


def find_class(
    flag: str, name: str, built_in: Mapping[str, type[Any]], group: str, members: Sequence[str]
) -> type[Any]:
    """Return the class of a name. A built-in name cannot be replaced.

    Args:
        flag: the setting that names it, for errors.
        group: of the entry points.
        members: names that the class must have.

    Raises: PluginError, if there is no such class, its entry point does not load, or it is not valid.
    """
    if name in built_in:
        return built_in[name]
    registered = entry_points(group=group)
    found = [*registered.select(name=name)]
    if not found:
        names = ", ".join([*built_in, *sorted(registered.names)])
        raise PluginError(f"{flag} {name}: there is no such policy; choose one of {names}")
    if len(found) > 1:
        packages = " and ".join(sorted(map(_package, found)))
        raise PluginError(f"{flag} {name}: {packages} register this name; uninstall all but one")
    point = found[0]
    where = f"{flag} {name}: {point.value} of {_package(point)}"
    try:
        loaded = point.load()
    except Exception as error:
        text = " ".join(str(error).split())
        raise PluginError(f"{where} does not load: {type(error).__name__}: {text}") from error
    if not isinstance(loaded, type) or not all(hasattr(loaded, member) for member in members):
        raise PluginError(f"{where} is no {flag[2:].replace('-', ' ')}: it must be a class with {', '.join(members)}")
    return loaded


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"

"""Typed access to config.json."""

import math
from pathlib import Path
from typing import Any

from services.checkpoint import read_json
from services.worker.runner import LoadError


class ConfigReader:
    """Typed access to the raw JSON. Errors name the key and its value."""

    def __init__(self, raw: dict[str, Any], where: str = "config.json") -> None:
        self.raw, self.where = raw, where

    def size(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.where}: {key!r} must be a whole number of at least 1, it is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise LoadError(f"{self.where}: {key!r} must be a number above 0, it is {value!r}")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        values = self.raw.get(key)
        if not isinstance(values, list) or not values:
            raise LoadError(f"{self.where}: {key!r} must be a list of numbers, it is {values!r:.80}")
        return tuple(ConfigReader({key: value}, self.where).number(key) for value in values)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise LoadError(f"{self.where}: {key!r} must be true or false, it is {value!r}")
        return bool(value)

    def refuse(self, key: str, *accepted: Any) -> None:
        """Raises: LoadError, if the key has a value other than null and those accepted."""
        if (value := self.raw.get(key)) is not None and value not in accepted:
            raise LoadError(f"{self.where}: {key!r} {value!r:.80} is not supported by the native backend")

    def by_layer(self, key: str, layers: int, default: list[Any], accepted: tuple[Any, ...]) -> list[Any]:
        """Return a list with one accepted value for each layer."""
        values = self.raw.get(key)
        values = default if values is None else values
        if not isinstance(values, list) or len(values) != layers or any(v not in accepted for v in values):
            names = " or ".join(map(str, accepted))
            raise LoadError(f"{self.where}: {key} must name {names} for each of {layers} layers")
        return values


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises: LoadError, CheckpointError"""
    if raw := read_json(path, "config.json"):
        return raw
    if (path / "adapter_config.json").is_file():
        raise LoadError(f"{path} is a LoRA adapter; adapters are not served, merge it into its base model first")
    raise LoadError(f"{path / 'config.json'} is missing; give a model directory in Hugging Face format")

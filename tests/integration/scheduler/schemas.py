"""Random JSON schemas, small enough that a random model finishes most of them."""

import random
from typing import Any

Schema = dict[str, Any]


class SchemaGenerator:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def schema(self) -> Schema:
        """Return a schema of an object or an array, often with definitions that it refers to."""
        names = [f"d{i}" for i in range(self._rng.randint(0, 2))]
        schema = self._rng.choice([self._object, self._object, self._array])(0, names)
        if names:
            schema["$defs"] = {name: self._any(2, []) for name in names}
        return schema

    def _any(self, depth: int, names: list[str]) -> Schema:
        kinds = [self._string, self._integer, self._number, self._enum, self._plain, self._const]
        if depth < 3:
            kinds += [self._object, self._array, self._either]
        if names and self._rng.random() < 0.2:
            return {"$ref": f"#/$defs/{self._rng.choice(names)}"}
        return self._rng.choice(kinds)(depth, names)

    def _object(self, depth: int, names: list[str]) -> Schema:
        keys = self._rng.sample(["id", "name", "größe", "a b", 'q"', "x", "tags", "on"], self._rng.randint(1, 4))
        required = [key for key in keys if self._rng.random() < 0.7]
        return {
            "type": "object",
            "properties": {key: self._any(depth + 1, names) for key in keys},
            "required": required,
            "additionalProperties": False,
        }

    def _array(self, depth: int, names: list[str]) -> Schema:
        least = self._rng.randint(0, 2)
        if self._rng.random() < 0.2:
            items = [self._any(depth + 1, names) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        most = least + self._rng.randint(0, 2)
        return {"type": "array", "items": self._any(depth + 1, names), "minItems": least, "maxItems": most}

    def _string(self, depth: int, names: list[str]) -> Schema:
        least = self._rng.randint(0, 3)
        lengths = {"type": "string", "minLength": least, "maxLength": least + self._rng.randint(0, 8)}
        formats = {"type": "string", "format": self._rng.choice(["date", "time", "uuid", "ipv4"])}
        patterns = {"type": "string", "pattern": self._rng.choice(["^[a-f]{2,4}$", "^x[0-9]+y$", "^(on|off)$"])}
        return self._rng.choice([lengths, lengths, formats, patterns])

    def _integer(self, depth: int, names: list[str]) -> Schema:
        least = self._rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": least, "maximum": least + self._rng.randint(0, 10_000)}

    def _number(self, depth: int, names: list[str]) -> Schema:
        least = self._rng.randint(-100, 100)
        return {"type": "number", "minimum": least, "exclusiveMaximum": least + self._rng.randint(1, 100)}

    def _enum(self, depth: int, names: list[str]) -> Schema:
        return {"enum": self._rng.sample([1, 2.5, "a", "b\n", "ü", None, True, False, [], {"k": 1}], 3)}

    def _const(self, depth: int, names: list[str]) -> Schema:
        return {"const": self._rng.choice(["fixed", 42, None, [1, "2"]])}

    def _plain(self, depth: int, names: list[str]) -> Schema:
        return {"type": self._rng.choice(["boolean", "null", ["boolean", "null"]])}

    def _either(self, depth: int, names: list[str]) -> Schema:
        return {"anyOf": [self._any(depth + 1, names) for _ in range(2)]}

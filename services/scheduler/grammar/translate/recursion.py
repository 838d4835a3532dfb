"""Detection of JSON schemas whose every match would be infinite, because each value requires another of its kind.

A schema has a finite match if every requirement has one, and a requirement has one if one of its alternatives has. The
schemas with a finite match are the least set that is closed under this rule; one pass over the requirements finds it.
"""

from collections import defaultdict, deque
from typing import Any

Schema = dict[str, Any]


def has_no_finite_match(root: Schema) -> bool:
    """References to a missing target are ignored."""
    num_open: dict[int, int] = {}
    """Schema -> number of its requirements that are not known to have a finite match."""
    dependents: defaultdict[int, list[list[int]]] = defaultdict(list)
    """Schema -> requirements that it meets once it has a finite match: [requiring schema, 1 while open]."""
    finite: deque[int] = deque()
    stack, seen = [root], {id(root)}
    while stack:
        schema = stack.pop()
        requirements = _requirements(schema, root)
        num_open[id(schema)] = len(requirements)
        if not requirements:
            finite.append(id(schema))
        for alternatives in requirements:
            requirement = [id(schema), 1]
            for other in alternatives:
                dependents[id(other)].append(requirement)
                if id(other) not in seen:
                    seen.add(id(other))
                    stack.append(other)
    while finite:
        for requirement in dependents[finite.popleft()]:
            schema_id, is_open = requirement
            requirement[1] = 0
            num_open[schema_id] -= is_open
            if is_open and not num_open[schema_id]:
                finite.append(schema_id)
    return num_open[id(root)] > 0


def _requirements(schema: Schema, root: Schema) -> list[list[Schema]]:
    """Return the requirements for a match. Each is a list of alternatives, one of which is enough."""
    requirements = [[part] for part in _schemas(schema.get("allOf"))]
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and alternatives and all(isinstance(a, dict) for a in alternatives):
            requirements.append(alternatives)
    target = _target(schema.get("$ref"), root)
    if target is not None:
        requirements.append([target])
    if "const" in schema or "enum" in schema:
        return requirements
    if schema.get("type") == "object":
        requirements += [[value] for value in _required_properties(schema)]
    if schema.get("type") == "array":
        requirements += [[item] for item in _required_items(schema)]
    return requirements


def _schemas(value: Any) -> list[Schema]:
    return [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []


def _required_properties(schema: Schema) -> list[Schema]:
    properties, others, names = (schema.get(k) for k in ("properties", "additionalProperties", "required"))
    known = properties if isinstance(properties, dict) else {}
    names = names if isinstance(names, list) else []
    values = [known.get(name, others) for name in names if isinstance(name, str)]
    return [value for value in values if isinstance(value, dict)]


def _required_items(schema: Schema) -> list[Schema]:
    first, rest, least = schema.get("prefixItems"), schema.get("items"), schema.get("minItems")
    least = least if isinstance(least, int) else 0
    first = first if isinstance(first, list) else []
    more = [rest] if least > len(first) else []
    return [item for item in [*first[: max(least, 0)], *more] if isinstance(item, dict)]


def _target(reference: Any, root: Schema) -> Schema | None:
    """Return the schema that a JSON pointer within `root` names, or None."""
    if not isinstance(reference, str) or reference[:1] != "#" or (len(reference) > 1 and reference[1] != "/"):
        return None
    at: Any = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        elif isinstance(at, dict):
            at = at.get(name)
        else:
            return None
    return at if isinstance(at, dict) else None

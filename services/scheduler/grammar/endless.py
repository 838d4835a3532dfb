"""Schemas that no text can match because each value would have to hold another of its kind, for ever.

A schema has an end if all that it demands has one, or one of several alternatives. So the schemas that have one are the
least set closed under that rule, found in one pass over who demands whom; what is left over has none.
"""

from collections import defaultdict, deque
from typing import Any

Schema = dict[str, Any]


def is_endless(root: Schema) -> bool:
    """Whether every value that matches would be infinite. References that lead nowhere are not judged here."""
    open_demands: dict[int, int] = {}
    """Schema -> demands of it that nothing with an end meets so far."""
    met_by: defaultdict[int, list[list[int]]] = defaultdict(list)
    """Schema -> demands that it meets once it has an end: [who demands, 1 while not met]."""
    ready: deque[int] = deque()
    stack, seen = [root], {id(root)}
    while stack:
        schema = stack.pop()
        demands = _demands(schema, root)
        open_demands[id(schema)] = len(demands)
        if not demands:
            ready.append(id(schema))
        for alternatives in demands:
            demand = [id(schema), 1]
            for other in alternatives:
                met_by[id(other)].append(demand)
                if id(other) not in seen:
                    seen.add(id(other))
                    stack.append(other)
    while ready:
        for demand in met_by[ready.popleft()]:
            who, is_open = demand
            demand[1] = 0
            open_demands[who] -= is_open
            if is_open and not open_demands[who]:
                ready.append(who)
    return open_demands[id(root)] > 0


def _demands(schema: Schema, root: Schema) -> list[list[Schema]]:
    """What a match must hold or be: for each demand, the schemas of which one is enough."""
    demands = [[part] for part in _schemas(schema.get("allOf"))]
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and alternatives and all(isinstance(a, dict) for a in alternatives):
            demands.append(alternatives)
    target = _target(schema.get("$ref"), root)
    if target is not None:
        demands.append([target])
    if "const" in schema or "enum" in schema:
        return demands
    if schema.get("type") == "object":
        demands += [[value] for value in _required(schema)]
    if schema.get("type") == "array":
        demands += [[item] for item in _items(schema)]
    return demands


def _schemas(value: Any) -> list[Schema]:
    return [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []


def _required(schema: Schema) -> list[Schema]:
    properties, others, names = (schema.get(k) for k in ("properties", "additionalProperties", "required"))
    known = properties if isinstance(properties, dict) else {}
    names = names if isinstance(names, list) else []
    values = [known.get(name, others) for name in names if isinstance(name, str)]
    return [value for value in values if isinstance(value, dict)]


def _items(schema: Schema) -> list[Schema]:
    first, rest, least = schema.get("prefixItems"), schema.get("items"), schema.get("minItems")
    least = least if isinstance(least, int) else 0
    first = first if isinstance(first, list) else []
    more = [rest] if least > len(first) else []
    return [item for item in [*first[: max(least, 0)], *more] if isinstance(item, dict)]


def _target(reference: Any, root: Schema) -> Schema | None:
    """What a JSON pointer within the schema leads to."""
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

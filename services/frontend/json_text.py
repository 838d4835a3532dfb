"""JSON as text, where clients' values are passed on."""

import json
from typing import Any


def json_text(value: Any) -> str:
    """Return a JSON value as compact text. Unlike msgspec's encoder it takes integers of any size.

    Raises: RecursionError, if the value is nested too deeply.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

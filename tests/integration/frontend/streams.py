"""Reads server-sent events, after a look at the frame around them."""

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The stream's JSON events."""
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]

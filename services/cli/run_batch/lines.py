"""Lines of batch files, in OpenAI's format."""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from services.frontend.openai.tasks import ANSWER_PATHS

ROUTES = ANSWER_PATHS - {"/v1/messages"}


@dataclass(frozen=True)
class BatchRequest:
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class BatchRefusal:
    """A line that cannot be sent."""

    custom_id: str | None
    code: str
    message: str


def parse(text: bytes, used: dict[str, int], number: int) -> BatchRequest | BatchRefusal:
    """Parse a line. `used`: number of the line of each custom_id so far; this line's is added."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BatchRefusal(None, "invalid_json_line", f"line {number} is not JSON: {error}")
    if not isinstance(content, dict):
        return BatchRefusal(None, "invalid_json_line", f"line {number} is not an object")
    name = content.get("custom_id")
    if not isinstance(name, str) or not name:
        return BatchRefusal(None, "missing_custom_id", f"line {number} has no custom_id")
    if name in used:
        return BatchRefusal(name, "duplicate_custom_id", f"line {used[name]} has the same custom_id")
    used[name] = number
    url, body = content.get("url"), content.get("body")
    if content.get("method", "POST") != "POST":
        return BatchRefusal(name, "invalid_method", "the method must be POST")
    if not isinstance(url, str) or (url := url.rstrip("/")) not in ROUTES:  # as the server reads it
        return BatchRefusal(name, "invalid_url", f"the url must be one of {', '.join(sorted(ROUTES))}")
    if not isinstance(body, dict):
        return BatchRefusal(name, "invalid_body", "the body must be an object")
    if body.get("stream"):
        return BatchRefusal(name, "invalid_body", "an answer in a batch cannot be a stream")
    return BatchRequest(name, url, json.dumps(body).encode())


def result_line(custom_id: str | None, response: Any, error: Any = None) -> str:
    """Return the line of an answer or of a refusal; an error of the API is an answer with its status."""
    content = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(content, ensure_ascii=False) + "\n"

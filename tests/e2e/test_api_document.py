"""The served OpenAPI document against the server: forbidden bodies are refused, and answers match their schemas."""

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi import checks

from tests.e2e.server import ServeProcess

pytestmark = pytest.mark.usefixtures("unharmed")
SOAK = bool(os.environ.get("RUNAHEAD_SOAK"))
PATIENCE = 30.0
"""Maximum time of an answer, seconds."""
EXAMPLES = 1000 if SOAK else 6
"""Bodies of each kind for an operation."""
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
MINIMAL = {
    "prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "tokens": [1], "max_tokens": 5,
    "query": "x", "documents": ["x"], "text_1": "x", "text_2": ["x", "y"],
}  # fmt: skip
POSTS = [
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/responses", "/score", "/rerank", "/pooling",
]  # fmt: skip


@pytest.fixture(scope="module")
def schema(sim: ServeProcess) -> Any:
    found = schemathesis.openapi.from_dict(httpx.get(f"{sim.url}/openapi.json").json())
    found.validate()
    return found


def simplified(body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Return the body with at most two optional fields in three of four cases, because many fields together mostly
    contradict each other; the required ones are then minimal values."""
    if data.draw(st.integers(0, 3)) == 0:
        return body
    optional = sorted(body.keys() - MINIMAL.keys() - {"model"})
    kept = data.draw(st.sets(st.sampled_from(optional), max_size=2)) if optional else set()
    return {name: value for name, value in body.items() if name in kept} | {
        name: MINIMAL[name] for name in body.keys() & MINIMAL.keys()
    }


def statuses_of(sim: ServeProcess, operation: APIOperation, mode: GenerationMode, examples: int) -> dict[int, int]:
    """Return the number of answers by status."""
    counted: dict[int, int] = {}
    more = [checks.negative_data_rejection] if mode is GenerationMode.NEGATIVE else []

    @settings(
        max_examples=examples, deadline=None, derandomize=not SOAK, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def check(case: schemathesis.Case, data: st.DataObject) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = simplified(case.body, data)
        response = case.call_and_validate(base_url=sim.url, timeout=PATIENCE, checks=[*CHECKS, *more])
        counted[response.status_code] = counted.get(response.status_code, 0) + 1

    check()
    return counted


@pytest.mark.parametrize("path", [path for path in POSTS if path != "/score"])  # its names exclude each other
def test_allowed_bodies_are_answered(sim: ServeProcess, schema: Any, path: str) -> None:
    counted = statuses_of(sim, schema[path]["POST"], GenerationMode.POSITIVE, EXAMPLES)
    assert sum(counted.values()) >= EXAMPLES // 2
    assert set(counted) <= {200, 400, 404}
    assert counted[200] > EXAMPLES // 8


@pytest.mark.parametrize("path", POSTS)
def test_forbidden_bodies_are_refused(sim: ServeProcess, schema: Any, path: str) -> None:
    counted = statuses_of(sim, schema[path]["POST"], GenerationMode.NEGATIVE, EXAMPLES)
    assert set(counted) <= {400, 404}  # 404: it names no model or response that exists, too
    assert counted[400] >= EXAMPLES // 2


def test_routes_without_a_body_are_answered(sim: ServeProcess, schema: Any) -> None:
    for path in ("/v1/models", "/version", "/metrics", "/livez", "/readyz", "/health", "/ping", "/load",
                 "/server_info", "/get_server_info", "/model_info", "/get_model_info",
                 "/tokenizer_info", "/debug/steps"):  # fmt: skip
        assert set(statuses_of(sim, schema[path]["GET"], GenerationMode.POSITIVE, 1)) == {200}

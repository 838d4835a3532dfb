"""Any values in any fields: the response is as documented, or an error with status 4xx; never 5xx."""

import json
import os
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from protocol.requests import Embedding, EnginePhase, EngineState, FinishReason, GenerateRequest, RequestOutputs
from protocol.sampling import Pooling
from services.config import FrontendConfig
from services.frontend.app import with_routes
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from tests.integration.frontend.declared import check_answer
from tests.integration.frontend.scripted import (
    CONTEXT,
    PATIENCE,
    VOCAB,
    Frontend,
    ScriptedScheduler,
    ended,
    scripted,
    tokens,
)
from tests.integration.frontend.test_logprobs import of_prompt, step
from tests.integration.frontend.test_refusals import error_of

SOAK = bool(os.environ.get("RUNAHEAD_SOAK"))
WIDTH = 8
STATE = EngineState(EnginePhase.READY, max_model_len=CONTEXT, vocab_size=VOCAB, hidden_size=WIDTH)
PATHS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
}


def seeded_outputs(request: GenerateRequest) -> list[RequestOutputs]:
    """Return the requested outputs, in tokens that depend only on the seed."""
    params, draw = request.params, random.Random(request.params.seed)
    if request.pooling is not Pooling.NONE:
        values = Embedding(request.number, np.ones(WIDTH, np.float32).tobytes())
        return [RequestOutputs(b"", b"", b"", embeddings=[values]), ended(request.number)]
    parts = [of_prompt(request)] if params.prompt_logprobs is not None else []
    for index in range(min(params.max_tokens, draw.randrange(1, 9))):
        token = draw.randrange(VOCAB)
        asked = params.logprobs is not None
        parts.append(step(request, index, token) if asked else tokens(request.number, [token], index))
    return [*parts, ended(request.number, draw.choice([FinishReason.STOP, FinishReason.LENGTH]))]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Frontend, ScriptedScheduler]]:
    with scripted(state=STATE, served_model_name=["demo"]) as pair:
        pair[1].script(seeded_outputs)
        yield pair


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 30), st.integers(-(2**70), 2**70), st.floats(-2, 3),
    st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=12),
    st.sampled_from(["float", "base64", "json_object", "auto", "required", "none", "user", "text", "demo", "\x00", ""]),
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(min_size=1, max_size=40) | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
    | st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3),
    "input": st.text(min_size=1, max_size=40) | st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=5),
    "messages": st.lists(
        st.builds(lambda role, text: {"role": role, "content": text},
                  st.sampled_from(["system", "user", "assistant"]), st.text(max_size=30)),
        min_size=1, max_size=3,
    ),
    "max_tokens": st.integers(1, 40),
    "max_completion_tokens": st.integers(1, 40),
    "n": st.integers(1, 4),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "temperature": st.floats(0, 3), "top_p": st.floats(0.01, 1), "top_k": st.integers(-1, 50), "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.text(max_size=4) | st.lists(st.text(min_size=1, max_size=4), max_size=4),
    "logprobs": st.booleans() | st.integers(0, 20), "top_logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20), "echo": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB).map(str), st.floats(-100, 100), max_size=5),
    "bad_words": st.lists(st.text(max_size=9), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, VOCAB), max_size=5),
    "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0, 3),
    "truncate_prompt_tokens": st.integers(-1, 30), "min_tokens": st.integers(0, 5), "priority": st.integers(-5, 5),
    "return_token_ids": st.booleans(), "skip_special_tokens": st.booleans(), "add_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(), "ignore_eos": st.booleans(), "dimensions": st.integers(1, WIDTH),
    "encoding_format": st.sampled_from(["float", "base64"]), "model": st.just("demo"),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "structured_outputs": st.sampled_from([{"regex": "[a-z]+"}, {"choice": ["a", "b"]}, {"json": {}}]),
}  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """Draw the required fields and up to eight more; most values are sensible."""
    fields = schemas()[PATHS[path].__name__]
    chosen = draw(st.lists(st.sampled_from(sorted(fields["properties"])), max_size=8, unique=True))
    nonsense = draw(st.integers(0, 3)) == 0
    body = {}
    for field in [*fields["required"], *chosen]:
        sensible = SENSIBLE.get(field, st.none())
        body[field] = draw(sensible | ANYTHING if nonsense else sensible)
    return body


@cache
def schemas() -> dict[str, Any]:
    return with_routes(FrontendConfig()).openapi()["components"]["schemas"]


@pytest.mark.parametrize("path", PATHS)
def test_any_values_in_any_fields(pair: tuple[Frontend, ScriptedScheduler], path: str) -> None:
    frontend, _ = pair
    counted = {200: 0, 400: 0, 404: 0}

    @settings(
        max_examples=1500 if SOAK else 150,
        deadline=None,
        derandomize=not SOAK,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(body=bodies(path))
    @example(body={"prompt": "Hi", "input": "0x"})  # the error quotes what looks like an address in memory
    def check(body: dict[str, Any]) -> None:
        response = client.post(path, content=json.dumps(body).encode())
        assert response.status_code in counted, (body, response.text)
        counted[response.status_code] += 1
        if response.status_code == 200:
            check_answer(path, bool(body.get("stream")), response.text)
        else:
            error_of(response, response.status_code)

    with httpx.Client(base_url=frontend.url, timeout=PATIENCE) as client:
        check()

    assert min(counted[200], counted[400]) > 10, counted
    assert "Traceback" not in frontend.log
    frontend.wait_ready()  # it is still connected to the scheduler

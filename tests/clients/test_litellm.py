"""LiteLLM, through the APIs of OpenAI and of Anthropic."""

from typing import Any

import litellm
import pytest

from tests.clients.conftest import RunningServer
from tests.clients.questions import ABOUT_ANN, MESSAGES, TOOL, WEATHER, City, Person


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def request_fields(request: pytest.FixtureRequest, server: RunningServer) -> dict[str, Any]:
    base = server.url if request.param == "anthropic" else f"{server.url}/v1"
    return {"model": f"{request.param}/{server.model}", "api_base": base, "api_key": "none", "max_tokens": 256}


def test_a_stream_has_the_text_of_the_whole_answer(request_fields: dict[str, Any]) -> None:
    request = request_fields | {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = litellm.completion(**request).choices[0].message.content
    chunks = [*litellm.completion(**request, stream=True)]
    assert len(chunks) > 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_tool_is_called(request_fields: dict[str, Any]) -> None:
    answer = litellm.completion(
        **request_fields, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == WEATHER["name"]
    City.model_validate_json(call.function.arguments)


def test_structured_output_is_parsed(request_fields: dict[str, Any]) -> None:
    answer = litellm.completion(**request_fields, messages=ABOUT_ANN, response_format=Person)
    Person.model_validate_json(answer.choices[0].message.content)

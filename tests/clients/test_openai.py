"""OpenAI's library for Python: chat completions, responses, completions and embeddings."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.clients.conftest import RunningServer
from tests.clients.questions import ABOUT_ANN, ASK, MESSAGES, TOOL, WEATHER, City, Person


@pytest.fixture
def client() -> Iterator[OpenAI]:
    with OpenAI() as opened:
        yield opened


def test_a_stream_has_the_text_of_the_whole_answer(client: OpenAI, server: RunningServer) -> None:
    request = {"model": server.model, "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**request)
    chunks = [*client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(chunks) > 2
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_tool_is_called_and_its_result_is_answered(client: OpenAI, server: RunningServer) -> None:
    request = {"model": server.model, "max_completion_tokens": 256, "temperature": 0, "tools": [TOOL]}
    request["parallel_tool_calls"] = False
    whole = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **request)
    said = whole.choices[0].message
    assert said.tool_calls
    call = said.tool_calls[0]
    assert call.function.name == WEATHER["name"]
    City.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(messages=MESSAGES, tool_choice="required", **request) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.tool_calls
    assert streamed.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answered = client.chat.completions.create(
        messages=[*MESSAGES, said, result], tool_choice="none", **request | {"max_completion_tokens": 8}
    )
    assert answered.choices[0].message.content


def test_structured_output_is_parsed(client: OpenAI, server: RunningServer) -> None:
    request = {"model": server.model, "messages": ABOUT_ANN, "response_format": Person, "temperature": 0}
    whole = client.chat.completions.parse(**request)
    assert isinstance(whole.choices[0].message.parsed, Person)
    with client.chat.completions.stream(**request) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole.choices[0].message.parsed


def test_responses(client: OpenAI, server: RunningServer) -> None:
    request = {"model": server.model, "input": ASK, "max_output_tokens": 8, "temperature": 0}
    first = client.responses.create(**request)
    with client.responses.stream(**request) as stream:
        events = [*stream]
        assert stream.get_final_response().output_text == first.output_text
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    second = client.responses.create(**request | {"input": "Why?"}, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert client.responses.input_items.list(second.id).data
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    tool = {"type": "function", "strict": False, **WEATHER}
    long = request | {"max_output_tokens": 256}
    called = client.responses.create(**long, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert called.output[-1].type == "function_call"
    City.model_validate_json(called.output[-1].arguments)
    assert isinstance(client.responses.parse(**long, text_format=Person).output_parsed, Person)


def test_other_routes_and_errors(client: OpenAI, server: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    text = client.completions.create(model=server.model, prompt="One, two,", max_tokens=4, logprobs=1)
    assert len(text.choices[0].logprobs.token_logprobs) == 4
    vectors = client.embeddings.create(model=server.model, input=["one", "two"])
    assert len(vectors.data) == 2
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model=server.model, messages=MESSAGES, top_p=7)

"""Anthropic's library for Python."""

import logging
import typing
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import MessageCountTokensParams, message_create_params

from tests.clients.conftest import RunningServer
from tests.clients.questions import ABOUT_ANN, MESSAGES, WEATHER, City, Person

TOOL: Any = {key: value for key, value in WEATHER.items() if key != "parameters"} | {
    "input_schema": WEATHER["parameters"]
}
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}
IGNORED = {"cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"}
"""Fields that are ignored with a notice: they change no answer."""


@pytest.fixture
def client() -> Iterator[Anthropic]:
    with Anthropic() as opened:
        yield opened


def test_a_stream_has_the_text_of_the_whole_answer(client: Anthropic, server: RunningServer) -> None:
    request: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        assert len([*stream.text_stream]) > 1
        assert stream.get_final_text() == whole.content[0].text
    counted = client.messages.count_tokens(model=server.model, messages=MESSAGES)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_a_tool_is_called_and_its_result_is_answered(client: Anthropic, server: RunningServer) -> None:
    request: Any = {"model": server.model, "max_tokens": 256, "tools": [TOOL]}
    whole = client.messages.create(messages=MESSAGES, tool_choice=ONE, **request)
    call = whole.content[0]
    assert (whole.stop_reason, call.type, call.name) == ("tool_use", "tool_use", WEATHER["name"])
    City.model_validate(call.input)
    with client.messages.stream(messages=MESSAGES, tool_choice=ONE, **request) as stream:
        City.model_validate(stream.get_final_message().content[0].input)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
    turn = [*MESSAGES, {"role": "assistant", "content": whole.content}, result]
    answered = client.messages.create(messages=turn, tool_choice={"type": "none"}, **request | {"max_tokens": 8})
    assert answered.content[0].type == "text"


def test_the_tool_runner_goes_on_without_threads(
    client: Anthropic, server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks for a thread first, and sends the whole conversation once that is refused."""
    cities = []

    @anthropic.beta_tool
    def get_weather(city: typing.Literal["Paris", "Rome"]) -> str:
        """Returns the weather of a city."""
        cities.append(city)
        return "sunny"

    caplog.set_level(logging.INFO, "anthropic")
    request: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": 256, "tool_choice": ONE}
    answers = [*client.beta.messages.tool_runner(tools=[get_weather], max_iterations=2, **request)]
    assert [answer.stop_reason for answer in answers] == ["tool_use"] * 2
    assert len(cities) == 2
    first, second = (answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) for answer in answers)
    assert first < second, "the whole conversation"
    assert caplog.text.count("continuing without a thread: unsupported=thread") == 1


def test_structured_output_is_parsed(client: Anthropic, server: RunningServer) -> None:
    request: Any = {"model": server.model, "messages": ABOUT_ANN, "max_tokens": 256, "output_format": Person}
    assert isinstance(client.messages.parse(**request).parsed_output, Person)


def test_errors_have_their_classes(client: Anthropic, server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=MESSAGES, max_tokens=8)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=server.model, messages=MESSAGES, max_tokens=0)


def test_every_field_of_a_body_is_known(server: RunningServer) -> None:
    """The library's fields are those of the server's document: served, or refused by name."""
    schemas = httpx.get(f"{server.url}/openapi.json", timeout=60).json()["components"]["schemas"]
    kinds = {
        "MessagesRequest": (
            message_create_params.MessageCreateParamsBase,
            message_create_params.MessageCreateParamsStreaming,
        ),
        "CountTokensRequest": (MessageCountTokensParams,),
    }
    for name, official in kinds.items():
        fields = {field for kind in official for field in typing.get_type_hints(kind)}
        assert fields - set(schemas[name]["properties"]) - IGNORED == set(), name


def test_models_are_listed(server: RunningServer) -> None:
    (model,) = Anthropic().models.list()
    assert (model.id, model.display_name) == (server.model, server.model)
    assert Anthropic().models.retrieve(model.id) == model

"""Pydantic AI, with the models for chat completions and for responses."""

import asyncio

import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolCallPart
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.tools import ToolDefinition

from tests.clients.conftest import RunningServer
from tests.clients.questions import ASK, WEATHER, City, Person

SETTINGS = {"temperature": 0, "max_tokens": 256}


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def model(request: pytest.FixtureRequest, server: RunningServer) -> Model:
    kind: type[OpenAIChatModel | OpenAIResponsesModel] = request.param
    return kind(server.model)


def test_a_stream_has_the_text_of_the_whole_answer(model: Model) -> None:
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 16})

    async def streamed() -> list[str]:
        async with agent.run_stream(ASK) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    parts = asyncio.run(streamed())
    assert len(parts) > 1
    assert "".join(parts) == agent.run_sync(ASK).output


def test_a_tool_is_called(model: Model) -> None:
    tool = ToolDefinition(
        name=WEATHER["name"], parameters_json_schema=WEATHER["parameters"], description=WEATHER["description"]
    )
    parameters = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    answer = model_request_sync(
        model, [ModelRequest.user_text_prompt(ASK)], model_settings=SETTINGS, model_request_parameters=parameters
    )
    call = answer.parts[-1]
    assert isinstance(call, ToolCallPart)
    City.model_validate(call.args_as_dict())


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_structured_output_is_parsed(model: Model, form: type[ToolOutput | NativeOutput]) -> None:
    agent = Agent(model, output_type=form(Person), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Ann is seven.").output, Person)

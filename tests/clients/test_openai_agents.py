"""OpenAI's agents, over responses and over chat completions."""

import asyncio
from typing import Literal

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients.conftest import RunningServer
from tests.clients.questions import ASK, Person

SETTINGS = ModelSettings(temperature=0, max_tokens=16)


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def model(request: pytest.FixtureRequest, server: RunningServer) -> Model:
    set_tracing_disabled(True)
    kind: type[OpenAIResponsesModel | OpenAIChatCompletionsModel] = request.param
    return kind(server.model, AsyncOpenAI())


def test_a_stream_has_the_text_of_the_whole_answer(model: Model) -> None:
    agent = Agent(name="a", instructions="Be brief.", model=model, model_settings=SETTINGS)

    async def answers() -> tuple[int, str, str]:
        result = Runner.run_streamed(agent, ASK)
        deltas = [
            event
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return len(deltas), result.final_output, (await Runner.run(agent, ASK)).final_output

    count, streamed, whole = asyncio.run(answers())
    assert count > 1
    assert streamed == whole


def test_a_tool_is_called_and_its_result_is_answered(model: Model) -> None:
    asked: list[str] = []

    @function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Returns the weather of a city."""
        asked.append(city)
        return "sunny"

    settings = ModelSettings(temperature=0, max_tokens=64, tool_choice="get_weather")
    agent = Agent(
        name="a", instructions="Be brief.", model=model, model_settings=settings, tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
    )  # fmt: skip
    result = asyncio.run(Runner.run(agent, "How is the weather in Rome?"))
    assert (len(asked), result.final_output) == (1, "sunny")


def test_structured_output_is_parsed(model: Model) -> None:
    settings = ModelSettings(temperature=0, max_tokens=256)
    agent = Agent(name="a", model=model, model_settings=settings, output_type=Person)
    assert isinstance(asyncio.run(Runner.run(agent, "Ann is seven.")).final_output, Person)

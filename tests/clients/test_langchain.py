"""LangChain with its package for OpenAI."""

from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.conftest import RunningServer
from tests.clients.questions import ASK, Person


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return f"sunny in {city}"


def test_a_stream_has_the_text_of_the_whole_answer(server: RunningServer) -> None:
    for responses in (False, True):
        chat = ChatOpenAI(model=server.model, temperature=0, max_tokens=8, use_responses_api=responses)
        chunks = [*chat.stream(ASK)]
        assert len(chunks) > 1
        assert "".join(chunk.text for chunk in chunks) == chat.invoke(ASK).text


def test_a_tool_is_called_and_its_result_is_answered(server: RunningServer) -> None:
    chat = ChatOpenAI(model=server.model, temperature=0, max_tokens=64)
    question = HumanMessage("How is the weather in Rome?")
    said = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke([question])
    (call,) = said.tool_calls
    assert call["name"] == "get_weather"
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat.invoke([question, said, result]).text


def test_structured_output_is_parsed(server: RunningServer) -> None:
    chat = ChatOpenAI(model=server.model, temperature=0, max_tokens=256)
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Person, method=method).invoke("Ann is seven."), Person)


def test_embeddings(server: RunningServer) -> None:
    embeddings = OpenAIEmbeddings(model=server.model, check_embedding_ctx_length=False)
    assert len(embeddings.embed_query("one")) > 0

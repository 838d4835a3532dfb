"""Chat answers with tools and reasoning: a whole answer equals the joined deltas of a stream."""

import threading
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.openai.answering import LONG_ANSWER, Answering
from services.frontend.openai.answers.chat_output import AnswerParser, ChatOutput
from services.frontend.openai.answers.chunk import Chunk
from services.frontend.openai.answers.dialects import ChatDialect
from services.frontend.openai.answers.usage import COUNTED_AT_ONCE, ReasoningCounter, UsageCounter
from services.frontend.openai.parameters.tool_choice import ToolChoice
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.openai.schemas.responses import Usage
from services.frontend.output_formats import TOOL_FORMATS as FORMATS
from services.frontend.output_formats import OutputFormats
from services.frontend.reasoning.think import ReasoningStart
from services.frontend.responses_api.answers import ResponseEvents, head_json
from services.frontend.responses_api.schemas import ResponsesRequest
from services.frontend.tools.json_calls import HermesParser

BODY = {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f"}}]}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def dialect(begins: ReasoningStart | None = None) -> ChatDialect:
    body = ChatRequest.model_validate(BODY)
    output = ChatOutput(body, OutputFormats(), ToolChoice.from_body(body, HermesParser, True), begins)
    return ChatDialect(output=output, reasoning=ReasoningCounter(len))


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the deltas of a stream as a client does."""
    message: dict[str, Any] = {"content": None, "reasoning": None}
    calls: list[dict[str, Any]] = []
    for choice in choices:
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name in ("content", "reasoning"):
            if delta.get(name):
                message[name] = (message[name] or "") + delta[name]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append(
                    {"id": call["id"], "type": call["type"], "name": call["function"]["name"], "arguments": ""}
                )
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return {**message, "calls": [(call["name"], call["arguments"]) for call in calls]}


def of_whole(message: dict[str, Any]) -> dict[str, Any]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return {"content": message["content"] or None, "reasoning": message.get("reasoning"), "calls": calls}


TEXTS = st.lists(st.sampled_from([CALL, "text", "\n", "<tool_call>oops", "</tool_call>", "<"]), max_size=6).map("".join)


@given(
    st.sampled_from([None, *ReasoningStart]),
    st.sampled_from(["", "<think>\nhm\n</think>\n", "hm</think>"]),
    TEXTS,
    st.data(),
)
def test_stream_and_whole_answer_are_equal(
    begins: ReasoningStart | None, thought: str, text: str, data: st.DataObject
) -> None:
    text = thought + text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6), "cuts"))
    chunks = [Chunk(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    chunks[-1].finish = "stop"
    streaming = dialect(begins)
    choices = [choice for chunk in chunks for choice in streaming.deltas(3, chunk)]
    whole = dialect(begins).choice(3, Chunk(text, finish="stop"))
    assert joined(choices) == {"reasoning": None} | of_whole(whole["message"])
    finishes = [choice["finish_reason"] for choice in choices]
    assert finishes == [None] * (len(choices) - 1) + [whole["finish_reason"]]
    assert (whole["finish_reason"] == "tool_calls") == bool(whole["message"].get("tool_calls"))


def test_parts_of_a_later_call_have_its_index() -> None:
    streaming = dialect()
    choices = [choice for letter in 2 * CALL for choice in streaming.deltas(0, Chunk(letter))]
    assert joined(choices)["calls"] == 2 * of_whole(dialect().choice(0, Chunk(CALL, finish="stop"))["message"])["calls"]


def test_tokens_of_reasoning_are_counted_while_it_is_streamed() -> None:
    counted = list[str]()
    streaming = dialect(ReasoningStart.INSIDE)
    streaming.reasoning.count_tokens = lambda text: counted.append(text) or len(text)
    head = head_json(ResponsesRequest.model_validate({"input": "x"}), "resp_0", "demo", False, 0)
    parser = AnswerParser(streaming.output, eager=True)
    response = ResponseEvents(head, parser, UsageCounter(), streaming.reasoning.count_tokens)
    for _ in range(3 * COUNTED_AT_ONCE):
        for choice in (0, 1):
            streaming.deltas(choice, Chunk("ab"[choice]))
        response.push(Chunk("a"))
    assert counted == [text * COUNTED_AT_ONCE for text in "aba"] * 3
    streaming.deltas(0, Chunk("rest", finish="stop"))
    assert counted.pop() == "rest"
    usage: Usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    assert streaming.counted(usage)["completion_tokens_details"] == {"reasoning_tokens": 6 * COUNTED_AT_ONCE + 4}
    response.push(Chunk("", finish="stop"))
    assert response.to_json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 3 * COUNTED_AT_ONCE}


async def test_long_answer_that_is_not_streamed_is_parsed_on_another_thread() -> None:
    here = threading.get_ident()
    assert await Answering.built([Chunk("short")], threading.get_ident) == here
    assert await Answering.built([Chunk("x" * LONG_ANSWER)], threading.get_ident) != here


def test_token_ids_are_sent_while_their_text_is_held_back() -> None:
    (held,) = dialect().deltas(0, Chunk("<tool", token_ids=[5, 6]))
    assert (held["delta"], held["token_ids"]) == ({}, [5, 6])


def test_finish_reason_of_an_answer_cut_off_after_a_call_is_length() -> None:
    whole = dialect().choice(0, Chunk(CALL + "And", finish="length"))
    assert (whole["finish_reason"], whole["message"]["content"]) == ("length", "And")
    assert len(whole["message"]["tool_calls"]) == 1


def test_call_that_is_cut_off_is_content_of_a_whole_answer_and_its_returned_part_stays_in_a_stream() -> None:
    cut = Chunk(CALL[: CALL.index("1")], finish="length")
    whole, (streamed,) = dialect().choice(0, cut), dialect().deltas(0, cut)
    assert of_whole(whole["message"]) == {"content": cut.text, "reasoning": None, "calls": []}
    assert joined([streamed])["calls"] == [("f", '{"a": ')]
    assert whole["finish_reason"] == streamed["finish_reason"] == "length"


def test_every_format_lists_its_markers() -> None:
    """The list decides whether special tokens stay in the text."""
    assert all(parser.markers for parser in FORMATS.values())

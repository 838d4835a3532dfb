"""The default model behind the API: chat, streams, tools, structured output, embeddings, lost workers, ranks.

In float32, where an answer does not depend on the batch. One server of one rank for all tests; its cache holds few
requests.
"""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from services.checkpoint.default_model import NAME, packaged_model
from tests.e2e.server import ServeProcess, is_alive, serving, wait_until

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="deploy/model.txt is not installed")
COMMON = "--dtype=float32", "--max-model-len=384", "--max-num-seqs=8"
SETTINGS = (
    *COMMON, f"--kv-cache-memory-bytes={20 << 20}",
    '--speculative-config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}',
)  # fmt: skip
"""Not adaptive: on a busy machine the measured times may speak against drafts."""
CROWD = range(1, 7)
"""Prompts of streams that need more blocks together than the cache has."""
TOKENS = 96
TIE = 1e-3
"""Difference of log-probabilities below which ranks, whose sums have another order, may choose another token."""
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def optional(number: int) -> dict[str, Any]:
    """Return the response format of an object with so many optional properties, and a required one behind them."""
    named = {f"property_{index}": {"type": "string"} for index in range(number + 1)}
    last = [f"property_{number}"]
    schema = {"type": "object", "properties": named, "required": last, "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "many", "schema": schema}}


@pytest.fixture(scope="module")
def smollm2() -> Iterator[ServeProcess]:
    with serving(*SETTINGS, RUNAHEAD_MODEL="") as running:
        yield running


@pytest.fixture(scope="module")
def ask(smollm2: ServeProcess) -> Iterator[OpenAI]:
    with smollm2.client() as client:
        yield client


def test_chat_answers_and_its_stream_is_the_same(ask: OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
    whole = ask.chat.completions.create(**asked).choices[0]
    assert "Paris" in (whole.message.content or "")
    pieces = [chunk.choices[0] for chunk in ask.chat.completions.create(**asked, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].finish_reason == whole.finish_reason


def called(a: int, b: int) -> str:
    """Return a call in the form that the parser `hermes` reads."""
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def test_a_call_that_the_model_writes_by_itself_is_parsed(ask: OpenAI) -> None:
    """Its chat template does not show tools, so the conversation has earlier calls as examples."""
    turns: list[tuple[str, str]] = [
        ("system", "Answer with a call of the tool add."),
        ("user", "Add 1 and 4."), ("assistant", called(1, 4)),
        ("user", "Add 7 and 5."), ("assistant", called(7, 5)),
        ("user", "Add 2 and 3."),
    ]  # fmt: skip
    asked: dict[str, Any] = {
        "model": NAME, "messages": [{"role": role, "content": text} for role, text in turns], "temperature": 0,
        "max_tokens": 48,
    }  # fmt: skip
    written = ask.chat.completions.create(**asked).choices[0].message.content or ""
    assert written == called(2, 3)
    asked |= {"tools": [ADD], "tool_choice": "auto"}
    answer = ask.chat.completions.create(**asked).choices[0]
    (call,) = answer.message.tool_calls or []
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    deltas = [chunk.choices[0].delta for chunk in ask.chat.completions.create(**asked, stream=True)]
    pieces = [piece.function for delta in deltas for piece in delta.tool_calls or [] if piece.function]
    assert "".join(piece.name or "" for piece in pieces) == "add"
    assert "".join(piece.arguments or "" for piece in pieces) == call.function.arguments


def test_a_schema_of_many_optional_properties_is_followed_or_refused_before_it_begins(ask: OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
    answer = ask.chat.completions.create(**asked, response_format=optional(1_000)).choices[0]
    assert re.match(r'\{\s*"property_\d', answer.message.content or "")
    with pytest.raises(BadRequestError, match="2,501 optional properties, at most 2,500"):
        ask.chat.completions.create(**asked, response_format=optional(2_501))


def test_embeddings_differ_by_meaning(ask: OpenAI) -> None:
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose in March."]
    cat, kitten, rates = (item.embedding for item in ask.embeddings.create(model=NAME, input=texts).data)
    assert len(cat) == 576
    near, far = (sum(x * y for x, y in zip(cat, other, strict=True)) for other in (kitten, rates))
    assert near > far


def test_drafts_from_a_repetitive_prompt_are_accepted(smollm2: ServeProcess, ask: OpenAI) -> None:
    ask.completions.create(
        model=NAME, prompt="one two three four five six seven eight nine ten\n" * 12 + "one two", temperature=0,
        max_tokens=150, extra_body={"ignore_eos": True},
    )  # fmt: skip
    wait_until(lambda: smollm2.metric("spec_decode_num_accepted_tokens_total") > 20, "the totals are reported")


async def streamed(client: AsyncOpenAI, number: int, arrived: asyncio.Event | None = None) -> str:
    """Return the text of a stream of `TOKENS` tokens. `arrived` is set when a quarter of them is there."""
    stream = await client.completions.create(
        model=NAME, prompt=f"{number} facts about the number {number}:", temperature=0, max_tokens=TOKENS,
        stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    text, usage = [], 0
    async for chunk in stream:
        text += [choice.text for choice in chunk.choices]
        usage = chunk.usage.completion_tokens if chunk.usage else 0
        if arrived is not None and len(text) > TOKENS // 4:
            arrived.set()
    assert usage == TOKENS
    return "".join(text)


async def test_preemption_and_a_killed_worker_change_no_answer(smollm2: ServeProcess) -> None:
    async with smollm2.async_client() as client:
        alone = [await streamed(client, number) for number in (CROWD[0], CROWD[-1])]
        before, victim, arrived = smollm2.metric("num_preemptions_total"), smollm2.services["worker"], asyncio.Event()
        streams = [asyncio.create_task(streamed(client, number, arrived)) for number in CROWD]
        await arrived.wait()
        assert not any(stream.done() for stream in streams)
        victim.send_signal(signal.SIGKILL)
        together = await asyncio.gather(*streams)
        assert [together[0], together[-1]] == alone
    wait_until(lambda: smollm2.metric("num_preemptions_total") > before, "requests are preempted")
    assert not is_alive(victim)
    smollm2.find_services()
    assert is_alive(smollm2.services["worker"])


def test_two_ranks_with_unequal_shares_give_the_tokens_of_one(ask: OpenAI) -> None:
    """Two and one of the three KV heads. The answers are equal up to the first tie of two tokens."""
    asked: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 32, "logprobs": 2}
    prompts = [f"{number} facts about the number {number}:" for number in CROWD]
    alone = ask.completions.create(prompt=prompts, **asked).choices
    with serving(*COMMON, "--tensor-parallel-size=2", RUNAHEAD_MODEL="") as two, two.client() as client:
        assert two.metric("num_workers") == 2
        for one, other in zip(alone, client.completions.create(prompt=prompts, **asked).choices, strict=True):
            ours, theirs = one.logprobs.tokens or [], other.logprobs.tokens or []
            tops = [sorted(top.values()) for top in one.logprobs.top_logprobs or []]
            ties = [at for at, values in enumerate(tops) if values[-1] - values[-2] < TIE]
            sure = min(ties, default=len(ours))
            assert sure > 0
            assert ours[:sure] == theirs[:sure]

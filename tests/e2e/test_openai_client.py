"""The official client with the demo model: completions, chat, streams, ends and errors."""

import openai
import pytest
from openai import OpenAI

from tests.e2e.server import ServeProcess, wait_until

PROMPT = "The os module provides"
IGNORE_EOS = {"ignore_eos": True}
"""Extra body for an output of exactly max_tokens tokens."""


def test_completion_and_its_stream_are_equal(client: OpenAI, model: str) -> None:
    request = {"model": model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0.0}
    whole = client.completions.create(**request)
    stream = client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert whole.choices[0].text.strip()
    assert len(chunks) > 1


def test_chat_and_its_stream_are_equal(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    request = {"model": model, "messages": messages, "max_completion_tokens": 48, "temperature": 0.0}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert text.strip()


def test_usage_counts_prompt_and_output(client: OpenAI, model: str) -> None:
    prompt = list(range(300, 337))
    usage = client.completions.create(model=model, prompt=prompt, max_tokens=21, extra_body=IGNORE_EOS).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 21, 58)


def test_finish_reason_is_length_at_max_tokens_and_stop_at_eos(client: OpenAI, model: str) -> None:
    limited = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, extra_body=IGNORE_EOS)
    assert (limited.choices[0].finish_reason, limited.usage.completion_tokens) == ("length", 5)
    ended = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is a list?"}], temperature=0.0, max_tokens=1500
    )
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage.completion_tokens < 1500


@pytest.mark.parametrize("stream", [False, True])
def test_output_ends_before_a_stop_string(client: OpenAI, model: str, stream: bool) -> None:
    request = {"model": model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0.0}
    text = client.completions.create(**request).choices[0].text
    stop = text[len(text) // 2 :][:4]
    answer = client.completions.create(**request, stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_output_ends_at_a_stop_token_which_is_reported(client: OpenAI, model: str) -> None:
    common = {"stop_token_ids": list(range(6, 134)), **IGNORE_EOS}  # single characters
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=64, temperature=0.0, extra_body=common)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason in common["stop_token_ids"]
    assert answer.usage.completion_tokens < 64


def test_min_tokens_delays_the_end(client: OpenAI, model: str) -> None:
    request = {
        "model": model,
        "messages": [{"role": "user", "content": "What is a list?"}],
        "temperature": 0.0,
        "max_tokens": 400,
    }
    length = client.chat.completions.create(**request).usage.completion_tokens
    more = client.chat.completions.create(**request, extra_body={"min_tokens": length + 10})
    assert more.usage.completion_tokens >= length + 10


def test_equal_seeds_give_equal_samples(client: OpenAI, model: str) -> None:
    texts = [
        client.completions.create(model=model, prompt=PROMPT, max_tokens=32, temperature=1.0, seed=seed).choices[0].text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_several_prompts_give_choices_in_order(client: OpenAI, model: str) -> None:
    prompts = [PROMPT, "A list is", "Return the"]
    request = {"model": model, "max_tokens": 12, "temperature": 0.0}
    together = client.completions.create(prompt=prompts, **request).choices
    assert [choice.index for choice in together] == [0, 1, 2]
    alone = [client.completions.create(prompt=prompt, **request).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together] == alone


def test_unknown_model_is_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt=PROMPT)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt": ""}, ["prompt"]),
        ({"prompt": [70_000]}, ["70000"]),
        ({"prompt": [300] * 5000}, ["5000", "2048"]),
        ({"prompt": PROMPT, "temperature": -1.0}, ["temperature"]),
        ({"prompt": PROMPT, "max_tokens": 0}, ["max_tokens"]),
        ({"prompt": PROMPT, "extra_body": {"top_p": "much"}}, ["top_p"]),
        ({"prompt": PROMPT, "extra_body": {"use_beam_search": True}}, ["use_beam_search"]),
        ({"prompt": PROMPT, "extra_body": {"guided_json": {}}}, ["guided_json"]),
    ],
)
def test_invalid_request_is_400_with_the_reason(
    client: OpenAI, model: str, values: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, **values)
    assert refused.value.body["message"]
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_unknown_field_is_ignored_and_named(client: OpenAI, model: str) -> None:
    answer = client.completions.with_raw_response.create(
        model=model, prompt=PROMPT, max_tokens=2, extra_body={"beam_width": 4}
    )
    assert answer.headers["x-ignored-parameters"] == "beam_width"
    assert answer.parse().choices[0].text


def test_closed_stream_frees_the_engine(server: ServeProcess, client: OpenAI, model: str) -> None:
    wait_until(lambda: server.metric("num_requests_running") == 0, "the engine is idle")
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=2000, stream=True, extra_body=IGNORE_EOS)
    next(iter(stream))
    wait_until(lambda: server.metric("num_requests_running") == 1, "the request runs")
    stream.close()
    wait_until(lambda: server.metric("num_requests_running") == 0, "the request has ended")
    wait_until(lambda: server.metric("kv_cache_usage_perc") == 0, "its blocks are free")
    assert client.completions.create(model=model, prompt=PROMPT, max_tokens=3).choices


def test_probes_are_answered(server: ServeProcess) -> None:
    assert [server.get(path)[0] for path in ("/health", "/livez", "/readyz", "/metrics")] == [200] * 4

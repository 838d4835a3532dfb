"""The official client with the demo model: completions, chat, streams and ends. Errors are in test_abuse.py."""

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


def test_finish_reason_is_length_at_max_tokens_and_stop_at_eos(client: OpenAI, model: str) -> None:
    limited = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, extra_body=IGNORE_EOS)
    assert (limited.choices[0].finish_reason, limited.usage.completion_tokens) == ("length", 5)
    ended = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is a list?"}], temperature=0.0, max_tokens=1500
    )
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage.completion_tokens < 1500


def test_equal_seeds_give_equal_samples(client: OpenAI, model: str) -> None:
    texts = [
        client.completions.create(model=model, prompt=PROMPT, max_tokens=32, temperature=1.0, seed=seed).choices[0].text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_closed_stream_frees_the_engine(server: ServeProcess, client: OpenAI, model: str) -> None:
    wait_until(lambda: server.metric("num_requests_running") == 0, "the engine is idle")
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=2000, stream=True, extra_body=IGNORE_EOS)
    next(iter(stream))
    wait_until(lambda: server.metric("num_requests_running") == 1, "the request runs")
    stream.close()
    wait_until(lambda: server.metric("num_requests_running") == 0, "the request has ended")
    wait_until(lambda: server.metric("kv_cache_usage_perc") == 0, "its blocks are free")
    assert client.completions.create(model=model, prompt=PROMPT, max_tokens=3).choices

"""The official client against the demo model."""

import openai
import pytest
from openai import OpenAI

from tests.e2e.server import Server, wait_until

PROMPT = "The os module provides"
ENDLESS = {"ignore_eos": True}
"""Extra body: exactly max_tokens tokens, whatever the model says."""


def test_completion_and_its_stream_say_the_same(client: OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0.0}
    whole = client.completions.create(**asked)
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert whole.choices[0].text.strip()
    assert len(chunks) > 1


def test_chat_and_its_stream_say_the_same(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    asked = {"model": model, "messages": messages, "max_completion_tokens": 48, "temperature": 0.0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert text.strip()


def test_usage_counts_prompt_and_output(client: OpenAI, model: str) -> None:
    prompt = list(range(300, 337))
    usage = client.completions.create(model=model, prompt=prompt, max_tokens=21, extra_body=ENDLESS).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 21, 58)


def test_length_ends_at_max_tokens_and_eos_ends_by_itself(client: OpenAI, model: str) -> None:
    cut = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, extra_body=ENDLESS)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 5)
    ended = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a list?"}],
        temperature=0.0,
        max_tokens=1500,
    )
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage.completion_tokens < 1500


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_before_the_match(client: OpenAI, model: str, stream: bool) -> None:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0.0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 :][:4]
    answer = client.completions.create(**asked, stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_stop_token_ends_and_is_named(client: OpenAI, model: str) -> None:
    common = {"stop_token_ids": list(range(6, 134)), **ENDLESS}  # single characters
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=64, temperature=0.0, extra_body=common
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason in common["stop_token_ids"]
    assert answer.usage.completion_tokens < 64


def test_min_tokens_holds_the_end_back(client: OpenAI, model: str) -> None:
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "What is a list?"}],
        "temperature": 0.0,
        "max_tokens": 400,
    }
    length = client.chat.completions.create(**asked).usage.completion_tokens
    more = client.chat.completions.create(**asked, extra_body={"min_tokens": length + 10})
    assert more.usage.completion_tokens >= length + 10


def test_seed_repeats_a_sample_and_another_does_not(client: OpenAI, model: str) -> None:
    texts = [
        client.completions.create(model=model, prompt=PROMPT, max_tokens=32, temperature=1.0, seed=seed)
        .choices[0]
        .text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_several_prompts_give_choices_in_their_order(client: OpenAI, model: str) -> None:
    prompts = [PROMPT, "A list is", "Return the"]
    asked = {"model": model, "max_tokens": 12, "temperature": 0.0}
    together = client.completions.create(prompt=prompts, **asked).choices
    assert [choice.index for choice in together] == [0, 1, 2]
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]
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
        ({"prompt": PROMPT, "extra_body": {"beam_width": 4}}, ["beam_width"]),
        ({"prompt": PROMPT, "extra_body": {"guided_json": {}}}, ["guided_json"]),
    ],
)
def test_bad_request_is_400_and_names_the_matter(
    client: OpenAI, model: str, values: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, **values)
    assert refused.value.body["message"]
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b'{"model": 1}', b"\xff", b"[" * 100_000])
def test_malformed_body_is_an_error_body_of_openai_s_shape(server: Server, body: bytes) -> None:
    import json
    import urllib.error
    import urllib.request

    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 400
    assert json.loads(refused.value.read())["error"]["message"]


def test_closed_stream_frees_the_engine(server: Server, client: OpenAI, model: str) -> None:
    wait_until(lambda: server.metric("num_requests_running") == 0, "the engine is idle")
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=2000, stream=True, extra_body=ENDLESS
    )
    next(iter(stream))
    wait_until(lambda: server.metric("num_requests_running") == 1, "the request is seen running")
    stream.close()
    wait_until(lambda: server.metric("num_requests_running") == 0, "the request is gone")
    wait_until(lambda: server.metric("kv_cache_usage_perc") == 0, "its blocks are free")
    assert client.completions.create(model=model, prompt=PROMPT, max_tokens=3).choices


def test_probes_answer(server: Server) -> None:
    assert [server.get(path)[0] for path in ("/health", "/livez", "/readyz", "/metrics")] == [200] * 4

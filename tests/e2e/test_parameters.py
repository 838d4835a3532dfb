"""Each request parameter with the official client and the demo model: it changes the output as documented."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Completion

from tests.e2e.server import PATIENCE, ServeProcess

PROMPT = "class Queue:"
USER = {"role": "user", "content": "What is a list?"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Completions:
    """Requests completions: by default greedy ones of one prompt."""

    def __init__(self, client: OpenAI, model: str) -> None:
        self.client = client
        self.model = model

    def __call__(self, prompt: Any = PROMPT, **fields: Any) -> Completion:
        """Request a completion. Fields that are not in OpenAI's API must be in `extra_body`."""
        request = {"max_tokens": 16, "temperature": 0.0, **fields}
        return self.client.completions.create(model=self.model, prompt=prompt, **request)

    def text(self, prompt: Any = PROMPT, **fields: Any) -> str:
        return self(prompt, **fields).choices[0].text

    def ids(self, prompt: Any = PROMPT, **fields: Any) -> list[int]:
        extra = {**fields.pop("extra_body", {}), "return_token_ids": True}
        return self(prompt, extra_body=extra, **fields).choices[0].token_ids


@pytest.fixture
def complete(client: OpenAI, model: str) -> Completions:
    return Completions(client, model)


def encoded(server: ServeProcess, text: str, add_special_tokens: bool = True) -> list[int]:
    body = {"prompt": text, "add_special_tokens": add_special_tokens}
    return httpx.post(f"{server.url}/tokenize", json=body, timeout=PATIENCE).json()["tokens"]


def test_penalties_change_repetition(complete: Completions) -> None:
    def variety(repetition_penalty: float = 1.0, **fields: float) -> int:
        extra = {"ignore_eos": True, "repetition_penalty": repetition_penalty}
        return len(set(complete.ids(max_tokens=32, extra_body=extra, **fields)))

    plain = variety()
    assert plain < 32, "the output without a penalty does not repeat itself"
    assert variety(presence_penalty=2.0) > plain
    assert variety(frequency_penalty=2.0) > plain
    assert variety(repetition_penalty=2.0) > plain
    assert variety(presence_penalty=-2.0) < plain


def test_logit_bias_forbids_and_forces_tokens(complete: Completions) -> None:
    plain = complete.ids()
    without = complete.ids(logit_bias={str(plain[0]): -100})
    assert plain[0] not in without
    assert set(complete.ids(logit_bias={"400": 100}, max_tokens=8)) == {400}


def test_bad_words_do_not_occur(complete: Completions, server: ServeProcess) -> None:
    plain = complete.ids()
    words = re.findall("[a-z]{2,}", complete.text())
    found = [encoded(server, form, False) for word in words for form in (word, f" {word}")]
    token, word = next((ids[0], words[i // 2]) for i, ids in enumerate(found) if len(ids) == 1 and ids[0] in plain)
    changed = complete.ids(extra_body={"bad_words": [word]})
    assert token in plain
    assert token not in changed


def test_only_allowed_tokens_occur(complete: Completions) -> None:
    allowed = [300, 310, 320]
    ids = complete.ids(max_tokens=12, extra_body={"allowed_token_ids": allowed, "ignore_eos": True})
    assert set(ids) <= set(allowed)


def test_sampling_from_the_most_likely_token_is_greedy(complete: Completions) -> None:
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
    greedy = complete.text(max_tokens=8)
    assert complete.text(**sampled) != greedy
    restrictions: list[dict[str, Any]] = [
        {"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}},
    ]  # fmt: skip
    assert [complete.text(**sampled, **restriction) for restriction in restrictions] == [greedy] * 3


def test_n_choices_equal_those_of_consecutive_seeds(complete: Completions) -> None:
    sampled = {"temperature": 1.0, "n": 3, "seed": 2**32, "max_tokens": 8}
    together = complete(**sampled)
    alone = [complete.text(temperature=1.0, seed=2**32 + i, max_tokens=8) for i in range(3)]
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) == 3
    prompt = complete().usage.prompt_tokens
    assert together.usage.prompt_tokens == prompt
    assert together.usage.completion_tokens <= 3 * 8
    streamed = ["", "", ""]
    for chunk in complete(**sampled, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone


def test_log_probabilities_of_an_output_equal_those_as_a_prompt(complete: Completions, server: ServeProcess) -> None:
    """The log-probability of a token does not depend on whether it was sampled or is part of the prompt."""
    prompt = encoded(server, PROMPT)
    answer = complete(prompt, logprobs=3, max_tokens=12, extra_body={"return_token_ids": True}).choices[0]
    found = answer.logprobs
    assert "".join(found.tokens) == answer.text
    assert all(lp == max(top.values()) for lp, top in zip(found.token_logprobs, found.top_logprobs, strict=True))
    assert all(len(top) == 3 for top in found.top_logprobs), "the most likely token is not the greedy one"
    sequence = [*prompt, *answer.token_ids]
    echoed = complete(sequence, echo=True, logprobs=3, max_tokens=0).choices[0].logprobs
    assert echoed.token_logprobs[0] is None
    assert echoed.token_logprobs[len(prompt) :] == pytest.approx(found.token_logprobs, abs=2e-4)
    known = complete(sequence, max_tokens=1, extra_body={"prompt_logprobs": 3}).choices[0].prompt_logprobs
    by_token = [entry[str(t)]["logprob"] for entry, t in zip(known[1:], sequence[1:], strict=True)]
    assert by_token == pytest.approx(echoed.token_logprobs[1:], abs=1e-5)
    assert [known[len(prompt) + i][str(t)]["rank"] for i, t in enumerate(answer.token_ids)] == [1] * 12


def test_log_probabilities_do_not_depend_on_parameters(complete: Completions) -> None:
    plain = complete(logprobs=0, max_tokens=1).choices[0].logprobs
    hot = complete(logprobs=20, max_tokens=1, temperature=1.7, seed=5, logit_bias={"400": 5}).choices[0].logprobs
    assert max(hot.top_logprobs[0].values()) == pytest.approx(plain.token_logprobs[0], abs=1e-5)


def test_log_probabilities_of_chat_and_its_stream_are_equal(client: OpenAI, model: str) -> None:
    request = {"model": model, "messages": [USER], "temperature": 0.0, "max_tokens": 16}
    request |= {"logprobs": True, "top_logprobs": 5}
    whole = client.chat.completions.create(**request).choices[0]
    content = whole.logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in content).decode()
    # The token that ended the output has an entry too
    assert text.removesuffix("<|eos|>") == whole.message.content
    for entry in content:
        likely = [top.logprob for top in entry.top_logprobs]
        assert (len(likely), likely[0]) == (5, entry.logprob)
        assert likely == sorted(likely, reverse=True)
    chunks = client.chat.completions.create(**request, stream=True)
    choices = [chunk.choices[0] for chunk in chunks]
    streamed = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    assert [(e.token, e.bytes) for e in streamed] == [(e.token, e.bytes) for e in content]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in content], abs=1e-5)


def test_echo_returns_the_prompt(complete: Completions) -> None:
    assert complete.text(echo=True) == PROMPT + complete.text()
    streamed = "".join(chunk.choices[0].text for chunk in complete(echo=True, stream=True))
    assert streamed == PROMPT + complete.text()
    alone = complete(echo=True, max_tokens=0)
    assert (alone.choices[0].text, alone.usage.completion_tokens) == (PROMPT, 0)


def test_prompt_logprobs_read_no_prefix_cache_and_salts_do_not_share_one(complete: Completions) -> None:
    prompt = list(range(500, 700))

    def cached(**extra: Any) -> int:
        usage = complete(prompt, max_tokens=1, extra_body=extra).usage
        return usage.prompt_tokens_details.cached_tokens

    cached(cache_salt="a")
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt="a", prompt_logprobs=0) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_may_be_included_and_ends_the_log_probabilities(complete: Completions, stream: bool) -> None:
    plain = complete.text()
    stop = plain[len(plain) // 2 :][:3]

    def completed(**extra: Any) -> tuple[str, list[str]]:
        answer = complete(stop=[stop], logprobs=0, stream=stream, extra_body=extra)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        tokens = [token for c in choices if c.logprobs for token in c.logprobs.tokens]
        return "".join(choice.text for choice in choices), tokens

    text, tokens = completed()
    assert text == plain[: plain.index(stop)]
    assert "".join(tokens[:-1]) in text
    assert "".join(tokens).startswith(text)
    longer, _ = completed(include_stop_str_in_output=True)
    assert longer == text + stop


def test_eos_may_be_included_in_the_text(client: OpenAI, model: str) -> None:
    def completed(**extra: bool) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[USER], temperature=0.0, max_tokens=1000, extra_body=extra
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    plain = completed()
    assert completed(skip_special_tokens=False) == plain
    assert completed(skip_special_tokens=False, include_stop_str_in_output=True) == plain + "<|eos|>"


def test_truncated_prompt_keeps_its_end(complete: Completions, server: ServeProcess) -> None:
    ids = encoded(server, PROMPT + " a way of using")
    answer = complete(ids, extra_body={"truncate_prompt_tokens": 4})
    assert answer.usage.prompt_tokens == 4
    assert answer.choices[0].text == complete.text(ids[-4:]) != complete.text(ids)


def test_special_tokens_of_a_prompt_may_be_omitted(complete: Completions, server: ServeProcess) -> None:
    bare = complete(extra_body={"add_special_tokens": False})
    assert bare.usage.prompt_tokens == complete().usage.prompt_tokens - 1
    assert bare.choices[0].text == complete.text(encoded(server, PROMPT, add_special_tokens=False))


def test_token_ids_decode_to_the_text(complete: Completions, server: ServeProcess) -> None:
    answer = complete(extra_body={"return_token_ids": True}).choices[0]
    body = {"tokens": answer.token_ids}
    shown = httpx.post(f"{server.url}/detokenize", json=body, timeout=PATIENCE).json()["prompt"]
    assert shown == answer.text
    assert answer.prompt_token_ids == encoded(server, PROMPT)


def test_usage_in_every_event(complete: Completions) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == last.usage.completion_tokens == 16


def test_final_message_may_be_continued(client: OpenAI, model: str) -> None:
    def completed(messages: list[dict[str, str]], **extra: bool) -> str:
        answer = client.chat.completions.create(
            model=model, messages=messages, temperature=0.0, max_tokens=16, extra_body=extra
        )
        return answer.choices[0].message.content

    whole = completed([USER])
    assert " " in whole[8:]
    begun = [USER, {"role": "assistant", "content": whole[: whole.index(" ", 8)]}]
    rest = {"continue_final_message": True, "add_generation_prompt": False}
    assert (begun[1]["content"] + completed(begun, **rest)).startswith(whole)
    assert completed(begun, **rest, echo=True) == begun[1]["content"] + completed(begun, **rest)


def test_structured_output_matches_its_schema_choice_or_regex(client: OpenAI, model: str) -> None:
    def completed(**fields: Any) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[USER], temperature=1.0, seed=1, max_tokens=200, **fields
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        return choice.message.content

    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for content in (
        completed(response_format=form),
        completed(extra_body={"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}),
    ):
        person = json.loads(content)
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)
    assert not re.search(r"[:,{]\s", content), "there is white space between the parts"
    assert completed(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert re.fullmatch(
        "[a-f]{3}-[0-9]{2}", completed(extra_body={"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}})
    )


def test_complete_structured_output_ends_before_min_tokens(complete: Completions) -> None:
    """The grammar takes precedence over `min_tokens`."""
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 10}
    answer = complete(extra_body=extra)
    assert answer.choices[0].text in ("yes", "no")
    assert answer.usage.completion_tokens < 10


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"grammar": "?"}},
        {"structured_outputs": {"json": {"type": "nonsense"}}}, {"logit_bias": {"9999": 1}}, {"bad_words": [""]},
        {"allowed_token_ids": [4096]}, {"n": 1000}, {"logprobs": 1000}, {"truncate_prompt_tokens": 0},
        {"guided_json": SCHEMA}, {"repetition_penalty": -1},
    ],
)  # fmt: skip
def test_invalid_parameter_is_named_and_the_next_request_is_served(
    complete: Completions, fields: dict[str, Any]
) -> None:
    (name,) = fields
    with pytest.raises(openai.BadRequestError) as refused:
        complete(extra_body=fields)
    assert refused.value.param == name
    assert complete.text(max_tokens=2)

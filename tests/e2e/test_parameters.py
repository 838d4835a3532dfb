"""Each parameter by the official client against the demo model: it changes the answer, in the way it says."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Completion

from tests.e2e.server import PATIENCE, Server

PROMPT = "class Queue:"
USER = {"role": "user", "content": "What is a list?"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Asking:
    """Greedy completions of one prompt, unless told otherwise."""

    def __init__(self, client: OpenAI, model: str) -> None:
        self.client = client
        self.model = model

    def __call__(self, prompt: Any = PROMPT, **fields: Any) -> Completion:
        """Fields that OpenAI's API does not know stand in `extra_body`."""
        asked = {"max_tokens": 16, "temperature": 0.0, **fields}
        return self.client.completions.create(model=self.model, prompt=prompt, **asked)

    def text(self, prompt: Any = PROMPT, **fields: Any) -> str:
        return self(prompt, **fields).choices[0].text

    def ids(self, prompt: Any = PROMPT, **fields: Any) -> list[int]:
        extra = {**fields.pop("extra_body", {}), "return_token_ids": True}
        return self(prompt, extra_body=extra, **fields).choices[0].token_ids


@pytest.fixture
def ask(client: OpenAI, model: str) -> Asking:
    return Asking(client, model)


def encoded(server: Server, text: str, add_special_tokens: bool = True) -> list[int]:
    body = {"prompt": text, "add_special_tokens": add_special_tokens}
    return httpx.post(f"{server.url}/tokenize", json=body, timeout=PATIENCE).json()["tokens"]


def test_a_penalty_changes_how_often_tokens_come_again(ask: Asking) -> None:
    def variety(repetition_penalty: float = 1.0, **fields: float) -> int:
        extra = {"ignore_eos": True, "repetition_penalty": repetition_penalty}
        return len(set(ask.ids(max_tokens=32, extra_body=extra, **fields)))

    plain = variety()
    assert plain < 32, "the plain answer repeats itself"
    assert variety(presence_penalty=2.0) > plain
    assert variety(frequency_penalty=2.0) > plain
    assert variety(repetition_penalty=2.0) > plain
    assert variety(presence_penalty=-2.0) < plain


def test_a_bias_forbids_and_forces_tokens(ask: Asking) -> None:
    plain = ask.ids()
    without = ask.ids(logit_bias={str(plain[0]): -100})
    assert plain[0] not in without
    assert set(ask.ids(logit_bias={"400": 100}, max_tokens=8)) == {400}


def test_bad_words_do_not_appear(ask: Asking, server: Server) -> None:
    plain = ask.ids()
    words = re.findall("[a-z]{2,}", ask.text())
    found = [encoded(server, form, False) for word in words for form in (word, f" {word}")]
    token, word = next(
        (ids[0], words[i // 2]) for i, ids in enumerate(found) if len(ids) == 1 and ids[0] in plain
    )
    changed = ask.ids(extra_body={"bad_words": [word]})
    assert token in plain
    assert token not in changed


def test_only_allowed_tokens_appear(ask: Asking) -> None:
    allowed = [300, 310, 320]
    ids = ask.ids(max_tokens=12, extra_body={"allowed_token_ids": allowed, "ignore_eos": True})
    assert set(ids) <= set(allowed)


def test_a_cut_to_the_likeliest_token_is_greedy(ask: Asking) -> None:
    warm = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
    greedy = ask.text(max_tokens=8)
    assert ask.text(**warm) != greedy
    cuts: list[dict[str, Any]] = [
        {"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}},
    ]  # fmt: skip
    assert [ask.text(**warm, **cut) for cut in cuts] == [greedy] * 3


def test_n_samples_are_those_of_the_seeds_after_one_another(ask: Asking) -> None:
    warm = {"temperature": 1.0, "n": 3, "seed": 2**32, "max_tokens": 8}
    together = ask(**warm)
    alone = [ask.text(temperature=1.0, seed=2**32 + i, max_tokens=8) for i in range(3)]
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) == 3
    prompt = ask().usage.prompt_tokens
    assert together.usage.prompt_tokens == prompt
    assert together.usage.completion_tokens <= 3 * 8
    streamed = ["", "", ""]
    for chunk in ask(**warm, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone


def test_log_probabilities_are_those_of_the_prompt_that_the_answer_becomes(
    ask: Asking, server: Server
) -> None:
    """What the model says of a token is the same whether it came with the prompt or was sampled."""
    prompt = encoded(server, PROMPT)
    answer = ask(prompt, logprobs=3, max_tokens=12, extra_body={"return_token_ids": True}).choices[0]
    found = answer.logprobs
    assert "".join(found.tokens) == answer.text
    assert all(
        lp == max(top.values()) for lp, top in zip(found.token_logprobs, found.top_logprobs, strict=True)
    )
    assert all(len(top) == 3 for top in found.top_logprobs), "greedy: the token itself is the likeliest"
    sequence = [*prompt, *answer.token_ids]
    echoed = ask(sequence, echo=True, logprobs=3, max_tokens=0).choices[0].logprobs
    assert echoed.token_logprobs[0] is None
    assert echoed.token_logprobs[len(prompt) :] == pytest.approx(found.token_logprobs, abs=2e-4)
    known = ask(sequence, max_tokens=1, extra_body={"prompt_logprobs": 3}).choices[0].prompt_logprobs
    by_token = [entry[str(t)]["logprob"] for entry, t in zip(known[1:], sequence[1:], strict=True)]
    assert by_token == pytest.approx(echoed.token_logprobs[1:], abs=1e-5)
    assert [known[len(prompt) + i][str(t)]["rank"] for i, t in enumerate(answer.token_ids)] == [1] * 12


def test_log_probabilities_are_the_model_s_before_any_parameter(ask: Asking) -> None:
    plain = ask(logprobs=0, max_tokens=1).choices[0].logprobs
    hot = ask(logprobs=20, max_tokens=1, temperature=1.7, seed=5, logit_bias={"400": 5}).choices[0].logprobs
    assert max(hot.top_logprobs[0].values()) == pytest.approx(plain.token_logprobs[0], abs=1e-5)


def test_chat_log_probabilities_whole_and_streamed(client: OpenAI, model: str) -> None:
    asked = {"model": model, "messages": [USER], "temperature": 0.0, "max_tokens": 16}
    asked |= {"logprobs": True, "top_logprobs": 5}
    whole = client.chat.completions.create(**asked).choices[0]
    content = whole.logprobs.content
    said = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert said.removesuffix("<|eos|>") == whole.message.content  # what ended the answer has its entry too
    for entry in content:
        likely = [top.logprob for top in entry.top_logprobs]
        assert (len(likely), likely[0]) == (5, entry.logprob)
        assert likely == sorted(likely, reverse=True)
    chunks = client.chat.completions.create(**asked, stream=True)
    choices = [chunk.choices[0] for chunk in chunks]
    streamed = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    assert [(e.token, e.bytes) for e in streamed] == [(e.token, e.bytes) for e in content]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in content], abs=1e-5)


def test_echo_gives_the_prompt_back(ask: Asking) -> None:
    assert ask.text(echo=True) == PROMPT + ask.text()
    streamed = "".join(chunk.choices[0].text for chunk in ask(echo=True, stream=True))
    assert streamed == PROMPT + ask.text()
    alone = ask(echo=True, max_tokens=0)
    assert (alone.choices[0].text, alone.usage.completion_tokens) == (PROMPT, 0)


def test_prompt_logprobs_read_no_prefix_cache_and_salts_do_not_share_one(ask: Asking) -> None:
    prompt = list(range(500, 700))

    def cached(**extra: Any) -> int:
        usage = ask(prompt, max_tokens=1, extra_body=extra).usage
        return usage.prompt_tokens_details.cached_tokens

    cached(cache_salt="a")
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt="a", prompt_logprobs=0) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_shown_on_demand_and_cuts_log_probabilities(ask: Asking, stream: bool) -> None:
    plain = ask.text()
    stop = plain[len(plain) // 2 :][:3]

    def said(**extra: Any) -> tuple[str, list[str]]:
        answer = ask(stop=[stop], logprobs=0, stream=stream, extra_body=extra)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        tokens = [token for c in choices if c.logprobs for token in c.logprobs.tokens]
        return "".join(choice.text for choice in choices), tokens

    text, tokens = said()
    assert text == plain[: plain.index(stop)]
    assert "".join(tokens[:-1]) in text
    assert "".join(tokens).startswith(text)
    longer, _ = said(include_stop_str_in_output=True)
    assert longer == text + stop


def test_the_end_of_the_text_is_shown_on_demand(client: OpenAI, model: str) -> None:
    def said(**extra: bool) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[USER], temperature=0.0, max_tokens=1000, extra_body=extra
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    plain = said()
    assert said(skip_special_tokens=False) == plain
    assert said(skip_special_tokens=False, include_stop_str_in_output=True) == plain + "<|eos|>"


def test_a_truncated_prompt_is_its_end(ask: Asking, server: Server) -> None:
    ids = encoded(server, PROMPT + " a way of using")
    answer = ask(ids, extra_body={"truncate_prompt_tokens": 4})
    assert answer.usage.prompt_tokens == 4
    assert answer.choices[0].text == ask.text(ids[-4:]) != ask.text(ids)


def test_special_tokens_around_a_prompt_can_be_left_out(ask: Asking, server: Server) -> None:
    bare = ask(extra_body={"add_special_tokens": False})
    assert bare.usage.prompt_tokens == ask().usage.prompt_tokens - 1
    assert bare.choices[0].text == ask.text(encoded(server, PROMPT, add_special_tokens=False))


def test_token_ids_decode_to_the_text(ask: Asking, server: Server) -> None:
    answer = ask(extra_body={"return_token_ids": True}).choices[0]
    body = {"tokens": answer.token_ids}
    shown = httpx.post(f"{server.url}/detokenize", json=body, timeout=PATIENCE).json()["prompt"]
    assert shown == answer.text
    assert answer.prompt_token_ids == encoded(server, PROMPT)


def test_usage_in_every_event(ask: Asking) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = ask(stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == last.usage.completion_tokens == 16


def test_a_message_is_gone_on_with(client: OpenAI, model: str) -> None:
    def said(messages: list[dict[str, str]], **extra: bool) -> str:
        answer = client.chat.completions.create(
            model=model, messages=messages, temperature=0.0, max_tokens=16, extra_body=extra
        )
        return answer.choices[0].message.content

    whole = said([USER])
    assert " " in whole[8:]
    begun = [USER, {"role": "assistant", "content": whole[: whole.index(" ", 8)]}]
    rest = {"continue_final_message": True, "add_generation_prompt": False}
    assert (begun[1]["content"] + said(begun, **rest)).startswith(whole)
    assert said(begun, **rest, echo=True) == begun[1]["content"] + said(begun, **rest)


def test_an_answer_matches_what_it_must_match(client: OpenAI, model: str) -> None:
    def said(**fields: Any) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[USER], temperature=1.0, seed=1, max_tokens=200, **fields
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        return choice.message.content

    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for content in (
        said(response_format=form),
        said(extra_body={"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}),
    ):
        person = json.loads(content)
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)
    assert not re.search(r"[:,{]\s", content), "no white space between the parts"
    assert said(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert re.fullmatch(
        "[a-f]{3}-[0-9]{2}", said(extra_body={"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}})
    )


def test_a_complete_answer_ends_before_min_tokens(ask: Asking) -> None:
    """The grammar wins."""
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 10}
    answer = ask(extra_body=extra)
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
def test_what_cannot_be_is_refused_by_name_and_the_server_serves_on(
    ask: Asking, fields: dict[str, Any]
) -> None:
    (name,) = fields
    with pytest.raises(openai.BadRequestError) as refused:
        ask(extra_body=fields)
    assert refused.value.param == name
    assert ask.text(max_tokens=2)

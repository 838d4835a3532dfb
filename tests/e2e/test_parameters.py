"""Parameters whose effect needs a model: sampling, log-probabilities, the prefix cache and grammars.

That each parameter reaches the engine is in tests/integration/frontend, and that it changes the tokens in
tests/ranks/test_parameters.py.
"""

import json
import re
from typing import Any

import httpx
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


@pytest.fixture
def complete(client: OpenAI, model: str) -> Completions:
    return Completions(client, model)


def test_log_probabilities_of_an_output_equal_those_as_a_prompt(complete: Completions, server: ServeProcess) -> None:
    """The log-probability of a token does not depend on whether it was sampled or is part of the prompt."""
    body = {"prompt": PROMPT}
    prompt = httpx.post(f"{server.url}/tokenize", json=body, timeout=PATIENCE).json()["tokens"]
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

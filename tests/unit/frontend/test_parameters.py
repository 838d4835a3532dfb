"""From a body to sampling parameters: defaults in their order, and every refusal by name."""

import json
from pathlib import Path

import pydantic
import pytest

from services.checkpoint import CheckpointError
from services.frontend.errors import APIError
from services.frontend.openai.parameters import Defaults, refuse_unserved, sampling_params
from services.frontend.openai.schemas import NEUTRAL, NEUTRAL_IN_MESSAGE, ChatRequest, CompletionRequest

NONE = Defaults({}, (2,))
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def params(body: dict[str, object], defaults: Defaults = NONE, prompt: int = 10, context: int = 100):
    return sampling_params(
        CompletionRequest.model_validate({"prompt": "x", **body}), defaults, prompt, context, 1000
    )


def test_client_beats_checkpoint_beats_openai() -> None:
    checkpoint = Defaults({"temperature": 0.6, "top_k": 20}, (2, 3))
    assert params({}).temperature == 1.0
    chosen = params({"top_k": 5}, checkpoint)
    assert (chosen.temperature, chosen.top_k, chosen.top_p) == (0.6, 5, 1.0)
    assert chosen.eos_token_ids == (2, 3)
    assert params({"ignore_eos": True}, checkpoint).eos_token_ids == ()
    assert params({"top_k": -1}, checkpoint).top_k == 0


def test_defaults_are_read_from_the_checkpoint_with_every_eos(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert Defaults.read(tmp_path, None, True) == Defaults({}, (9,))
    generation = {"eos_token_id": [7, 8], "temperature": 0.5, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert Defaults.read(tmp_path, 8, True) == Defaults({"temperature": 0.5}, (7, 8))
    assert Defaults.read(tmp_path, 6, False) == Defaults({}, (7, 8, 6))


def test_max_tokens_defaults_to_16_for_completions_and_to_the_room_for_chat() -> None:
    assert params({}).max_tokens == 16
    assert params({}, prompt=95).max_tokens == 5
    chat = ChatRequest.model_validate(CHAT)
    assert sampling_params(chat, NONE, 10, 100, 1000).max_tokens == 90
    both = ChatRequest.model_validate({**CHAT, "max_tokens": 5, "max_completion_tokens": 6})
    assert sampling_params(both, NONE, 10, 100, 1000).max_tokens == 6


def test_a_seed_is_drawn_where_none_is_given() -> None:
    assert params({"seed": -1}).seed == 2**64 - 1
    assert params({}).seed != params({}).seed


@pytest.mark.parametrize(
    ("body", "prompt", "words"),
    [
        ({}, 0, ["empty"]),
        ({}, 100, ["100", "context"]),
        ({}, 5000, ["5000", "100"]),
        ({"max_tokens": 91}, 10, ["91", "100", "90"]),
        ({"max_tokens": 4, "min_tokens": 5}, 10, ["min_tokens 5", "4"]),
        ({"stop_token_ids": [1000]}, 10, ["1000"]),
    ],
)
def test_what_cannot_fit_is_refused_with_its_numbers(
    body: dict[str, object], prompt: int, words: list[str]
) -> None:
    with pytest.raises(APIError) as refused:
        params(body, prompt=prompt)
    assert refused.value.status == 400
    assert all(word in refused.value.message for word in words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2), ("n", True),
        ("best_of", 2), ("echo", True), ("suffix", "!"), ("logprobs", 3), ("top_logprobs", 1), ("prompt_logprobs", 0),
        ("presence_penalty", 0.5), ("frequency_penalty", -1), ("repetition_penalty", 1.1), ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}), ("tools", [{}]), ("tool_choice", "required"),
        ("skip_special_tokens", False), ("bad_words", ["x"]), ("guided_json", {}), ("structured_outputs", {}),
        ("allowed_token_ids", [1]), ("truncate_prompt_tokens", 3), ("nonsense", 1), ("logprobs", 0), ("echo", 0),
    ],
)  # fmt: skip
def test_unserved_parameter_is_refused_by_name(name: str, value: object) -> None:
    body = CompletionRequest.model_validate({"prompt": "x", name: value})
    with pytest.raises(APIError, match=name) as refused:
        refuse_unserved(body.model_extra or {})
    assert refused.value.param == name


def test_answer_of_the_official_client_may_come_back_as_a_message_but_tool_calls_may_not() -> None:
    said = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    message = ChatRequest.model_validate({"messages": [said]}).messages[0]
    refuse_unserved(message.model_extra or {}, NEUTRAL_IN_MESSAGE, "messages.0.")
    called = ChatRequest.model_validate({"messages": [{**said, "tool_calls": [{"id": "1"}]}]}).messages[0]
    with pytest.raises(APIError, match=r"messages\.0\.tool_calls") as refused:
        refuse_unserved(called.model_extra or {}, NEUTRAL_IN_MESSAGE, "messages.0.")
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": "hot"}, {"temperature": -1}, {"top_p": 7}, {"top_k": True, "min_p": 3}, {"eos_token_id": "2"},
        {"eos_token_id": [2, -1]}, {"eos_token_id": 2**40}, {"eos_token_id": True},
    ],
)  # fmt: skip
def test_defaults_that_cannot_be_served_are_refused_at_start(
    tmp_path: Path, content: dict[str, object]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="generation_config"):
        Defaults.read(tmp_path, None, True)


def test_eos_ids_beyond_the_logits_are_left_out() -> None:
    assert params({}, Defaults({}, (2, 5000))).eos_token_ids == (2,)


def test_neutral_values_of_unserved_parameters_pass() -> None:
    for name, values in NEUTRAL.items():
        for value in (*values, None):
            body = CompletionRequest.model_validate({"prompt": "x", name: value})
            refuse_unserved(body.model_extra or {})


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": 1.1}, {"max_tokens": 0},
        {"max_tokens": 1.5}, {"max_tokens": 2**40}, {"stop": ["x"] * 17}, {"stop": "x" * 257}, {"prompt": [-1]},
        {"prompt": [2**31]}, {"prompt": ["x"] * 65}, {"prompt": [[1], "x"]}, {"prompt": {"a": 1}}, {"prompt": None},
        {"seed": 2**64}, {"stop_token_ids": list(range(129))}, {"priority": 2**30}, {"stream": "yes"}, {"min_p": 2},
        {"stream_options": {"x": 1}}, {"cache_salt": "x" * 257},
    ],
)  # fmt: skip
def test_schema_bounds_every_field(body: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        CompletionRequest.model_validate({"prompt": "x", **body})


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://x"}}],
        [{"type": "text"}],
        5,
        [{"type": "text", "text": 1}],
    ],
)
def test_only_text_content_is_taken(content: object) -> None:
    with pytest.raises(pydantic.ValidationError):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": content}]})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}]}).messages[0]
    assert message.plain() == {"role": "user", "content": "ab"}

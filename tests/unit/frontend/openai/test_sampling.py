"""Bodies to sampling parameters: the precedence of defaults, and refusals that name the parameter."""

import json
from functools import partial
from pathlib import Path

import pydantic
import pytest

from protocol.codec import pack
from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL, CheckpointError
from services.config import FrontendConfig
from services.frontend.errors import APIError
from services.frontend.model import ServedModel
from services.frontend.openai.parameters.sampling import SamplingDefaults, bad_words, sampling_params
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest
from services.frontend.text.tokenizer import Tokenizer

NONE = SamplingDefaults({}, (2,))
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def params(body: dict[str, object], defaults: SamplingDefaults = NONE, prompt: int = 10, context: int = 100):
    return sampling_params(CompletionRequest.model_validate({"prompt": "x", **body}), defaults, prompt, context, 1000)


def test_body_takes_precedence_over_the_checkpoint_and_the_checkpoint_over_openai() -> None:
    checkpoint = SamplingDefaults({"temperature": 0.6, "top_k": 20}, (2, 3))
    assert params({}).temperature == 1.0
    chosen = params({"top_k": 5}, checkpoint)
    assert (chosen.temperature, chosen.top_k, chosen.top_p) == (0.6, 5, 1.0)
    assert chosen.eos_token_ids == (2, 3)
    assert params({"ignore_eos": True}, checkpoint).eos_token_ids == ()
    assert params({"top_k": -1}, checkpoint).top_k == 0


def test_larger_stream_interval_holds_for_a_stream() -> None:
    def interval(least: int, **body: object) -> int:
        return CompletionRequest.model_validate({"prompt": "x", **body}).interval(least)

    assert [interval(4, stream=True, stream_interval=asked) for asked in (None, 1, 8)] == [4, 4, 8]
    assert interval(4, stream_interval=8) == 1, "what is not streamed is counted as it comes"


def test_defaults_are_read_from_the_checkpoint_with_every_eos(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert SamplingDefaults.read(tmp_path, None, True) == SamplingDefaults({}, (9,))
    generation = {"eos_token_id": [7, 8], "temperature": 0.5, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert SamplingDefaults.read(tmp_path, 8, True) == SamplingDefaults({"temperature": 0.5}, (7, 8))
    assert SamplingDefaults.read(tmp_path, 6, False) == SamplingDefaults({}, (7, 8, 6))


def test_max_tokens_defaults_to_16_for_completions_and_to_the_rest_of_the_context_for_chat() -> None:
    assert params({}).max_tokens == 16
    assert params({}, prompt=95).max_tokens == 5
    chat = ChatRequest.model_validate(CHAT)
    assert sampling_params(chat, NONE, 10, 100, 1000).max_tokens == 90
    both = ChatRequest.model_validate({**CHAT, "max_tokens": 5, "max_completion_tokens": 6})
    assert sampling_params(both, NONE, 10, 100, 1000).max_tokens == 6


@pytest.mark.parametrize(
    ("checkpoint", "keeps", "server", "expected", "source"),
    [
        (7, True, {}, [16, 7, 50], "max_new_tokens of generation_config.json"),
        (7, False, {}, [16, 90, 50], "the rest of the context"),
        (7, True, {"max_new_tokens": 5}, [5, 5, 5], "max_new_tokens of the server"),
        (None, False, {"max_new_tokens": 30}, [16, 30, 30], "max_new_tokens of the server"),
        (500, True, {}, [16, 90, 50], "the rest of the context"),
        ("7", True, {}, [16, 90, 50], "the rest of the context"),
        (0, True, {}, [16, 90, 50], "the rest of the context"),
    ],
)
def test_max_new_tokens_is_a_default_of_the_checkpoint_for_chat_and_a_limit_of_the_server(
    tmp_path: Path, checkpoint: object, keeps: bool, server: dict[str, float], expected: list[int], source: str
) -> None:
    """As vLLM has it. A checkpoint's useless value stops no start. The refusal of `min_tokens` names the source."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": checkpoint}))
    overrides = FrontendConfig(override_generation_config=server).override_generation_config
    defaults = SamplingDefaults.read(tmp_path, 2, keeps, overrides)
    bodies = ChatRequest.model_validate(CHAT), ChatRequest.model_validate({**CHAT, "max_tokens": 50})
    chats = [sampling_params(body, defaults, 10, 100, 1000).max_tokens for body in bodies]
    assert [params({}, defaults).max_tokens, *chats] == expected
    body = ChatRequest.model_validate({**CHAT, "min_tokens": 99})
    with pytest.raises(APIError, match=f"min_tokens 99 is more than max_tokens {expected[1]} .{source}"):
        sampling_params(body, defaults, 10, 100, 1000)


def test_missing_seed_is_drawn_at_random() -> None:
    assert params({"seed": -1}).seed == 2**64 - 1
    assert params({}).seed != params({}).seed


@pytest.mark.parametrize(
    ("body", "prompt", "words"),
    [
        ({}, 0, ["empty"]),
        ({}, 100, ["100", "context"]),
        ({}, 5000, ["5000", "100"]),
        ({"max_tokens": 91}, 10, ["91", "100", "90"]),
        ({"max_tokens": 4, "min_tokens": 5}, 10, ["min_tokens 5 is more than max_tokens 4"]),
        ({"min_tokens": 17}, 10, ["min_tokens 17", "16 (the default)"]),
        ({"stop_token_ids": [1000]}, 10, ["stop_token_ids", "1000"]),
        ({"allowed_token_ids": [5, 1000]}, 10, ["allowed_token_ids", "1000"]),
        ({"logit_bias": {"1000": 1}}, 10, ["logit_bias", "1000"]),
        ({"logit_bias": {"x": 1}}, 10, ["logit_bias", "x"]),
        ({"logit_bias": {"-1": 1}}, 10, ["logit_bias", "-1"]),
        ({"logit_bias": {"9" * 5000: 1}}, 10, ["logit_bias"]),
        ({"logit_bias": {"7": 1, "07": 1}}, 10, ["logit_bias", "7 twice"]),
        ({"logit_bias": {"7": 100.5}}, 10, ["logit_bias", "100.5"]),
        ({"max_tokens": 0}, 10, ["max_tokens", "echo"]),
        ({"prompt_logprobs": 1, "stream": True}, 10, ["prompt_logprobs", "stream"]),
    ],
)
def test_value_out_of_range_is_refused_with_its_numbers(body: dict[str, object], prompt: int, words: list[str]) -> None:
    with pytest.raises(APIError) as refused:
        params(body, prompt=prompt)
    assert refused.value.status == 400
    assert all(word in refused.value.message for word in words)
    assert refused.value.param in {*body, "prompt"}
    assert (refused.value.code == "context_length_exceeded") == ("context" in refused.value.message)


@pytest.mark.parametrize("bias", [1, "x"])
def test_biases_are_counted_before_they_are_checked(bias: object) -> None:
    with pytest.raises(pydantic.ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": "x", "logit_bias": {str(i): bias for i in range(1025)}})
    (error,) = refused.value.errors()
    assert (error["loc"], error["type"], error["ctx"]["actual_length"]) == (("logit_bias",), "too_long", 1025)
    assert len(params({"logit_bias": {str(i): 1 for i in range(1000)}}).logit_bias) == 1000


def test_every_parameter_reaches_the_sampler() -> None:
    """Each value differs from the default, and together they set every field of `SamplingParams`."""
    asked = {
        "max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125, "seed": 77, "min_tokens": 3,
        "stop_token_ids": [8, 9, 8], "presence_penalty": 0.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25,
        "logit_bias": {"5": -100, "6": 2.5}, "allowed_token_ids": [9, 4, 9], "logprobs": 2, "prompt_logprobs": 3,
    }  # fmt: skip
    words = ((1, 2), (3,))
    body = CompletionRequest.model_validate({"prompt": "x", **asked})
    given = sampling_params(body, NONE, 10, 100, 1000, words)
    assert given == SamplingParams(
        7, 0.5, 0.25, 9, 0.125, 77, 3, (2,), (8, 9), 0.5, -1.5, 1.25, ((5, -100.0), (6, 2.5)), words, pack([4, 9]), 2, 3
    )
    plain = SamplingParams(16)
    assert all(getattr(given, name) != getattr(plain, name) for name in plain.__struct_fields__)


def test_top_logprobs_of_chat_need_logprobs() -> None:
    def asked(**fields: object) -> int | None:
        return sampling_params(ChatRequest.model_validate({**CHAT, **fields}), NONE, 10, 100, 1000).logprobs

    assert [asked(), asked(logprobs=True), asked(logprobs=True, top_logprobs=4)] == [None, 0, 4]
    with pytest.raises(APIError) as refused:
        asked(top_logprobs=4)
    assert refused.value.param == "top_logprobs"


def test_echo_requests_the_logprobs_of_the_prompt_as_of_the_output() -> None:
    assert params({"echo": True}).prompt_logprobs is None
    assert params({"echo": True, "logprobs": 2}).prompt_logprobs == 2
    assert params({"echo": True, "logprobs": 2, "prompt_logprobs": 5}).prompt_logprobs == 5
    assert params({"echo": True, "max_tokens": 0}).max_tokens == 1


def test_repetition_penalty_of_a_checkpoint_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    checkpoint = SamplingDefaults.read(tmp_path, 2, True)
    assert params({}, checkpoint).repetition_penalty == 1.3
    assert params({"repetition_penalty": 1.0}, checkpoint).repetition_penalty == 1.0
    assert params({}, SamplingDefaults.read(tmp_path, 2, False)).repetition_penalty == 1.0


@pytest.mark.parametrize(("keeps", "penalty"), [(True, 1.3), (False, 1.0)])
def test_defaults_of_the_server_replace_those_of_the_checkpoint(tmp_path: Path, keeps: bool, penalty: float) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3, "presence_penalty": 0.5}))
    overrides = FrontendConfig(override_generation_config='{"presence_penalty": 1.5, "top_k": -1}')  # type: ignore[arg-type]
    defaults = SamplingDefaults.read(tmp_path, 2, keeps, overrides.override_generation_config)
    chosen = params({}, defaults)
    assert (chosen.presence_penalty, chosen.top_k, chosen.repetition_penalty) == (1.5, 0, penalty)
    assert params({"presence_penalty": 0}, defaults).presence_penalty == 0


def test_defaults_of_the_configuration_are_those_of_the_model() -> None:
    config = FrontendConfig(
        model=str(DEMO_MODEL), override_generation_config={"top_k": 7}, default_chat_template_kwargs={"tools": []}
    )
    with pytest.raises(CheckpointError, match="--default-chat-template-kwargs"):
        ServedModel.load(config)
    model = ServedModel.load(config.model_copy(update={"default_chat_template_kwargs": {}}))
    assert params({}, model.defaults).top_k == 7


def test_bad_words_are_forbidden_at_the_beginning_and_within_a_text() -> None:
    """vLLM's rule: the form after a space is added if it has as many tokens and begins with another one."""
    encode = partial(Tokenizer(DEMO_MODEL).encode, add_special_tokens=False)
    assert bad_words(["the", "  the"], encode) == ((*encode("the"),), (*encode(" the"),))
    assert len(encode(" the")) == len(encode("the")) == 1
    longer = next(word for word in ("zqx", "zq", "é") if len(encode(f" {word}")) != len(encode(word)))
    assert bad_words([longer], encode) == ((*encode(longer),),)
    for word in ("", "  ", "é" * 200):
        with pytest.raises(APIError) as refused:
            bad_words(["fine", word], encode)
        assert refused.value.param == "bad_words"


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": "hot"}, {"temperature": -1}, {"top_p": 7}, {"top_k": True, "min_p": 3}, {"eos_token_id": "2"},
        {"eos_token_id": [2, -1]}, {"eos_token_id": 2**40}, {"eos_token_id": True},
    ],
)  # fmt: skip
def test_invalid_defaults_are_refused_at_start(tmp_path: Path, content: dict[str, object]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="generation_config"):
        SamplingDefaults.read(tmp_path, None, True)


@pytest.mark.parametrize("value", ["1", 2.5, -3])
def test_unusable_penalty_of_a_checkpoint_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: object
) -> None:
    content = {"presence_penalty": value, "frequency_penalty": -2, "top_k": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert SamplingDefaults.read(tmp_path, None, True).sampling == {"frequency_penalty": -2, "top_k": 5}
    assert f"presence_penalty {value!r} is ignored" in caplog.text


def test_eos_ids_beyond_the_logits_are_dropped() -> None:
    assert params({}, SamplingDefaults({}, (2, 5000))).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": -1}, {"temperature": 2.1}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": 1.1},
        {"max_tokens": -1}, {"n": 129}, {"n": True}, {"echo": 0},
        {"presence_penalty": 2.1}, {"frequency_penalty": "x"}, {"repetition_penalty": 0}, {"logprobs": 21},
        {"prompt_logprobs": -1}, {"logit_bias": {"5": "x"}}, {"logit_bias": [1]}, {"allowed_token_ids": []},
        {"bad_words": ["x"] * 129}, {"truncate_prompt_tokens": -2}, {"response_format": {"type": "x"}},
        {"structured_outputs": {"choice": []}}, {"logit_bias": {str(i): 1 for i in range(1025)}},
        {"max_tokens": 1.5}, {"max_tokens": 2**40}, {"stop": ["x"] * 17}, {"stop": "x" * 257}, {"prompt": [-1]},
        {"prompt": [2**31]}, {"prompt": ["x"] * 65}, {"prompt": [[1], "x"]}, {"prompt": {"a": 1}}, {"prompt": None},
        {"seed": 2**64}, {"stop_token_ids": list(range(129))}, {"priority": 2**30}, {"stream": "yes"}, {"min_p": 2},
        {"stream_options": {"include_usage": "x"}}, {"cache_salt": "x" * 257}, {"top_k": 2**31}, {"max_tokens": "4"},
    ],
)  # fmt: skip
def test_schema_bounds_every_field(body: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        CompletionRequest.model_validate({"prompt": "x", **body})


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "input_audio", "input_audio": {"data": "", "format": "aiff"}}],
        [{"type": "text"}],
        5,
        [{"type": "text", "text": 1}],
    ],
)
def test_other_content_is_refused(content: object) -> None:
    with pytest.raises(pydantic.ValidationError):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": content}]})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}]}).messages[0]
    assert message.plain() == {"role": "user", "content": "a\nb"}

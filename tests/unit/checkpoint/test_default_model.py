"""The default model: where it is, what is served without it, and its chat template."""

from pathlib import Path

import pytest

from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL, default_dtype, default_model, model_name, resolve, special_tokens
from services.checkpoint.gguf import read_header
from services.frontend.openai.parameters.sampling import SamplingDefaults
from services.frontend.templates.chat_template import ChatTemplate, find_template
from services.frontend.templates.jobs import Conversation

PACKAGED = default_model.packaged_model()
installed = pytest.mark.skipif(PACKAGED is None, reason="deploy/model.txt is not installed")
HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@installed
def test_default_model_is_served_without_a_name() -> None:
    assert PACKAGED == resolve("")
    assert model_name(resolve("")) == "SmolLM2-135M-Instruct"
    assert default_dtype("") is None


@installed
def test_sampling_defaults_are_those_of_a_small_model() -> None:
    defaults = SamplingDefaults.read(resolve(""), 2, True)
    assert defaults.eos_token_ids == (2, 0)
    assert defaults.sampling["temperature"] < 0.5
    SamplingParams(1, **defaults.sampling)


def rendered(path: Path, messages: list[dict[str, object]], **more: object) -> str:
    text, special = find_template(path, None), special_tokens(path)
    assert text is not None
    template = ChatTemplate(text, special)
    template.try_out()
    return template.render(Conversation(messages, **more))  # type: ignore[arg-type]


@installed
@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "Be brief."}]], ids=["plain", "system"])
def test_plain_conversation_has_the_prompt_of_the_models_own_template(first: list[dict[str, object]]) -> None:
    own = read_header(resolve("")).text("tokenizer.chat_template")
    conversation = [*first, *HELLO, {"role": "user", "content": "Bye"}]
    expected = ChatTemplate(own, special_tokens(resolve(""))).render(Conversation(conversation))
    assert rendered(resolve(""), conversation) == expected


@installed
def test_developer_tools_and_their_results_are_in_the_prompt() -> None:
    conversation = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    text = rendered(resolve(""), conversation, tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n' in text
    )
    assert text.endswith("<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_template_of_the_demo_model_takes_developer_and_tool() -> None:
    conversation = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    text = rendered(DEMO_MODEL, conversation)
    assert "<|system|>Be brief.<|eos|><|assistant|><tool_call>" in text
    assert text.endswith("<|user|>2<|eos|><|assistant|>")

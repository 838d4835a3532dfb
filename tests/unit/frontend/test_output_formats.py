"""Output formats from the flags and the tokenizer's handling of their markers."""

import logging
import shutil
from pathlib import Path

import pydantic
import pytest
from tokenizers import Tokenizer as HFTokenizer

from services.checkpoint import DEMO_MODEL, CheckpointError
from services.config import FrontendConfig, ServeConfig
from services.frontend.model import ServedModel
from services.frontend.output_formats import TOOL_FORMATS as FORMATS
from services.frontend.output_formats import OutputFormats, recognised_tools
from services.frontend.reasoning.think import ReasoningStart
from services.frontend.text.tokenizer import Tokenizer


def tokenizer(directory: Path, special: list[str], ordinary: list[str]) -> Tokenizer:
    made = HFTokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    made.add_special_tokens(special)
    made.add_tokens(ordinary)
    made.save(str(directory / "tokenizer.json"))
    shutil.copy(DEMO_MODEL / "tokenizer_config.json", directory)
    return Tokenizer(directory)


@pytest.mark.parametrize("config", [FrontendConfig, ServeConfig])
def test_calls_without_a_format_are_refused(config: type[FrontendConfig]) -> None:
    with pytest.raises(pydantic.ValidationError, match="--tool-call-parser none"):
        config(enable_auto_tool_choice=True, tool_call_parser="none")
    with pytest.raises(pydantic.ValidationError, match="tool_call_parser"):
        config.model_validate({"tool_call_parser": "cobol"})
    with pytest.raises(CheckpointError, match="does not show the format"):
        OutputFormats.from_config(config(enable_auto_tool_choice=True), Tokenizer(DEMO_MODEL))
    assert config(enable_auto_tool_choice=True, tool_call_parser="hermes").enable_auto_tool_choice


SHOWN = {
    "openai": "<|channel|>commentary to=functions.",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json",
    "mistral": "[TOOL_CALLS] [",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "qwen3_xml": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "granite": "write '<|tool_call|>' followed by a list",
    "phi4_mini_json": "functools[",
    "llama4_pythonic": "<|header_start|> [func_name1(params_name1=params_value1)]",
    "llama3_json": '<|start_header_id|> {"name": function name, "parameters": dictionary of argument name}',
    "hermes": '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}',
}
"""Texts of chat templates that show a call, as the models' own have them."""


@pytest.mark.parametrize("name", FORMATS)
def test_format_of_calls_is_recognised(name: str) -> None:
    architecture = "GraniteForCausalLM" if name == "granite" else "LlamaForCausalLM"
    shown = "{% if tools %}" + SHOWN[name]
    formats = OutputFormats.from_config(FrontendConfig(), Tokenizer(DEMO_MODEL), shown, architecture)
    assert (formats.tools, formats.auto_tool_choice) == (FORMATS[name], True)
    off = FrontendConfig(enable_auto_tool_choice=False)
    assert not OutputFormats.from_config(off, Tokenizer(DEMO_MODEL), shown, architecture).auto_tool_choice
    none = FrontendConfig(tool_call_parser="none")
    assert OutputFormats.from_config(none, Tokenizer(DEMO_MODEL), shown, architecture).tools is None


def test_vllms_other_names_of_a_format_are_accepted() -> None:
    config = ServeConfig.model_validate({"tool_call_parser": "qwen3_coder", "reasoning_parser": "glm47"})
    assert (config.tool_call_parser, config.reasoning_parser) == ("qwen3_xml", "glm45")


def test_reasoning_of_gpt_oss_is_read_with_its_calls() -> None:
    for tools in ("auto", "none", "openai"):
        config = FrontendConfig(reasoning_parser="openai_gptoss", tool_call_parser=tools)
        formats = OutputFormats.from_config(config, Tokenizer(DEMO_MODEL))
        assert (formats.tools, formats.auto_tool_choice) == (FORMATS["openai"], tools != "none")
    config = FrontendConfig(reasoning_parser="openai_gptoss", tool_call_parser="hermes")
    with pytest.raises(CheckpointError, match="no calls in the format hermes"):
        OutputFormats.from_config(config, Tokenizer(DEMO_MODEL))


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools %}<TOOLCALL>[",
        "{% if tools %}<|tool_call|>{}<|/tool_call|>",
        "{% if tools %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        SHOWN["hermes"],
    ],
)
def test_other_formats_are_not_taken_for_a_known_one(template: str) -> None:
    assert recognised_tools(template, "LlamaForCausalLM") is None


def test_format_of_calls_of_the_default_model_is_recognised() -> None:
    assert ServedModel.load(FrontendConfig()).formats.tools is FORMATS["hermes"]
    assert ServedModel.load(FrontendConfig(model=str(DEMO_MODEL))).formats.tools is None


@pytest.mark.parametrize(
    ("template", "opening"),
    [("<think>", "<think>"), ("[THINK]", "[THINK]"), ("Here is my thought process:", "Here's my thought process:")],
)
def test_format_of_reasoning_is_recognised(template: str, opening: str) -> None:
    formats = OutputFormats.from_config(FrontendConfig(), Tokenizer(DEMO_MODEL), template)
    assert (formats.reasoning, formats.tags.opening[0]) == (ReasoningStart.BY_TAG, opening)
    off = FrontendConfig(reasoning_parser="none")
    assert OutputFormats.from_config(off, Tokenizer(DEMO_MODEL), template).reasoning is None


@pytest.mark.parametrize("name", FORMATS)
def test_special_tokens_are_shown_only_if_a_marker_is_one(name: str, tmp_path: Path) -> None:
    marks, config = list(FORMATS[name].markers), FrontendConfig(tool_call_parser=name)
    assert not OutputFormats.from_config(config, Tokenizer(DEMO_MODEL)).tools_are_special
    assert not OutputFormats.from_config(config, tokenizer(tmp_path, [], marks)).tools_are_special, (
        "as in Qwen's tokenizers"
    )
    assert OutputFormats.from_config(config, tokenizer(tmp_path, marks[:1], [])).tools_are_special


def test_log_warns_if_the_end_of_reasoning_is_several_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = FrontendConfig(reasoning_parser="qwen3")
    with caplog.at_level(logging.WARNING):
        forms = OutputFormats.from_config(config, tokenizer(tmp_path, [], ["<think>", "</think>"]))
        assert (len(forms.reasoning_end), forms.reasoning, forms.reasoning_is_special) == (
            1,
            ReasoningStart.BY_TAG,
            False,
        )
        assert not caplog.records
        several = OutputFormats.from_config(config, Tokenizer(DEMO_MODEL)).reasoning_end
    assert Tokenizer(DEMO_MODEL).decode(list(several), show_special=True) == "</think>"
    assert f"</think> is {len(several)} tokens" in caplog.text

"""Output formats from the flags and the tokenizer's handling of their markers."""

import logging
import shutil
from pathlib import Path

import pydantic
import pytest
from tokenizers import Tokenizer as HFTokenizer

from services.checkpoint import DEMO_MODEL
from services.config import FrontendConfig, ServeConfig
from services.frontend.output_formats import OutputFormats
from services.frontend.reasoning.think import ReasoningStart
from services.frontend.text.tokenizer import Tokenizer
from services.frontend.tools.formats import FORMATS


def tokenizer(directory: Path, special: list[str], ordinary: list[str]) -> Tokenizer:
    made = HFTokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    made.add_special_tokens(special)
    made.add_tokens(ordinary)
    made.save(str(directory / "tokenizer.json"))
    shutil.copy(DEMO_MODEL / "tokenizer_config.json", directory)
    return Tokenizer(directory)


@pytest.mark.parametrize("config", [FrontendConfig, ServeConfig])
def test_flag_without_the_flag_it_needs_is_refused(config: type[FrontendConfig]) -> None:
    with pytest.raises(pydantic.ValidationError, match="--tool-call-parser"):
        config(enable_auto_tool_choice=True)
    with pytest.raises(pydantic.ValidationError, match="tool_call_parser"):
        config.model_validate({"tool_call_parser": "cobol"})
    assert config(enable_auto_tool_choice=True, tool_call_parser="hermes").enable_auto_tool_choice


def test_answers_are_not_parsed_without_flags() -> None:
    assert OutputFormats.from_config(FrontendConfig(), Tokenizer(DEMO_MODEL)) == OutputFormats()


@pytest.mark.parametrize("name", FORMATS)
def test_special_tokens_are_shown_only_if_a_marker_is_one(name: str, tmp_path: Path) -> None:
    marks, config = list(FORMATS[name].markers), FrontendConfig(tool_call_parser=name)
    assert not OutputFormats.from_config(config, Tokenizer(DEMO_MODEL)).tools_are_special
    assert not OutputFormats.from_config(config, tokenizer(tmp_path, [], marks)).tools_are_special, (
        "as in Qwen's tokenizers"
    )
    assert OutputFormats.from_config(config, tokenizer(tmp_path, marks[:1], [])).tools_are_special


def test_log_warns_if_the_end_of_reasoning_is_several_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert Tokenizer(DEMO_MODEL).decode_all(list(several)) == "</think>"
    assert f"</think> is {len(several)} tokens" in caplog.text

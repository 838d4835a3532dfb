"""Reasoning is separated from the content, however the text is cut into chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.output_formats import REASONING_FORMATS
from services.frontend.parsing.events import Reasoning
from services.frontend.reasoning.think import (
    THINK,
    ReasoningStart,
    ReasoningTags,
    ThinkParser,
    start_in_message,
    start_in_prompt,
)


def read(start: ReasoningStart, pieces: list[str], tags: ReasoningTags = THINK) -> tuple[str, str]:
    """Return reasoning and content."""
    parser, said = ThinkParser(start, tags), {True: "", False: ""}
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.push("", is_last=True):
        assert event.text
        said[isinstance(event, Reasoning)] += event.text
    return said[True], said[False]


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        (ReasoningStart.INSIDE, "so\n a < b </thin\n\n</think>\n\nHi\n", "so\n a < b </thin", "Hi\n"),
        (ReasoningStart.INSIDE, "<think>\nso</think>Hi", "so", "Hi"),
        (ReasoningStart.INSIDE, "never ends", "never ends", ""),
        (ReasoningStart.INSIDE, "</think></think>", "", "</think>"),
        (ReasoningStart.BY_TAG, "<think>\nso\n</think>\n\n[1]", "so", "[1]"),
        (ReasoningStart.BY_TAG, "\n<think></think>\nx", "", "x"),
        (ReasoningStart.BY_TAG, " a <think>b</think>", "", " a <think>b</think>"),
        (ReasoningStart.BY_TAG, "<thin", "", "<thin"),
        (ReasoningStart.BY_TAG, "<think>a</thin", "a</thin", ""),
        (ReasoningStart.OUTSIDE, "<think>a</think>b", "", "<think>a</think>b"),
        (ReasoningStart.OUTSIDE, "\n\n", "", "\n\n"),
    ],
)
def test_reasoning_is_separated_from_content(start: ReasoningStart, text: str, reasoning: str, content: str) -> None:
    assert read(start, [text]) == read(start, list(text)) == (reasoning, content)


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("mistral", "[THINK]so [x]\n[/THINK]\nHi", "so [x]", "Hi"),
        ("mistral", "Hi [THINK]", "", "Hi [THINK]"),
        ("glm45", "\n<think>so</think>\nHi", "so", "Hi"),
        ("granite", "Here is my thought process: Hm, Here is it. Here is my response: Hi", "Hm, Here is it.", "Hi"),
        ("granite", "Here's my thought process:\nHm\n\nHere's my response:\nHi\n", "Hm", "Hi\n"),
        ("granite", "Here is Rome.", "", "Here is Rome."),
        ("qwen3", "<think>so</think>Hi", "so", "Hi"),
        ("deepseek_r1", "so</think>Hi", "so", "Hi"),
    ],
)
def test_reasoning_in_each_format(name: str, text: str, reasoning: str, content: str) -> None:
    form = REASONING_FORMATS[name]
    assert read(form.start, [text], form.tags) == (reasoning, content)
    for cut in range(1, len(text)):
        assert read(form.start, [text[:cut], text[cut:]], form.tags) == (reasoning, content)


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<", "</thi", "think>", "\n", " ", "text"])


@given(st.sampled_from(ReasoningStart), st.lists(FRAGMENTS, max_size=10).map("".join), st.data())
def test_result_does_not_depend_on_the_cuts(start: ReasoningStart, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6), "cuts"))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(start, [text])
    assert read(start, pieces) == whole
    assert "".join(whole).count("text") == text.count("text")


def test_prompt_determines_where_an_answer_begins() -> None:
    for otherwise in (ReasoningStart.INSIDE, ReasoningStart.BY_TAG):
        assert start_in_prompt("<|assistant|>\n<think>\n", otherwise) is ReasoningStart.INSIDE
        assert start_in_prompt("<think>\n\n</think>\n\n", otherwise) is ReasoningStart.OUTSIDE
        assert start_in_prompt("<|assistant|>", otherwise) is otherwise
    assert start_in_message("<think>a") is ReasoningStart.INSIDE
    assert start_in_message("<think>a</think>b") is start_in_message("b") is ReasoningStart.OUTSIDE

"""Reasoning is cut off from the answer, whatever the text is cut into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.parsing.events import Reasoning
from services.frontend.reasoning.formats import begins, continues
from services.frontend.reasoning.think import Begins, ThinkParser


def read(start: Begins, pieces: list[str]) -> tuple[str, str]:
    """Reasoning and content."""
    parser, said = ThinkParser(start), {True: "", False: ""}
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        assert event.text
        said[isinstance(event, Reasoning)] += event.text
    return said[True], said[False]


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        (Begins.INSIDE, "so\n a < b </thin\n\n</think>\n\nHi\n", "so\n a < b </thin", "Hi\n"),
        (Begins.INSIDE, "<think>\nso</think>Hi", "so", "Hi"),
        (Begins.INSIDE, "never ends", "never ends", ""),
        (Begins.INSIDE, "</think></think>", "", "</think>"),
        (Begins.PERHAPS, "<think>\nso\n</think>\n\n[1]", "so", "[1]"),
        (Begins.PERHAPS, "\n<think></think>\nx", "", "x"),
        (Begins.PERHAPS, " a <think>b</think>", "", " a <think>b</think>"),
        (Begins.PERHAPS, "<thin", "", "<thin"),
        (Begins.PERHAPS, "<think>a</thin", "a</thin", ""),
        (Begins.OUTSIDE, "<think>a</think>b", "", "<think>a</think>b"),
        (Begins.OUTSIDE, "\n\n", "", "\n\n"),
    ],
)
def test_reasoning_is_told_apart(start: Begins, text: str, reasoning: str, content: str) -> None:
    assert read(start, [text]) == read(start, list(text)) == (reasoning, content)


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<", "</thi", "think>", "\n", " ", "text"])


@given(st.sampled_from(Begins), st.lists(FRAGMENTS, max_size=10).map("".join), st.data())
def test_cuts_change_nothing(start: Begins, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6), "cuts"))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(start, [text])
    assert read(start, pieces) == whole
    assert "".join(whole).count("text") == text.count("text")


def test_prompt_tells_where_an_answer_begins() -> None:
    for otherwise in (Begins.INSIDE, Begins.PERHAPS):
        assert begins("<|assistant|>\n<think>\n", otherwise) is Begins.INSIDE
        assert begins("<think>\n\n</think>\n\n", otherwise) is Begins.OUTSIDE
        assert begins("<|assistant|>", otherwise) is otherwise
    assert continues("<think>a") is Begins.INSIDE
    assert continues("<think>a</think>b") is continues("b") is Begins.OUTSIDE

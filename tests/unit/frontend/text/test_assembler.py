"""The text of an answer: only certain text is returned, token indices are checked, stop strings are cut off."""

from hypothesis import given
from hypothesis import strategies as st

from services.checkpoint import DEMO_MODEL
from services.frontend.text.assembler import StopFilter, TextAssembler
from services.frontend.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(DEMO_MODEL)


def assembler(stops: list[str] | None = None, min_tokens: int = 0) -> TextAssembler:
    return TextAssembler(TOKENIZER.detokenizer([]), stops or [], min_tokens)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(st.text(max_size=60))
def test_chunks_join_to_the_text_and_have_no_incomplete_characters(text: str) -> None:
    answer = assembler()
    chunks = [answer.push(token) for token in ids_of(text)]
    assert all("\ufffd" not in chunk for chunk in chunks) or "\ufffd" in text
    assert "".join(chunks) + answer.finish() == text


def test_emoji_over_several_tokens_comes_out_whole() -> None:
    ids = ids_of("a😀b")
    answer = assembler()
    chunks = [answer.push(token) for token in ids]
    assert len(ids) > 3, "this test needs an emoji that spans several tokens"
    assert [chunk for chunk in chunks if chunk] == ["a", "😀", "b"]


def test_incomplete_character_at_the_end_becomes_a_replacement_character() -> None:
    answer = assembler()
    assert "".join(map(answer.push, ids_of("a😀")[:-1])) == "a"
    assert set(answer.finish()) == {"\ufffd"}


@given(
    st.text(alphabet="ab ", max_size=40),
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_text_ends_at_the_first_stop_string_however_it_is_cut_into_chunks(text: str, stops: list[str], random) -> None:
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    stop_filter, shown, rest = StopFilter(stops), "", text
    while rest:
        size = random.randint(1, len(rest))
        chunk, rest = rest[:size], rest[size:]
        shown += stop_filter.push(chunk)
        assert not any(stop in shown for stop in stops), "a stop string leaked"
        assert text.startswith(shown)
        if stop_filter.matched is not None:
            break
    shown += stop_filter.flush()
    # A match is found when its last character arrives, so of two stop strings the one that is complete first may win.
    if cut is None:
        assert stop_filter.matched is None
        assert shown == text
    else:
        assert stop_filter.matched in stops
        assert text[len(shown) :].startswith(stop_filter.matched)


def test_ending_that_might_become_a_stop_string_is_held_back_and_released() -> None:
    stop_filter = StopFilter(["STOP"])
    assert stop_filter.push("go ST") == "go "
    assert stop_filter.push("ART") == "START"
    assert stop_filter.push("!STO") == "!"
    assert stop_filter.flush() == "STO"

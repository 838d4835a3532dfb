"""The stream assembler: certain text only, indices checked, stop strings cut. And what waits for it in an inbox."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.requests import Finish, FinishReason
from services.checkpoint import DEMO_MODEL
from services.frontend.engine import inbox as inboxes
from services.frontend.engine.inbox import Event, Inbox, Likely, Turn
from services.frontend.errors import GONE, APIError
from services.frontend.text.assembler import Answer, OutOfOrder, StopFilter
from services.frontend.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(DEMO_MODEL)


def answer(stops: list[str] | None = None) -> Answer:
    return Answer(TOKENIZER.stream([]), stops or [])


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode_rendered(text)


@given(st.text(max_size=60))
def test_pieces_of_any_text_add_up_to_it_and_never_show_half_a_character(text: str) -> None:
    growing = answer()
    pieces = [growing.push(index, token) for index, token in enumerate(ids_of(text))]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + growing.finish() == text


def test_emoji_over_several_tokens_comes_out_whole() -> None:
    ids = ids_of("a😀b")
    growing = answer()
    pieces = [growing.push(index, token) for index, token in enumerate(ids)]
    assert len(ids) > 3, "the emoji must span tokens for this test to say anything"
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]


def test_answer_that_ends_inside_a_character_shows_it_as_replacement() -> None:
    ids = ids_of("a😀")[:-1]
    growing = answer()
    text = "".join(growing.push(index, token) for index, token in enumerate(ids))
    assert text == "a"
    assert set(growing.finish()) == {"\ufffd"}


@given(
    st.text(alphabet="ab ", max_size=40),
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_stop_strings_cut_at_the_first_match_however_the_text_is_cut_up(
    text: str, stops: list[str], random
) -> None:
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    filtering, shown, rest = StopFilter(stops), "", text
    while rest:
        size = random.randint(1, len(rest))
        piece, rest = rest[:size], rest[size:]
        shown += filtering.push(piece)
        assert not any(stop in shown for stop in stops), "a stop string leaked"
        assert text.startswith(shown)
        if filtering.matched is not None:
            break
    shown += filtering.flush()
    # A match is found when its last character arrives; of two, the one that is complete first may win.
    if cut is None:
        assert filtering.matched is None
        assert shown == text
    else:
        assert filtering.matched in stops
        assert text[len(shown) :].startswith(filtering.matched)


def test_ending_that_might_become_a_stop_string_is_held_back_and_released() -> None:
    filtering = StopFilter(["STOP"])
    assert filtering.push("go ST") == "go "
    assert filtering.push("ART") == "START"
    assert filtering.push("!STO") == "!"
    assert filtering.flush() == "STO"


def test_token_that_was_delivered_before_is_dropped_and_a_gap_is_an_error() -> None:
    ids = ids_of("one two three")
    growing = answer()
    text = growing.push(0, ids[0])
    assert growing.push(0, ids[0]) == ""
    assert growing.duplicates == 1
    with pytest.raises(OutOfOrder, match="token 2 arrived, 1 was expected"):
        growing.push(2, ids[2])
    text += "".join(growing.push(index, token) for index, token in enumerate(ids[1:], start=1))
    assert text + growing.finish() == "one two three"
    assert growing.num_tokens == len(ids)


def test_tokens_after_a_stop_string_are_neither_shown_nor_counted() -> None:
    ids = ids_of("yes no maybe")
    growing = answer(["no"])
    text = "".join(growing.push(index, token) for index, token in enumerate(ids))
    assert text + growing.finish() == "yes "
    assert growing.stop_string == "no"
    assert growing.num_tokens < len(ids)


def test_stop_strings_count_only_after_min_tokens() -> None:
    ids = ids_of("a.b.c")
    for min_tokens, expected in ((0, "a"), (ids.index(ids_of("b")[0]) + 1, "a.b"), (len(ids), "a.b.c")):
        growing = Answer(TOKENIZER.stream([]), ["."], min_tokens)
        text = "".join(growing.push(index, token) for index, token in enumerate(ids))
        assert text + growing.finish() == expected


class Reader:
    """Reads an inbox whenever it is told; `writes` is what was written, by whom."""

    def __init__(self, inbox: Inbox, name: bytes = b"", writes: list[bytes] | None = None) -> None:
        self.inbox = inbox
        self.name = name
        self.taken: list[list[tuple[int, Event]]] = []
        self.writes = [] if writes is None else writes
        inbox.read_by(self.read, self.writes.append)

    def read(self) -> bytes:
        self.taken.append(self.inbox.take_now())
        return self.name


async def turns(count: int = 1) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_reader_is_told_once_in_a_turn_of_all_that_came() -> None:
    async def main() -> None:
        inbox = Inbox(Turn())
        inbox.put(0, (0, 7))
        reader = Reader(inbox)
        inbox.put(1, (0, 8))
        assert reader.taken == [], "not inside of put: others put as well"
        await turns()
        assert reader.taken == [[(0, (0, 7)), (1, (0, 8))]]
        await turns(3)
        assert len(reader.taken) == 1, "nothing new, nothing told"
        inbox.put(0, (1, 9))
        await turns()
        assert reader.taken[1:] == [[(0, (1, 9))]]
        assert reader.writes == [], "it had nothing to say"

    asyncio.run(main())


def test_all_readers_of_a_turn_say_something_before_it_is_written() -> None:
    async def main() -> None:
        turn, order = Turn(), []

        def join(name: str, said: bytes) -> None:
            def read() -> bytes:
                order.append(f"{name} reads")
                return said

            inbox = Inbox(turn)
            inbox.read_by(read, lambda data: order.append(f"{name} writes {data.decode()}"))
            inbox.put(0, (0, 7))

        join("a", b"1")
        join("b", b"")
        join("c", b"3")
        await turns()
        assert order == ["a reads", "b reads", "c reads", "a writes 1", "c writes 3"]

    asyncio.run(main())


def test_writer_that_fails_leaves_those_of_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(data: bytes) -> None:
        raise OSError("no socket")

    async def main() -> None:
        turn = Turn()
        first, second = Inbox(turn), Reader(Inbox(turn), b"b")
        first.read_by(lambda: b"a", fail)
        for inbox in (first, second.inbox):
            inbox.put(0, (0, 7))
        await turns()
        assert second.writes == [b"b"]

    asyncio.run(main())
    assert "an answer was not written" in caplog.text


def test_reader_that_takes_nothing_is_told_of_what_comes_next_and_then_has_all() -> None:
    async def main() -> None:
        inbox, told = Inbox(Turn()), []

        def read() -> bytes:
            told.append(None)
            return b""

        inbox.read_by(read, lambda data: None)
        for index in range(3):
            inbox.put(0, (index, 7))
            await turns()
        assert len(told) == 3
        assert inbox.take_now() == [(0, (index, 7)) for index in range(3)]

    asyncio.run(main())


def test_single_token_is_taken_alone_and_nothing_else() -> None:
    inbox = Inbox(Turn())
    assert inbox.take_token() is None
    inbox.put(3, (0, 7))
    assert inbox.take_token() == (3, (0, 7))
    assert inbox.take_now() == []
    finish = Finish(1, FinishReason.LENGTH)
    likely = Likely(4, 1, [7], [-0.5])
    for events in ([(0, (0, 7)), (1, (0, 8))], [(0, finish)], [(0, likely)], [(0, APIError(500, "x"))]):
        for event in events:
            inbox.put(*event)
        assert inbox.take_token() is None
        assert inbox.take_now() == events


def test_more_than_a_turn_may_take_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "MAX_TAKEN", 2)

    async def main() -> None:
        inbox = Inbox(Turn())
        reader = Reader(inbox)
        for index in range(5):
            inbox.put(0, (index, 7))
        await turns(5)
        assert [len(events) for events in reader.taken] == [2, 2, 1]
        assert [event[0] for events in reader.taken for _, event in events] == [*range(5)]

    asyncio.run(main())


def test_end_overtakes_what_waits_and_nobody_is_told_after_the_reader_left() -> None:
    async def main() -> None:
        inbox = Inbox(Turn())
        reader = Reader(inbox)
        inbox.put(0, (0, 7))
        gone = APIError(GONE, "it left")
        inbox.put_first(gone)
        await turns()
        assert reader.taken == [[(0, gone)]]
        inbox.put(0, (1, 7))
        inbox.stop_reading()
        inbox.put(0, (2, 7))
        await turns(3)
        assert len(reader.taken) == 1

    asyncio.run(main())

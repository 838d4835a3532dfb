"""Bounds of the store of responses."""

from typing import Any

import pytest

from services.frontend.errors import APIError
from services.frontend.responses_api.schemas import InputMessage
from services.frontend.responses_api.store import MAX_SECONDS, ResponseStore


class HandClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def response(id: str, text: str = "x") -> dict[str, Any]:
    return {"id": id, "output": [{"type": "message", "text": text}]}


GIVEN = [InputMessage(role="user", content="Hi")]


def test_the_oldest_make_room_and_a_giant_is_not_stored() -> None:
    store = ResponseStore(max_bytes=3000)
    for number in range(10):
        store.add("", response(str(number), "x" * 500), GIVEN, GIVEN)
    kept = [number for number in range(10) if is_stored(store, str(number))]
    assert kept == list(range(10 - len(kept), 10))
    assert 1 < len(kept) < 6
    store.add("", response("giant", "x" * 5000), GIVEN, GIVEN)
    assert not is_stored(store, "giant")
    assert is_stored(store, "9")


def test_responses_expire() -> None:
    clock = HandClock()
    store = ResponseStore(clock=clock)
    store.add("", response("a"), GIVEN, GIVEN)
    clock.now = MAX_SECONDS - 1
    store.add("", response("b"), GIVEN, GIVEN)
    assert is_stored(store, "a")
    clock.now = MAX_SECONDS
    assert not is_stored(store, "a")
    assert is_stored(store, "b")


def is_stored(store: ResponseStore, id: str) -> bool:
    try:
        return store.get("", id).response["id"] == id
    except APIError:
        return False


def test_deleting_twice_is_an_error() -> None:
    store = ResponseStore()
    store.add("", response("a"), GIVEN, GIVEN)
    store.delete("", "a")
    with pytest.raises(APIError):
        store.delete("", "a")

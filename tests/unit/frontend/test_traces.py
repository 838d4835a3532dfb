"""Phases of a choice: the scheduler's times on the frontend's clock."""

import pytest

from protocol.requests import Finish, FinishReason, RequestTimes
from services.frontend.request_summary import EndedChoice
from services.frontend.traces import phases

TIMES = RequestTimes(queued=10.0, scheduled=11.0, first_token=13.0, ended=17.0)


def choice(times: RequestTimes | None, submitted: float = 100.0, is_resumed: bool = False) -> EndedChoice:
    end = None if times is None else Finish(1, FinishReason.STOP, times=times)
    return EndedChoice(submitted, 103.5, 110.0, "stop", 5, end, is_resumed=is_resumed)


def test_phases_follow_one_another_from_the_submission_on() -> None:
    assert phases(choice(TIMES)) == [
        ("queue", 100.0, 101.0), ("prefill", 101.0, 103.0), ("decode", 103.0, 107.0), ("detokenise", 103.5, 110.0),
    ]  # fmt: skip


def test_at_another_scheduler_they_lead_to_the_end() -> None:
    queue, *_, decode, _ = phases(choice(TIMES, is_resumed=True))
    assert (queue[1], decode[2]) == (103.0, 110.0)


def test_no_phase_ends_after_the_request() -> None:
    """The submission is measured before a wait that the scheduler does not see."""
    *_, decode, _ = phases(choice(TIMES, submitted=104.0))
    assert decode[2] == 110.0


@pytest.mark.parametrize(
    ("times", "names"),
    [
        (None, ["detokenise"]),
        (RequestTimes(), ["detokenise"]),
        (RequestTimes(queued=10.0, ended=12.0), ["queue", "detokenise"]),
        (RequestTimes(queued=10.0, scheduled=11.0, ended=12.0), ["queue", "prefill", "detokenise"]),
    ],
)
def test_phases_that_did_not_happen_have_no_span(times: RequestTimes | None, names: list[str]) -> None:
    assert [name for name, *_ in phases(choice(times))] == names

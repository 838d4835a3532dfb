"""Chunks, batches and steps in flight change no bit on any layout of ranks; a rank waits only for what a step needs."""

import signal
from collections.abc import Callable

import pytest
import torch

from protocol.sampling import SamplingParams
from tests.integration.native.conftest import Family
from tests.integration.native.driver import DrivenRequest, RunnerDriver, ints
from tests.ranks.group import GroupDriver
from tests.ranks.models import per_change

Start = Callable[..., GroupDriver]
PROMPT = list(range(20, 49))
WARM = SamplingParams(max_tokens=100, temperature=0.8, top_p=0.95, top_k=50, seed=11)
TOKENS = 14


def outputs(requests: list[DrivenRequest]) -> list[list[int]]:
    return [request.output for request in requests]


@pytest.mark.parametrize("layout", per_change((4, 1), (1, 2), (2, 2)))
def test_chunks_batches_and_steps_in_flight_change_no_bit(tied: Family, start: Start, layout: tuple[int, int]) -> None:
    group = start(tied.path, *layout)
    alone = group.add(PROMPT)
    group.generate([alone], TOKENS)
    expected = torch.cat(group.logits)
    for chunk, depth in ((7, 1), (5, 2), (29, 4)):
        group.logits.clear()
        request = group.add(PROMPT)
        group.generate([request], TOKENS, chunk, depth)
        assert request.output == alone.output
        assert torch.equal(torch.cat(group.logits), expected)
        group.finish(request)
    batches = [[group.add(PROMPT[i:] + PROMPT[:i], WARM) for i in range(k, k + 3)] for k in (0, 3, 6)]
    again = [group.add(r.prompt, WARM) for r in batches[0] + batches[1]]
    group.interleave(batches, TOKENS, chunk=11, depth=layout[1] + 1)
    group.generate(again, TOKENS)
    assert outputs(again) == outputs(batches[0] + batches[1])


@pytest.mark.parametrize("layout", per_change((2, 1), (1, 4), (2, 2)))
def test_preempted_with_steps_in_flight_and_recomputed(tied: Family, start: Start, layout: tuple[int, int]) -> None:
    """Its slot is assigned again while its sampled ids may still be on their way to the first stage."""
    group = start(tied.path, *layout)
    prompts = [PROMPT[i:] for i in range(4)]
    alone = [group.add(prompt, WARM) for prompt in prompts]
    group.generate(alone, TOKENS)
    for request in alone:
        group.finish(request)
    requests = [group.add(prompt, WARM) for prompt in prompts]
    preemptions = 0
    for until in (2, 5, 8, 11):
        group.generate(requests, until, chunk=9, depth=3)
        victim = requests[until % 4]
        group.free_slots.insert(0, victim.slot)  # another request becomes the next owner of the slot
        requests[until % 4] = group.preempt(victim)
        preemptions += 1
    group.generate(requests, TOKENS, chunk=8, depth=3)
    assert preemptions == 4
    assert outputs(requests) == outputs(alone)


@pytest.mark.parametrize("layout", per_change((2, 1), (1, 4), (2, 2)))
def test_steps_without_a_sampling_row(tied: Family, start: Start, layout: tuple[int, int]) -> None:
    """Plan agreement: no feedback is sent for them, which every rank derives from the plan."""
    group = start(tied.path, *layout)
    decoding, prefilling = group.add(PROMPT[:5]), group.add(PROMPT)
    in_flight = [group.launch([(prefilling, 3)]), group.launch([(decoding, 5)]), group.launch([(prefilling, 9)])]
    in_flight.append(group.launch([(decoding, 1), (prefilling, 4)]))
    results = [group.collect(step) for step in in_flight]
    assert [ints(result.slots) for result in results] == [[], [decoding.slot], [], [decoding.slot]]
    group.generate([decoding, prefilling], TOKENS, chunk=4, depth=3)
    one = RunnerDriver(tied.path)
    alone = [one.add(PROMPT[:5]), one.add(PROMPT)]
    one.generate(alone, TOKENS)
    assert outputs([decoding, prefilling]) == outputs(alone)


def test_the_first_stage_does_not_wait_for_ids_that_a_step_does_not_need(tied: Family, start: Start) -> None:
    group = start(tied.path, 1, 2)
    requests = [group.add(PROMPT[i:]) for i in range(3)]
    first, last = group.runner.ranks
    last.signal(signal.SIGSTOP)
    in_flight = [group.launch([(request, len(request.prompt))]) for request in requests]
    for _ in in_flight:  # the first stage has executed all of them, the last stage none
        assert first.receive() is None
        assert first.receive() is None
    last.signal(signal.SIGCONT)
    tokens = []
    for _ in in_flight:
        last.receive()
        tokens.append(last.receive())
    assert all(tokens)
    group.runner.drop_unread()


def test_ids_that_no_step_needs_do_not_accumulate(tied: Family, start: Start) -> None:
    """Requests of one token: their ids are received later, and the slots' next owners keep their prompts."""
    group = start(tied.path, 1, 2)
    alone = group.add(PROMPT)
    group.generate([alone], 3)
    short = [PROMPT[i % 20 :] for i in range(40)]
    for prompt in short:
        request = group.add(prompt)
        group.generate([request], 1)
        group.finish(request)
        group.free_slots.insert(0, group.free_slots.pop())
    again = group.add(PROMPT)
    group.generate([again], 3)
    assert again.output == alone.output

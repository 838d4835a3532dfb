"""Deferred sampling, and what may happen to its requests before the masks are sent.

The world checks answers, masks and the state of every grammar after every transition.
"""

from dataclasses import replace

import pytest

from protocol.codec import unpack
from protocol.sampling import Pooling
from protocol.steps import GrammarOutput, SchedulerOutput, StepMessage
from services.scheduler.core.limits import Limits
from tests.simulation.grammar import structured
from tests.simulation.oracle import MESSAGES
from tests.simulation.world import World, params, prompt_of

ROOMY = Limits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, num_blocks=128, block_size=16)


class Recorded(World):
    """A world that records each message with the results that had been applied when it was sent."""

    def __init__(self, limits: Limits, depth: int) -> None:
        super().__init__(limits, depth)
        self.sent: list[tuple[StepMessage, int]] = []

    def _on_sent(self, frame: bytes) -> None:
        self.sent.append((MESSAGES.decode(frame), self.checker.confirmed))


# -- the order of messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_is_sampled_before_the_next_one_executes(depth: int, stages: int) -> None:
    """At most one sampling is deferred, and its masks are formed when no token before it is in flight."""
    world = Recorded(replace(ROOMY, stages=stages), depth * stages)
    for i in range(6):
        world.add(prompt_of(5 + i, i), params(6 + i, eos=False), structured=structured(i) if i % 2 else None)
        while world.compilation.waiting:
            world.compiled()
        world.step()
    world.drain()
    waiting: SchedulerOutput | None = None
    newest: dict[int, int] = {}
    """Slot -> the newest step that sampled for it."""
    for message, confirmed in world.sent:
        if isinstance(message, SchedulerOutput):
            assert waiting is None, "a step was sent while another one waits for its masks"
            waiting = message if message.has_structured_output_requests else None
            before = dict(newest)
            slots, samples = unpack(message.slots).tolist(), list(message.samples)
            newest |= {slot: message.step_id for slot, samples_ in zip(slots, samples, strict=True) if samples_}
            newest |= {new.slot: 0 for new in message.new if new.slot not in slots}
        elif isinstance(message, GrammarOutput):
            assert message.step_id == waiting.step_id
            assert all(before.get(slot, 0) <= confirmed for slot in unpack(message.slots).tolist())
            waiting = None
    assert world.coverage["sampling: with a grammar"] > 10
    assert waiting is None


def test_neighbours_of_a_request_that_is_compiled_lose_no_step() -> None:
    """It waits beside the queue and delays no other request, and its first token is masked."""
    world = World(replace(ROOMY, max_num_seqs=2), 2)
    waits = world.add(prompt_of(12), params(5, eos=False), structured=structured(3))
    others = [world.add(prompt_of(9, 50 + i), params(8, eos=False)) for i in range(3)]
    for _ in range(8):
        world.step()
    assert [len(other.tokens) for other in others[:2]] == [8, 8]
    assert (len(waits.tokens), world.stage(waits)) == (0, "compiling")
    world.compiled()
    world.drain()
    assert len(waits.tokens) == 5


# -- embeddings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_embeddings_beside_generation(pooling: Pooling, depth: int) -> None:
    """In chunks, with a prefix that others have cached: a mean does not use it."""
    world = World(replace(ROOMY, max_num_batched_tokens=20), depth)
    text = prompt_of(70)
    world.add(text, params(4, eos=False))
    world.drain()
    generating = world.add(prompt_of(30, 1), params(12, eos=False))
    pooled = [world.add(text, params(1, eos=False), pooling=pooling) for _ in range(3)]
    world.drain()
    assert all(stream.embedded and not stream.tokens for stream in pooled)
    assert [stream.hit > 0 for stream in pooled] == [pooling is Pooling.LAST] * 3
    assert len(generating.tokens) == 12

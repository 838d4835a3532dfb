"""Images in prompts: the encoder's budget of a step, and names of blocks."""

import pytest

from protocol.codec import unpack
from protocol.media import Media, MediaItem
from services.scheduler.core.limits import Limits
from tests.simulation.invariants import InvariantError
from tests.simulation.test_acceptance import DEPTHS
from tests.simulation.world import World, params, prompt_of

LIMITS = Limits(4, 64, 128, 96, 4, encoder_budget=10)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_step_encodes_within_the_budget(depth: int) -> None:
    world = World(LIMITS, depth)
    first = world.add(prompt_of(30), params(5, eos=False), media=Media([MediaItem(2, 8, "a"), MediaItem(12, 10, "b")]))
    second = world.add(prompt_of(20), params(5, eos=False), media=Media([MediaItem(5, 4, "c")]))
    text = world.add(prompt_of(20), params(5, eos=False))
    world.drain()
    assert [len(stream.tokens) for stream in (first, second, text)] == [5] * 3
    ends = unpack(world.plans[0].starts) + unpack(world.plans[0].counts)
    assert ends.tolist() == [12, 5, 20]  # before the second image, before the only one, a whole prompt


def test_equal_prompts_hit_up_to_the_first_other_image() -> None:
    world = World(LIMITS, 2)
    hits = []
    for digests in ("ab", "ab", "ac", "cb", "ac"):
        items = [MediaItem(6, 3, digests[0]), MediaItem(21, 3, digests[1])]
        stream = world.add(prompt_of(40), params(2, eos=False), media=Media(items))
        world.drain()
        hits.append(stream.hit)
    assert hits == [0, 36, 20, 4, 36]


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([MediaItem(2, 4, "a"), MediaItem(5, 4, "b")], "impossible"),
        ([MediaItem(2, 0, "a")], "impossible"),
        ([MediaItem(38, 3, "a")], "impossible"),
    ],
)
def test_impossible_images_are_refused(items: list[MediaItem], why: str) -> None:
    with pytest.raises(InvariantError, match=why):
        World(LIMITS, 2).add(prompt_of(40), params(2, eos=False), media=Media(items))


def test_text_models_refuse_images() -> None:
    world = World(Limits(4, 64, 128, 96, 4), 2)
    stream = world.add(prompt_of(40), params(2, eos=False), media=Media([MediaItem(2, 4, "a")]))
    assert "text only" in stream.finish.message

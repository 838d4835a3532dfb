"""Whole prompts: a model that attends in both directions computes a prompt in one step."""

from dataclasses import replace

import pytest

from protocol.membership import Loaded
from protocol.pooling import PoolingModel
from protocol.requests import FinishReason
from protocol.sampling import Pooling
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.membership.sizes import GroupError, fit
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.requests import finishes, generate
from tests.simulation.test_acceptance import DEPTHS
from tests.simulation.world import World, params, prompt_of

LIMITS = Limits(8, 16, 17, 64, 4, enable_prefix_caching=False, pools_only=True, whole_prompts=True)
ONE = params(1, eos=False)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_that_does_not_fit_waits_and_nobody_passes(depth: int) -> None:
    """Longer than the policy's chunk, and with room for the last one beside the first."""
    world = World(LIMITS, depth, policy=ChunkedPolicy(long_prefill_token_threshold=5))
    for seed, length in enumerate((10, 10, 16, 3)):
        world.add(prompt_of(length, seed), ONE, pooling=Pooling.MODEL)
    world.drain()
    assert [[*memoryview(plan.counts).cast("i")] for plan in world.plans] == [[10], [10], [16], [3]]
    assert all(stream.embedded for stream in world.streams)


@pytest.mark.parametrize("pools_only", [True, False])
def test_what_a_model_cannot_compute_is_refused(pools_only: bool) -> None:
    """vLLM's worker would fail on such a row, with all other requests."""
    limits = LIMITS if pools_only else replace(LIMITS, pools_only=False, whole_prompts=False)
    core = World(limits, 2).engine
    kind = Pooling.NONE if pools_only else Pooling.MODEL
    core.add(0, generate([1], max_tokens=1, pooling=kind))
    [finish] = finishes(core)
    assert finish.reason is FinishReason.INVALID
    assert ("generates no text" if pools_only else "no pooler of its own") in finish.message


def loaded(model: PoolingModel | None, max_model_len: int = 513) -> Loaded:
    return Loaded("hash", 100, max_model_len, 0, 9999, hidden_size=8, pooling=model)


def test_the_context_of_whole_prompts_fits_a_step() -> None:
    config, whole = SchedulerConfig(max_num_batched_tokens=300), PoolingModel("embed", 8, whole_prompts=True)
    limits = fit(config, [loaded(whole)])
    assert (limits.max_model_len, limits.enable_prefix_caching, limits.pools_only) == (301, False, True)
    limits = fit(config, [loaded(PoolingModel("embed", 8))])
    assert (limits.max_model_len, limits.enable_prefix_caching, limits.pools_only) == (513, True, True)
    assert not fit(config, [loaded(None)]).pools_only
    with pytest.raises(GroupError, match="phased"):
        fit(SchedulerConfig(batching_policy="phased"), [loaded(whole)])
    with pytest.raises(GroupError, match="poolers"):
        fit(config, [loaded(whole), loaded(None)])

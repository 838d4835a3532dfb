"""The production placement core and simulated engines, as in `make bench NAME=placement_scale`, but reduced."""

from functools import cache

import numpy as np
import pytest

from services.frontend.placement import Reason
from tests.simulation.placement.one_cache import hit_share
from tests.simulation.placement.workload import WorkloadShape, requests
from tests.simulation.placement.world import FleetFault, FleetSetting, FleetWorld, Result

SHAPE = WorkloadShape(requests=4000, per_second=12.0)
ENGINES, FRONTENDS, BLOCKS = 30, 4, 488
arrivals = cache(lambda: [*requests(SHAPE, 3)])


def run(policy: str = "prefix_aware", faults: tuple[FleetFault, ...] = ()) -> Result:
    has_events = policy == "prefix_aware"
    setting = FleetSetting(policy, ENGINES, FRONTENDS, BLOCKS, SHAPE.block_size, 2**14, has_events, faults=faults)
    return FleetWorld(setting, 3).run(arrivals())


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    return run()


def test_prefixes_are_found_as_in_one_cache_and_answers_begin_sooner(undisturbed: Result) -> None:
    one = hit_share(arrivals(), ENGINES * BLOCKS, SHAPE.block_size)
    assert one > 0.3
    assert undisturbed.hit_tokens / undisturbed.prompt_tokens > 0.9 * one
    for policy in ("least_loaded", "round_robin", "cache_aware"):
        other = run(policy)
        assert other.hit_tokens < undisturbed.hit_tokens
        assert other.p(50) > undisturbed.p(50)
        assert other.p(99) > undisturbed.p(99)


def test_no_engine_starves(undisturbed: Result) -> None:
    computed = undisturbed.computed / undisturbed.computed.mean()
    assert computed.min() > 0.5
    assert computed.max() < 2.0
    assert undisturbed.reasons[Reason.PREFIX] > 1000
    assert undisturbed.moved == 0


@pytest.mark.parametrize(
    ("fault", "moves"),
    [
        (FleetFault(100.0, "die", range(6), 60.0), True),
        (FleetFault(100.0, "stall", range(6), 8.0), False),
        (FleetFault(100.0, "partition", range(15), 30.0, range(2)), True),
        (FleetFault(100.0, "die", range(30), 5.0), True),
    ],
    ids=["a_fifth_dies", "a_fifth_stalls", "a_partition", "all_die_and_come_back"],
)
def test_every_request_ends_whatever_fails(fault: FleetFault, moves: bool, undisturbed: Result) -> None:
    result = run(faults=(fault,))
    assert len(result.ttft) == SHAPE.requests
    assert (result.moved > 0) is moves
    assert np.all(np.array(result.ttft) > 0)
    assert result.recovery_seconds(fault.at) < 60
    assert (result.reasons["Hold"] > 0) is (len(fault.engines) == ENGINES)


def test_engines_that_return_get_requests_again() -> None:
    result = run(faults=(FleetFault(50.0, "die", range(6), 30.0),))
    assert result.placed[:6].min() > 0.5 * result.placed.mean()

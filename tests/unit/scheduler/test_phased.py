"""The phased policy under the engine, and reports of a runner's progress."""

from dataclasses import replace
from typing import Any

import pytest

from protocol.codec import pack
from protocol.membership import Loaded
from protocol.steps import SchedulerOutput
from services.config import SchedulerConfig
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.results import UnknownResult
from services.scheduler.membership.sizes import fit
from services.scheduler.policies import PhasedPolicy, make_policy
from tests.simulation.requests import generate, plans
from tests.simulation.results import result_of

SMALL = Limits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, num_blocks=64, block_size=4)


def core(limits: Limits = SMALL, depth: int = 2, **options: int | bool) -> EngineCore:
    return EngineCore(limits, PhasedPolicy(limits, **options), depth, vocab_size=50)  # type: ignore[arg-type]


def add(engine: EngineCore, number: int, length: int, max_tokens: int) -> None:
    engine.add(0, generate([number + 1] * length, number, max_tokens=max_tokens))


# -- sizes that cannot work are refused ------------------------------------------------------------------------------


def test_a_volume_that_cannot_hold_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match="a volume of 67 cannot hold a request of 64 tokens; it takes 68"):
        PhasedPolicy(SMALL, max_volume=67)
    PhasedPolicy(SMALL, max_volume=68)
    config = SchedulerConfig(batching_policy="phased", phased_max_volume=100)
    with pytest.raises(ValueError, match="a volume of 100"):
        make_policy(config, Limits(4, 2048, 512, 64, 16))
    grown = fit(config, [Loaded("hash", 100, 8192, 0, 9999)])
    make_policy(config, grown)
    assert grown.max_model_len == 80
    with pytest.raises(ValueError, match="a volume of 100"):
        make_policy(config, replace(grown, max_model_len=81))
    for longest, least in ((None, 32), (64, 80), (65, 96)):  # before a model is loaded
        values: Any = {"batching_policy": "phased", "max_model_len": longest}
        with pytest.raises(ValueError, match=f"cannot hold a request of {longest or 1} tokens; it takes {least}"):
            SchedulerConfig(**values, phased_max_volume=least - 1)
        config = SchedulerConfig(**values, phased_max_volume=least)
        make_policy(config, fit(config, [Loaded("hash", 100, longest or 8192, 0, 9999)]))


def test_chunks_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="10 batched tokens are not whole blocks of 4"):
        PhasedPolicy(Limits(4, 10, 64, 64, 4))
    with pytest.raises(ValueError, match="must be a multiple of --block-size 16"):
        SchedulerConfig(batching_policy="phased", max_num_batched_tokens=100)


# -- reports of the runner -------------------------------------------------------------------------------------------


def prefilling() -> tuple[EngineCore, list[SchedulerOutput]]:
    """Return an engine with chunks 0 to 8 and 8 to 16 of a prompt of 16 in flight."""
    engine = core()
    add(engine, 0, 16, 4)
    return engine, plans(engine)


def report(slot: int, frontier: int) -> dict[str, bytes]:
    return {"progress_slots": pack([slot]), "progress_frontiers": pack([frontier])}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (report(1, 4), "slot 1, which is none of its prefills"),
        (report(0, 0), "0 tokens of slot 0: only 1 to 15 are possible"),
        (report(0, 16), "only 1 to 15 are possible"),
        ({"progress_slots": pack([0, 0]), "progress_frontiers": pack([4, 4])}, "names a slot twice"),
        ({"progress_slots": pack([0]), "progress_frontiers": b""}, "differ in length"),
        ({"progress_slots": pack([0]), "progress_frontiers": pack([-4])}, "negative"),
        ({"slots": pack([0]), "generations": pack([1]), "counts": pack([0])}, "not those of its plan"),
    ],
)
def test_impossible_reports_are_refused(fields: dict[str, bytes], says: str) -> None:
    engine, (first, _) = prefilling()
    with pytest.raises(UnknownResult, match=says):
        engine.on_result(result_of(first, **fields))


def test_decodes_report_no_progress() -> None:
    engine = core(depth=1)
    add(engine, 0, 3, 4)
    (prefill,) = plans(engine)
    engine.on_result(result_of(prefill))
    (decode,) = plans(engine)
    with pytest.raises(UnknownResult, match="none of its prefills"):
        engine.on_result(result_of(decode, **report(0, 4)))

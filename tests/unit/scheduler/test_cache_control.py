"""Pins of a lost scheduler. tests/e2e/test_cache_control.py has the requests of administrators."""

from protocol.block_names import NAME_BYTES
from protocol.steps import KeepPins, KeptPin
from services.config import SchedulerConfig
from services.scheduler.cache_control import CacheControl
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.policies import ChunkedPolicy


def test_a_pin_that_cannot_be_read_ends_and_the_others_go_on() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=32, block_size=4)
    core = EngineCore(limits, ChunkedPolicy(), 1, 50)
    kept = KeepPins(1, 4, [KeptPin("torn", "", bytes(NAME_BYTES + 1)), KeptPin("whole", "", bytes(NAME_BYTES))])
    CacheControl(SchedulerConfig()).restore(kept, core)
    assert [pin.id for pin in core.store.pins] == ["whole"]

"""The step between `execute_model` and `sample_tokens`: at most one, and with its own grammar bitmasks."""

import pytest

from protocol.steps import GrammarOutput, SchedulerOutput
from services.worker.backends.epoch_value import EpochValue
from services.worker.backends.pending_step import PendingStep, own_grammar


def plan(step_id: int, has_grammar: bool = False) -> SchedulerOutput:
    return SchedulerOutput(1, step_id, b"", b"", b"", b"", b"", has_structured_output_requests=has_grammar)


def test_a_second_step_is_refused_until_the_first_is_sampled() -> None:
    pending, first = PendingStep[SchedulerOutput](), plan(1)
    pending.put(1, first)
    for refused in (pending.require_none, lambda: pending.put(2, plan(2))):
        with pytest.raises(RuntimeError, match="step 1 was executed but never sampled"):
            refused()
    assert pending.take() is first
    pending.require_none()
    with pytest.raises(RuntimeError, match="no step was executed"):
        pending.take()


def test_a_step_is_sampled_with_its_own_grammar_only() -> None:
    own, other = GrammarOutput(1, 3, b"", memoryview(b"")), GrammarOutput(1, 2, b"", memoryview(b""))
    assert own_grammar(plan(3, has_grammar=True), own) is own
    assert own_grammar(plan(3), own) is None
    for grammar in (None, other):
        with pytest.raises(RuntimeError, match="step 3 needs its own grammar bitmask"):
            own_grammar(plan(3, has_grammar=True), grammar)


def test_a_value_of_an_epoch_is_refused_outside_of_it() -> None:
    value = EpochValue[str]("init_kv_cache")
    with pytest.raises(RuntimeError, match="init_kv_cache must be called first"):
        value.get()
    value.set("cache")
    assert value.get() == "cache"
    assert value.end() == "cache"
    assert value.end() is None
    with pytest.raises(RuntimeError, match="init_kv_cache must be called first"):
        value.get()

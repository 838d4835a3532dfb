"""The service with a runner that computes on the thread that reads messages, as vLLM's does on the CPU: between the
forward pass of a step and its sampling, the service waits for masks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.codec import pack, unpack
from protocol.membership import RankLost
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepFault
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.output.step_output import StepOutput
from services.worker.runner import Identity
from services.worker.service import EXIT_FAULT
from tests.integration.worker.scripted import ScriptedWorkerServer, worker_thread
from tests.integration.worker.test_epochs import answers
from tests.unit.worker.plans import GREEDY, VOCAB, PlanBuilder, alone, grammar_output, one_request, prompt, ragged

ONLY_FIVE = [1 << 5] + [0] * (-(-VOCAB // 32) - 1)


class CallingThreadRunner(SimRunner):
    """The simulator with this interface. It records calls."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config, full_check=True)
        self.calls: list[str] = []
        self.error: Exception | None = None
        """Raised by the next sampling."""
        self.exit_status: Callable[[], int] = int
        """Waits for the worker to end by itself."""

    def identify(self) -> Identity:
        return replace(super().identify(), waits_for_masks=False)

    def execute_model(self, step: SchedulerOutput) -> None:
        self.calls.append(f"execute {step.step_id}")
        super().execute_model(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepOutput:
        self.calls.append(f"sample with {[] if grammar is None else unpack(grammar.slots).tolist()}")
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if grammar is not None:
            super().add_masks(grammar)
        return super().sample_tokens(None)

    def add_masks(self, grammar: GrammarOutput) -> None:
        raise AssertionError("masks are given with the sampling")


@pytest.fixture
def runner(scheduler: ScriptedWorkerServer, tmp_path: Path) -> Iterator[CallingThreadRunner]:
    """A runner whose worker serves epoch 1."""
    made: list[CallingThreadRunner] = []

    def make(config: WorkerConfig) -> CallingThreadRunner:
        made.append(CallingThreadRunner(config))
        return made[0]

    with worker_thread(scheduler, tmp_path, make) as worker:
        scheduler.serve()
        made[0].exit_status = worker.exit_status
        made[0].calls.clear()  # of the canary step
        yield made[0]


def without_result(scheduler: ScriptedWorkerServer) -> bool:
    """Let time pass, in which no other message than a heartbeat may arrive."""
    scheduler.wait_heartbeat()
    return not any(isinstance(message, ModelRunnerOutput) for message in scheduler.received)


def test_a_step_waits_for_its_masks(scheduler: ScriptedWorkerServer, runner: CallingThreadRunner) -> None:
    plans = PlanBuilder()
    a, b = plans.admit(prompt(1, 6)), plans.admit(prompt(2, 6))
    first = plans.step(a, b, masked=[a, b])
    scheduler.send(first)
    assert without_result(scheduler)
    scheduler.send(grammar_output(first, [b.slot, a.slot], pack(ONLY_FIVE) * 2))
    (result,) = scheduler.results(1)
    assert isinstance(result, ModelRunnerOutput)
    assert ragged(result) == {a.slot: [5], b.slot: [5]}
    assert runner.calls == ["execute 1", f"sample with {[b.slot, a.slot]}"]


def test_a_later_plan_ends_the_wait(scheduler: ScriptedWorkerServer, runner: CallingThreadRunner) -> None:
    plans = PlanBuilder()
    a, b = plans.admit(prompt(1, 6)), plans.admit(prompt(2, 6))
    first = plans.step(a, masked=[a])
    scheduler.send(first)
    assert without_result(scheduler)
    scheduler.send(plans.step(b), grammar_output(first, [a.slot], pack(ONLY_FIVE)), plans.step(b))
    results = [ragged(result) for result in scheduler.results(3) if isinstance(result, ModelRunnerOutput)]
    assert [result[b.slot][0] for result in results[1:]] == alone(prompt(2, 6), GREEDY, 2)
    # The masks may be readable with the plan before them
    used = [a.slot] if results[0].get(a.slot) else []
    assert runner.calls[:3] == ["execute 1", f"sample with {used}", "execute 2"]
    assert results[0].get(a.slot, []) == [5] * len(used)


def test_an_epoch_ends_while_a_step_waits(scheduler: ScriptedWorkerServer, runner: CallingThreadRunner) -> None:
    plans, request = one_request()
    scheduler.send(plans.step(request, masked=[request]), plans.step(request, masked=[request]))
    assert without_result(scheduler)
    scheduler.end(1)
    scheduler.serve(2)
    assert "execute 2" not in runner.calls
    assert answers(scheduler, 2, 3) == alone(prompt(1, 6), GREEDY, 3)


def test_nothing_is_executed_behind_a_step_without_memory(
    scheduler: ScriptedWorkerServer, runner: CallingThreadRunner
) -> None:
    plans = PlanBuilder()
    a, b = plans.admit(prompt(1, 6)), plans.admit(prompt(2, 6))
    runner.error = MemoryError("out of memory")
    scheduler.send(plans.step(a, b, masked=[a]), plans.step(b))
    lost = scheduler.next_message()
    assert isinstance(lost, RankLost)
    assert (lost.out_of_memory, lost.step_id) == (True, 1)
    assert runner.calls == ["execute 1", "sample with []"]
    scheduler.end(1)
    scheduler.serve(2)
    assert answers(scheduler, 2, 3) == alone(prompt(1, 6), GREEDY, 3)


def test_nothing_is_executed_behind_a_failed_step(scheduler: ScriptedWorkerServer, runner: CallingThreadRunner) -> None:
    plans = PlanBuilder()
    a, b = plans.admit(prompt(1, 6)), plans.admit(prompt(2, 6))
    runner.error = RuntimeError("no sample")
    scheduler.send(plans.step(a, b, masked=[a]), plans.step(b))
    assert scheduler.results(1) == [StepFault(1, 1, "RuntimeError: no sample")]
    assert runner.exit_status() == EXIT_FAULT
    assert runner.calls == ["execute 1", "sample with []"]

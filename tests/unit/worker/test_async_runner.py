"""The simulator's runner, whose device does nothing before a result is waited for, against the rules
(docs/invariants.md)."""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from protocol.sampling import SamplingParams
from services.config import SchedulerConfig, WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.backends.sim.model.oracle import OracleError
from services.worker.backends.sim.output.step_output import StepOutput
from services.worker.batch.slots import Rows
from services.worker.runner import MAX_STEPS_IN_FLIGHT, Output
from tests.unit.worker.plans import (
    BLOCK,
    GREEDY,
    VOCAB,
    PlanBuilder,
    SlotRequest,
    alone,
    hold,
    prompt,
    sampled,
    sim_runner,
    tokens,
)
from tests.unit.worker.virtual_clock import VirtualClock


class AsyncRunner:
    """A runner, its device, which is as late as possible, and plans for it."""

    def __init__(self) -> None:
        self.device, self.plans = SimDevice(), PlanBuilder()
        self.runner: SimRunner = sim_runner(make_device=lambda: self.device)

    def launch(self, *rows: SlotRequest | tuple[SlotRequest, int]) -> StepOutput:
        hold(self.device)
        self.runner.execute_model(self.plans.step(*rows))
        return self.runner.sample_tokens(None)


@pytest.fixture
def host() -> Iterator[AsyncRunner]:
    host = AsyncRunner()
    yield host
    host.runner.shutdown()


def test_launching_never_waits_for_the_step_before(host: AsyncRunner) -> None:
    """Launch without waiting: before the first one is done, as many steps are launched as can be in flight."""
    request = host.plans.admit(prompt(1, 6))
    outputs = [host.launch(request) for _ in range(MAX_STEPS_IN_FLIGHT)]
    assert not any(output.forward.passed for output in outputs)
    results = [output.get() for output in outputs]
    assert [result.step_id for result in results] == [*range(1, MAX_STEPS_IN_FLIGHT + 1)]
    assert [tokens(result)[request.slot] for result in results] == alone(prompt(1, 6), GREEDY, MAX_STEPS_IN_FLIGHT)


def test_no_deeper_batch_queue_can_be_configured() -> None:
    SchedulerConfig(batch_queue_depth=MAX_STEPS_IN_FLIGHT)
    with pytest.raises(ValueError, match="batch_queue_depth"):
        SchedulerConfig(batch_queue_depth=MAX_STEPS_IN_FLIGHT + 1)


@pytest.mark.parametrize(("host_ms", "device_ms"), [(2.0, 5.0), (5.0, 2.0)])
@pytest.mark.parametrize("depth", [1, 2])
def test_host_and_device_overlap(host_ms: float, device_ms: float, depth: int) -> None:
    """With two steps in flight a step costs the longer of host and device time, with one it costs the sum."""
    clock, steps = VirtualClock(), 20
    runner, plans = sim_runner(step_ms=device_ms, make_device=lambda: SimDevice(clock)), PlanBuilder()
    request = plans.admit(prompt(1, 6))
    in_flight: deque[Output] = deque()
    results = []
    began = clock.now
    for _ in range(steps):
        clock.now += host_ms / 1e3
        runner.execute_model(plans.step(request))
        in_flight.append(runner.sample_tokens(None))
        if len(in_flight) == depth:
            results.append(in_flight.popleft().get())
    results += [output.get() for output in in_flight]
    sum_, longer = host_ms + device_ms, max(host_ms, device_ms)
    expected = steps * sum_ if depth == 1 else (steps - 1) * longer + sum_
    assert 1e3 * (clock.now - began) == pytest.approx(expected)
    gaps = [after.times.forward_began - before.times.sampled for before, after in pairwise(results)]
    assert max(gaps) == pytest.approx((host_ms if depth == 1 else max(0, host_ms - device_ms)) / 1e3)


def test_later_plans_do_not_change_a_result(host: AsyncRunner) -> None:
    """Immutable result: before it is read, the next plan assigns its slot to another request and reorders the rows."""
    a, b = host.plans.admit(prompt(1, 6), sampled(3)), host.plans.admit(prompt(2, 7), sampled(4, top_k=3))
    host.launch(a, b).get()
    first = host.launch(a, b)  # reads what the step before wrote to the blocks of `a`
    host.plans.release(a, reuse_slot=True)
    c = host.plans.admit(prompt(3, 9), GREEDY)
    assert c.slot == a.slot
    second = host.launch(c, b)
    assert tokens(first.get()) == {
        a.slot: alone(prompt(1, 6), sampled(3), 2)[1],
        b.slot: alone(prompt(2, 7), sampled(4, top_k=3), 2)[1],
    }
    assert tokens(second.get())[c.slot] == alone(prompt(3, 9), GREEDY, 1)[0]


def test_a_step_computes_with_its_own_columns(host: AsyncRunner) -> None:
    """Host-buffer rule: no step has begun while the next ones are prepared, with other rows in another order."""
    requests = [host.plans.admit(prompt(seed, 5 + seed), sampled(seed)) for seed in range(4)]
    outputs = []
    for number in range(6):
        order = requests[number % 4 :] + requests[: number % 4]
        outputs.append(host.launch(*order[: 4 - number % 2]))
    results = [tokens(output.get()) for output in outputs]
    for seed, request in enumerate(requests):
        got = [result[request.slot] for result in results if request.slot in result]
        assert got == alone(prompt(seed, 5 + seed), sampled(seed), len(got))


def test_sampling_rows_yield_one_token_and_others_none(host: AsyncRunner) -> None:
    """Samples bit."""
    a, b = host.plans.admit(prompt(1, 3 * BLOCK)), host.plans.admit(prompt(2, 5))
    outputs = [host.launch((a, BLOCK), b), host.launch(b, (a, BLOCK)), host.launch((a, BLOCK), b), host.launch(a)]
    assert [set(tokens(o.get())) for o in outputs] == [{b.slot}, {b.slot}, {a.slot, b.slot}, {a.slot}]


def test_an_unknown_token_is_never_an_index(host: AsyncRunner) -> None:
    """Valid ids: lost feedback raises in the step that needs it."""
    request = host.plans.admit(prompt(1, 6))
    first = host.launch(request)
    first.get()
    host.runner.epoch.oracle.history[request.slot, request.start] = 0
    with pytest.raises(OracleError, match="before it was sampled"):
        host.launch(request).get()


@pytest.mark.parametrize("depth", [1, 2, 3, MAX_STEPS_IN_FLIGHT])
def test_rows_that_join_leave_skip_and_reorder_get_their_own_feedback(host: AsyncRunner, depth: int) -> None:
    """Slot history: random batches, results read late; each request gets the tokens that it gets alone."""
    rng = np.random.default_rng(depth)
    running: dict[int, SlotRequest] = {}
    prompts: dict[int, tuple[list[int], SamplingParams]] = {}
    got: dict[int, list[int]] = {}
    in_flight: deque[tuple[Output, dict[int, int]]] = deque()
    for step in range(80):
        if len(running) < 5 and rng.random() < 0.4 and host.plans.has_free_slot:
            params = sampled(step) if rng.random() < 0.5 else GREEDY
            prompts[step] = (prompt(step, int(rng.integers(1, 14))), params)
            running[step], got[step] = host.plans.admit(*prompts[step]), []
        done = [n for n, r in running.items() if r.known - len(prompts[n][0]) >= 9]
        for n in done:
            if not any(running[n].slot in rows for _, rows in in_flight):  # the fence
                host.plans.release(running.pop(n))
        candidates = [n for n in running if n not in done]
        chosen = [int(n) for n in rng.permutation(candidates)[: rng.integers(0, 5)]]
        if chosen:
            rows = [(running[n], int(rng.integers(1, running[n].left + 1))) for n in chosen]
            in_flight.append((host.launch(*rows), {running[n].slot: n for n in chosen}))
        while in_flight and (len(in_flight) >= depth or not chosen):
            output, names = in_flight.popleft()
            for slot, token in tokens(output.get()).items():
                got[names[slot]].append(token)
    finished = [n for n, out in got.items() if len(out) >= 9]
    assert len(finished) > 3
    for n, out in got.items():
        assert out == alone(*prompts[n], len(out))


def test_a_canary_changes_no_answer(host: AsyncRunner) -> None:
    """Single pending state: after a step through both calls, nothing is pending and the first answer is right. The next
    step notices one that was only executed."""
    warm_up = host.plans.admit([0])
    host.launch(warm_up).get()
    host.runner.release(np.array([warm_up.slot], np.int32))
    with pytest.raises(RuntimeError, match="no step was executed"):
        host.runner.sample_tokens(None)
    host.plans.free_slot_first(warm_up.slot)
    request = host.plans.admit(prompt(1, 6))
    assert tokens(host.launch(request).get()) == {warm_up.slot: alone(prompt(1, 6), GREEDY, 1)[0]}
    host.runner.execute_model(host.plans.step(request))
    with pytest.raises(RuntimeError, match="never sampled"):
        host.runner.execute_model(host.plans.step(request))


def test_a_forward_pass_that_fails_on_the_device_is_that_steps_error(host: AsyncRunner) -> None:
    """Steps launched before it are not affected; steps after it fail as well."""
    a = host.plans.admit(prompt(1, 6))
    first = host.launch(a)
    broken = host.plans.admit([VOCAB])
    second, third = host.launch(a, broken), host.launch(a)
    assert tokens(first.get()) == {a.slot: alone(prompt(1, 6), GREEDY, 1)[0]}
    for output in (second, third):
        with pytest.raises(OracleError, match=f"token {VOCAB} is not among"):
            output.get()


@pytest.mark.parametrize(
    ("flags", "whole_model_ms"),
    [
        ({}, 0.0),
        ({"sim_step_ms": 7.0}, 7.0),
        ({"sim_prefill_token_us": 100.0}, 4.1),
        ({"sim_decode_us": 1000.0}, 2.0),
        ({"sim_weights_ms": 3.0}, 3.0),
        ({"sim_weights_ms": 3.0, "sim_step_ms": 7.0}, 10.0),
        ({"sim_weights_ms": 3.0, "sim_decode_us": 1000.0}, 3.0),
        ({"sim_weights_ms": 3.0, "sim_decode_us": 1000.0, "sim_prefill_token_us": 100.0}, 6.1),
        ({"sim_context_token_ns": 1000.0, "sim_weights_ms": 3.0}, 3.0 + 0.091),
    ],
)
@pytest.mark.parametrize("stages", [1, 4])
def test_the_cost_model(flags: dict[str, float], whole_model_ms: float, stages: int) -> None:
    """40 positions of a prompt, the last one of a prompt after a prefix hit, and two decoding rows."""
    zero = {"sim_step_ms": 0.0, "sim_prefill_token_us": 0.0}
    cost = CostModel(WorkerConfig(backend="sim", **(zero | flags)), stages)  # type: ignore[arg-type]
    slots, ones = np.arange(4, dtype=np.int32), np.ones(4, np.int32)
    starts, counts = np.array([0, 9, 10, 29], np.int32), np.array([40, 1, 1, 1], np.int32)
    rows = Rows(slots, ones, starts, counts, np.ones(4, np.bool_), 0 * ones)
    num_prompt = np.array([40, 10, 10, 3], np.int32)
    assert cost.step(rows, num_prompt) == pytest.approx(whole_model_ms * 1e-3 / stages)

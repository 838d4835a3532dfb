"""Requests, blocks and plans for a runner under test: the scheduler's side of a step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol.codec import pack, unpack
from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.rows import ResultRows, StepRows
from protocol.sampling import Pooling, SamplingParams
from protocol.steps import GrammarOutput, ModelRunnerOutput, NewRequest, SchedulerOutput, StepTimes
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.backends.sim.output.step_output import StepOutput
from services.worker.runner import Output

BLOCK, SLOTS, BLOCKS, CONTEXT, VOCAB = 4, 8, 256, 128, 97
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def sampled(seed: int, **params: object) -> SamplingParams:
    values: dict[str, object] = {"max_tokens": 64, "temperature": 1.0, "seed": seed} | params
    return SamplingParams(**values)  # type: ignore[arg-type]


def sim_runner(
    step_ms: float = 0.0,
    speculation: Speculation | None = None,
    flags: dict[str, object] | None = None,
    max_num_batched_tokens: int = 512,
    **options: object,
) -> SimRunner:
    """Return a loaded runner of the sizes above whose steps take `step_ms`.

    Args:
        flags: settings of its configuration.
        options: further arguments of `SimRunner`.
    """
    given = {"sim_vocab_size": VOCAB, "sim_step_ms": step_ms, "sim_prefill_token_us": 0} | (flags or {})
    config = WorkerConfig(backend="sim", **given)  # type: ignore[arg-type]
    runner = SimRunner(config, **{"full_check": True, **options})  # type: ignore[arg-type]
    assignment = Assignment(1, 0, 1, BLOCK, SLOTS, max_num_batched_tokens, CONTEXT, speculation=speculation)
    loaded = runner.load(assignment, lambda *_: None)
    assert loaded.simulated
    assert loaded.vocab_size == VOCAB
    runner.init_kv_cache(InitializeCache(BLOCKS, CONTEXT))
    return runner


def hold(device: SimDevice) -> None:
    """Let the device do nothing that is launched from now on before somebody waits for an event behind it."""
    device.wait_for_masks(lambda: 0.0)


@dataclass
class SlotRequest:
    """A request as the scheduler sees it. `known` and `start` count every draft in flight as accepted."""

    slot: int
    generation: int
    prompt: list[int]
    params: SamplingParams
    blocks: list[int]
    start: int = 0
    """Positions planned."""
    known: int = 0
    """Tokens confirmed or promised."""
    outputs: list[int] = field(default_factory=list)
    pooling: Pooling = Pooling.NONE
    num_prompt: int = 0
    placeholders: int = 0
    """Drafts that its last row is to propose."""

    def __post_init__(self) -> None:
        self.known = len(self.prompt)
        self.num_prompt = self.num_prompt or len(self.prompt)

    @property
    def left(self) -> int:
        """Positions up to the last token known or promised."""
        return self.known - self.start

    def settle(self, planned: int, tokens: list[int]) -> None:
        """Apply the tokens of a row with `planned` drafts: lower both counts by the rejected drafts."""
        rejected = planned + 1 - len(tokens)
        self.start -= rejected
        self.known -= rejected
        self.outputs += tokens


class PlanBuilder:
    """Builds correct plans. A test that needs a wrong plan changes the request or the plan."""

    def __init__(self) -> None:
        self._free_blocks = list(range(BLOCKS - 1, 0, -1))
        self._free_slots = list(range(SLOTS))
        self._generations = [0] * SLOTS
        self._entering: list[SlotRequest] = []
        self._released: list[int] = []
        self.step_id = 0

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def admit(
        self,
        prompt: list[int],
        params: SamplingParams = GREEDY,
        hit: int = 0,
        share: SlotRequest | None = None,
        pooling: Pooling = Pooling.NONE,
        num_prompt: int = 0,
    ) -> SlotRequest:
        """Return a request that enters with the next plan.

        Args:
            hit: number of first positions that are a prefix hit on the blocks of `share`.
            num_prompt: tokens behind the first `num_prompt` are outputs; 0: none is.
        """
        slot = self._free_slots.pop(0)
        self._generations[slot] += 1
        blocks = share.blocks[: hit // BLOCK] if share else []
        request = SlotRequest(
            slot,
            self._generations[slot],
            prompt,
            params,
            list(blocks),
            start=hit,
            pooling=pooling,
            num_prompt=num_prompt,
        )
        self._grow(request, len(prompt))
        self._entering.append(request)
        return request

    def release(self, request: SlotRequest, reuse_slot: bool = False) -> None:
        """Release the slot with the next plan. It becomes the last free slot, or the first with `reuse_slot`."""
        self._released.append(request.slot)
        if reuse_slot:
            self.free_slot_first(request.slot)
        else:
            self._free_slots.append(request.slot)

    def free_slot_first(self, slot: int) -> None:
        """Make `slot` the next one to be assigned, without releasing it in a plan."""
        self._free_slots.insert(0, slot)

    def _grow(self, request: SlotRequest, positions: int) -> list[int]:
        fresh = []
        while len(request.blocks) * BLOCK < positions:
            fresh.append(self._free_blocks.pop())
            request.blocks.append(fresh[-1])
        return fresh

    def step(
        self, *rows: SlotRequest | tuple[SlotRequest, int], masked: Sequence[SlotRequest] = (), propose: int = 0
    ) -> SchedulerOutput:
        """Return a plan with rows in the given order.

        Args:
            rows: a request alone computes all that it can, drafts included; else (request, positions).
            masked: requests whose rows are constrained, in the order of the rows.
            propose: drafts that each sampling row proposes for its next row.
        """
        self.step_id += 1
        entering, self._entering = self._entering, []
        new = [
            NewRequest(
                r.slot, r.generation, pack(r.prompt), r.num_prompt, pack(r.blocks), r.params, r.pooling
            )
            for r in entering
        ]  # fmt: skip
        columns: list[tuple[int, int, int, int, int, int]] = []
        growth: list[tuple[int, int]] = []
        chosen = [row if isinstance(row, tuple) else (row, row.left + row.placeholders) for row in rows]
        for request, count in chosen:
            growth += [(request.slot, block) for block in self._grow(request, request.start + count)]
            samples, drafts = count >= request.left, max(0, count - request.left)
            assert drafts <= request.placeholders
            columns.append((request.slot, request.generation, request.start, count, samples, drafts))
            request.start += count
            request.known += samples + drafts
            request.placeholders = propose if samples else 0
        slots, generations, starts, counts, samples_column, drafts_column = (
            zip(*columns, strict=True) if columns else [()] * 6
        )
        released, self._released = self._released, []
        return SchedulerOutput(
            1, self.step_id, pack(slots), pack(generations), pack(starts), pack(counts), bytes(samples_column), new,
            pack([slot for slot, _ in growth]), pack([block for _, block in growth]), pack(released),
            bool(masked), pack(drafts_column) if any(drafts_column) else b"", propose,
            masked=pack([request.slot for request in masked]),
        )  # fmt: skip


class PlannedRunner:
    """A runner, plans for it, and results that are read when `depth` steps are in flight."""

    def __init__(self, runner: SimRunner, depth: int = 1) -> None:
        self.runner, self.plans, self.depth = runner, PlanBuilder(), depth
        self.steps: list[SchedulerOutput] = []
        self.results: list[ModelRunnerOutput] = []
        self.in_flight: deque[tuple[StepOutput, dict[int, SlotRequest]]] = deque()
        self.verified: list[tuple[int, int]] = []
        """(drafted, accepted) of each row that sampled."""

    def launch(self, *requests: SlotRequest, propose: int = 0) -> None:
        """Launch a step whose sampling rows `propose` that many drafts; read the oldest of `depth` results."""
        rooms = [CONTEXT - 1 - request.start - request.left for request in requests]
        rows = [(r, r.left + min(r.placeholders, room)) for r, room in zip(requests, rooms, strict=True)]
        self.steps.append(self.plans.step(*rows, propose=propose))
        self.runner.execute_model(self.steps[-1])
        self.in_flight.append((self.runner.sample_tokens(None), {request.slot: request for request in requests}))
        while len(self.in_flight) >= self.depth:
            self.apply_oldest()

    def apply_oldest(self) -> None:
        output, requests = self.in_flight.popleft()
        result, planned = result_of(output), planned_drafts(self.steps[len(self.results)])
        drafted = unpack(result.drafted).tolist() or [0] * len(planned)
        for (slot, found), verified in zip(ragged(result).items(), drafted, strict=True):
            assert 1 <= len(found) <= 1 + verified <= 1 + planned[slot], "row width"
            self.verified.append((verified, len(found) - 1))
            requests[slot].settle(planned[slot], found)
        self.results.append(result)

    def drain(self) -> None:
        while self.in_flight:
            self.apply_oldest()


def one_request() -> tuple[PlanBuilder, SlotRequest]:
    """Return a builder of plans and its first request, which has six tokens."""
    plans = PlanBuilder()
    return plans, plans.admit(prompt(1, 6))


def bits(*allowed: int) -> bytes:
    """Return a mask of these tokens."""
    row = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    row[list(allowed)] = 1
    return np.packbits(row, bitorder="little").tobytes()


def grammar_output(
    plan: SchedulerOutput, slots: list[int], bitmask: bytes = b"", counts: list[int] | None = None
) -> GrammarOutput:
    """Return the grammar bitmasks of a plan.

    Args:
        bitmask: int32[masks, words] of all slots.
        counts: masks of each slot; None: one each.
    """
    packed = b"" if counts is None else pack(counts)
    return GrammarOutput(plan.epoch, plan.step_id, pack(slots), memoryview(bitmask), packed)


def run(runner: SimRunner, plan: SchedulerOutput) -> dict[int, int]:
    """Run one step synchronously. Return the token of each sampled slot."""
    runner.execute_model(plan)
    return tokens(runner.sample_tokens(None).get())


def result_of(output: Output) -> ModelRunnerOutput:
    """Return the result of a step on the output rank."""
    result = output.get()
    assert isinstance(result, ModelRunnerOutput)
    return result


def tokens(result: ModelRunnerOutput | StepTimes) -> dict[int, int]:
    """Return the token of each sampled slot; every row has one."""
    assert isinstance(result, ModelRunnerOutput)
    assert unpack(result.counts).tolist() == [1] * (len(result.slots) // 4)
    return dict(zip(unpack(result.slots).tolist(), unpack(result.token_ids).tolist(), strict=True))


def ragged(result: ModelRunnerOutput) -> dict[int, list[int]]:
    """Return the tokens of each sampled slot."""
    rows, at, found = ResultRows.from_message(result), 0, {}
    for slot, count in zip(rows.slots.tolist(), rows.counts.tolist(), strict=True):
        found[slot] = rows.token_ids[at : at + count].tolist()
        at += count
    return found


def planned_drafts(plan: SchedulerOutput) -> dict[int, int]:
    """Return the planned drafts of each slot that samples."""
    rows = StepRows.from_message(plan).rows
    return dict(zip(rows.slots[rows.samples].tolist(), rows.drafts[rows.samples].tolist(), strict=True))


def alone(prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """Return the tokens that a request gets alone, one step in flight; it must get the same in any batch."""
    runner, plans = sim_runner(), PlanBuilder()
    request = plans.admit(prompt, params)
    outputs = [run(runner, plans.step(request))[request.slot] for _ in range(count)]
    runner.shutdown()
    return outputs


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]

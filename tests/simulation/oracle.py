"""Simulated worker: an oracle that verifies every KV position it reads (spec 7). Nothing here computes a model.

Each physical KV position stores the hash of the prefix it stands for, and a token is a pure function of that hash (and
of the seed, for sampled requests). So one wrong block, position, slot or fed-back token raises, or changes the answer.
The worker knows only what plan messages told it. Its state is a function of their order alone, so it executes a plan
as it receives it; *when* each pipeline stage runs the step (`Pipeline`) and the result travels back is up to the test.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from protocol.codec import Decoder, encode, pack, unpack
from protocol.requests import FinishReason
from protocol.sampling import SamplingParams
from protocol.steps import ModelRunnerOutput, NewRequest, ReleaseSlots, SchedulerOutput, StepMessage
from services.scheduler.limits import Limits

_MASK = (1 << 64) - 1
ROOT = 0x243F6A8885A308D3
_MESSAGES: Decoder[StepMessage] = Decoder(StepMessage)


class OracleError(AssertionError):
    """A plan contradicts what the worker knows, or a KV position does not hold what its reader believes."""


def extend(prefix: int, token: int) -> int:
    """Hash of a prefix with one more token."""
    mixed = ((prefix ^ (token + 0x9E3779B9)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def sample(prefix: int, params: SamplingParams, vocab: int) -> int:
    """The token after a prefix; greedy requests do not depend on the seed."""
    noise = prefix if params.temperature == 0 else extend(prefix, params.seed)
    return ((noise * 0xFF51AFD7ED558CCD & _MASK) >> 33) % vocab


@dataclass(frozen=True)
class Answer:
    """What a request must produce at any depth and in any company."""

    tokens: list[int]
    """All output tokens, those delivered before a replay included."""
    reason: FinishReason
    stop_reason: int | None


def reference(prompt: list[int], params: SamplingParams, max_model_len: int, vocab: int) -> Answer:
    """A pure function of the request alone: no blocks, no batch, no scheduler."""
    prefix = ROOT
    for token in prompt:
        prefix = extend(prefix, token)
    tokens: list[int] = []
    while True:
        token = sample(prefix, params, vocab)
        tokens.append(token)
        if len(tokens) >= params.min_tokens:
            if token in params.eos_token_ids:
                return Answer(tokens, FinishReason.STOP, None)
            if token in params.stop_token_ids:
                return Answer(tokens, FinishReason.STOP, token)
        if len(tokens) >= params.max_tokens or len(prompt) + len(tokens) >= max_model_len:
            return Answer(tokens, FinishReason.LENGTH, None)
        prefix = extend(prefix, token)


@dataclass
class _Slot:
    generation: int
    params: SamplingParams
    tokens: list[int]
    table: list[int]
    prefixes: list[int] = field(default_factory=list)
    """prefixes[i] is the hash of tokens[: i + 1], the worker's own belief."""
    computed: int | None = None
    """None until the first row says where the cached prefix ends."""
    sampled: int = 0
    """The step that sampled the last token; 0: a plan brought it."""


class OracleWorker:
    def __init__(self, limits: Limits, vocab: int, epoch: int = 1) -> None:
        num_blocks, block_size = limits.num_blocks, limits.block_size
        self.num_slots, self.num_blocks, self.block_size = limits.num_slots, num_blocks, block_size
        self.vocab, self.epoch, self.stages = vocab, epoch, limits.stages
        self.confirmed = 0
        """The last step whose tokens the scheduler knew when it formed the plan that comes next."""
        self.needs = 0
        """The newest step that sampled an input of the last plan; 0: none did."""
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        """KV by block and offset; None is poison: given away and not written since."""
        self.slots: dict[int, _Slot] = {}
        self._generations: dict[int, int] = {}
        self._last_step = 0

    def receive(self, frame: bytes) -> bytes | None:
        """Executes one message. Returns the result of a step, encoded."""
        message = _MESSAGES.decode(frame)
        if isinstance(message, ReleaseSlots):
            self._release(message.slots)
            return None
        if not isinstance(message, SchedulerOutput):
            raise OracleError(f"unexpected {type(message).__name__}")
        return encode(self._execute(message))

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._demand(plan.epoch == self.epoch, f"epoch {plan.epoch}")
        self._demand(plan.step_id == self._last_step + 1, f"step {plan.step_id} after {self._last_step}")
        self._last_step, self.needs = plan.step_id, 0
        self._release(plan.released)
        for new in plan.new:
            self._enter(new)
        self._append_blocks(plan)
        columns = (unpack(c).tolist() for c in (plan.slots, plan.generations, plan.starts, plan.counts))
        rows = list(zip(*columns, list(plan.samples), strict=True))
        self._demand(bool(rows), "an empty plan was sent")
        self._demand(len({row[0] for row in rows}) == len(rows), "a slot has two rows in one step")
        for slot, generation, start, count, samples in rows:
            self._write(slot, generation, start, count, bool(samples))
        for slot, _, start, count, _ in rows:  # every row has written before any row reads, as in each layer
            self._read(slot, start + count)
        return self._sample(plan, [(row[0], row[1]) for row in rows if row[4]])

    def _release(self, slots: bytes) -> None:
        for slot in unpack(slots).tolist():
            self._demand(slot in self.slots, f"slot {slot} was released but is empty")
            del self.slots[slot]

    def _enter(self, new: NewRequest) -> None:
        slot = new.slot
        self._demand(0 <= slot < self.num_slots and slot not in self.slots, f"slot {slot} is taken")
        self._demand(
            new.generation > self._generations.get(slot, 0), f"slot {slot}: generation {new.generation}"
        )
        self._generations[slot] = new.generation
        tokens, prefix = unpack(new.token_ids).tolist(), ROOT
        entered = _Slot(new.generation, new.params, tokens, unpack(new.block_ids).tolist())
        for token in tokens:
            prefix = extend(prefix, token)
            entered.prefixes.append(prefix)
        self.slots[slot] = entered

    def _append_blocks(self, plan: SchedulerOutput) -> None:
        pairs = zip(unpack(plan.block_slots).tolist(), unpack(plan.block_ids).tolist(), strict=True)
        for slot, block in pairs:
            self.slots[slot].table.append(block)
            self._poison(block)

    def _poison(self, block: int) -> None:
        self.kv[block] = [None] * self.block_size

    def _write(self, slot: int, generation: int, start: int, count: int, samples: bool) -> None:
        self._demand(slot in self.slots, f"slot {slot} is empty")
        s, size, end = self.slots[slot], self.block_size, start + count
        self._demand(s.generation == generation, f"slot {slot}: generation {generation}, not {s.generation}")
        if s.computed is None:  # what lies behind the cached prefix came fresh from the pool
            self._demand(start % size == 0 and start < len(s.tokens), f"slot {slot} starts at {start}")
            for block in s.table[start // size :]:
                self._poison(block)
            s.computed = start
        self._demand(start == s.computed, f"slot {slot} starts at {start}, its KV ends at {s.computed}")
        self._demand(
            count >= 1 and end <= len(s.tokens), f"slot {slot}: {count} from {start} of unknown tokens"
        )
        self._demand(end <= len(s.table) * size, f"slot {slot}: no block for position {end - 1}")
        self._demand(
            samples == (end == len(s.tokens)), f"slot {slot}: samples={samples} at {end}/{len(s.tokens)}"
        )
        if end == len(s.tokens) and s.sampled:
            self.needs = max(self.needs, s.sampled)
            self._demand(
                s.sampled <= self.confirmed or self._last_step - s.sampled >= self.stages,
                f"slot {slot} needs what step {s.sampled} sampled, which {self.stages} stages cannot have back by then",
            )
        for position in range(start, end):
            self.kv[s.table[position // size]][position % size] = s.prefixes[position]
        s.computed = end

    def _read(self, slot: int, end: int) -> None:
        s, size = self.slots[slot], self.block_size
        for index, first in enumerate(range(0, end, size)):
            last = min(first + size, end)
            if self.kv[s.table[index]][: last - first] != s.prefixes[first:last]:
                raise OracleError(
                    f"slot {slot} reads block {s.table[index]} for positions {first} to {last - 1}: "
                    f"foreign or unwritten KV"
                )

    def _sample(self, plan: SchedulerOutput, rows: list[tuple[int, int]]) -> ModelRunnerOutput:
        tokens = []
        for slot, _ in rows:
            s = self.slots[slot]
            token = sample(s.prefixes[-1], s.params, self.vocab)
            s.tokens.append(token)
            s.prefixes.append(extend(s.prefixes[-1], token))
            s.sampled = plan.step_id
            tokens.append(token)
        return ModelRunnerOutput(
            plan.epoch,
            plan.step_id,
            pack([slot for slot, _ in rows]),
            pack([generation for _, generation in rows]),
            pack(np.ones(len(rows), np.int32)),
            pack(tokens),
        )

    def _demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise OracleError(f"step {self._last_step}: {otherwise}")


class Pipeline:
    """Which stage has run which step: each takes them in order, one per tick, and the ids that the last one sampled are
    at the first one when the next tick begins."""

    def __init__(self, stages: int) -> None:
        self.ran = [0] * stages
        """The last step that each stage has run."""
        self.stalls = 0
        """Ticks in which the first stage had a step and lacked a sampled id."""
        self._waiting: deque[int] = deque()
        """For each step that has not entered: the step whose ids it needs."""
        self._results: deque[bytes] = deque()

    def enter(self, needs: int, result: bytes) -> None:
        self._waiting.append(needs)
        self._results.append(result)

    @property
    def busy(self) -> bool:
        return bool(self._results)

    def tick(self, running: Collection[int] | None = None) -> bytes | None:
        """Lets all stages, or those in `running`, take their next step. Returns what left the last stage."""
        last, before = len(self.ran) - 1, list(self.ran)
        for stage in range(len(self.ran)) if running is None else running:
            if stage:
                self.ran[stage] += before[stage - 1] > before[stage]
            elif self._waiting and self._waiting[0] <= before[last]:
                self._waiting.popleft()
                self.ran[0] += 1
            else:
                self.stalls += bool(self._waiting)
        return self._results.popleft() if self.ran[last] > before[last] else None

    def take_results(self) -> list[bytes]:
        """Everything that was under way, as if it were run to its end."""
        results = list(self._results)
        self._results.clear()
        self._waiting.clear()
        return results

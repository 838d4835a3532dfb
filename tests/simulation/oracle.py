"""The oracle: a simulated worker that verifies every KV position it reads. It computes no model.

Each physical KV position stores the hash of the prefix it stands for, and a token is a pure function of that hash (and
of the seed, for sampled requests). So a wrong block, position, slot or fed-back token raises or changes the answer. A
recurrent state is a running hash: that of the prefix that it has seen, each position once. The
worker has only the plan messages. Its state depends on their order alone, so it executes a plan when it receives it;
the test decides when each pipeline stage runs the step (stage_pipeline.py) and when the result arrives.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from protocol.codec import Decoder, encode, pack, unpack
from protocol.kv_groups import NO_BLOCK, num_states
from protocol.logprobs import Logprobs
from protocol.lora import LoRAAdapter
from protocol.membership import Assignment, InitializeCache
from protocol.sampling import Pooling, SamplingParams
from protocol.steps import (
    NO_DRAFT,
    GrammarOutput,
    LoadBlocks,
    ModelRunnerOutput,
    NewRequest,
    ReleaseSlots,
    SchedulerOutput,
    StepFault,
    StepMessage,
)
from services.scheduler.core.limits import Limits
from services.worker.sampling.reference import TokenLogprobs
from services.worker.session import Session
from tests.simulation.drafts import Foresight, Speculating
from tests.simulation.hashing import ROOT, distinct_tokens, extend, in_group
from tests.simulation.reference import HIDDEN_SIZE, choose, hidden, scores_of

MESSAGES: Decoder[StepMessage] = Decoder(StepMessage)


TORN = -1
"""Hash at a position that a lost step may have written in part."""
MOST_IN_FLIGHT = 64
WITHOUT_ADAPTER = -1
"""Extends each prefix of a row that is computed without its adapter: nothing about it is right."""


class OracleViolation(AssertionError):
    """A plan contradicts the worker's state, or a KV position does not hold what its reader expects."""


@dataclass
class _Slot:
    generation: int
    params: SamplingParams
    num_prompt: int
    pooling: Pooling
    tokens: list[int]
    states: list[int]
    """Block of each recurrent state."""
    table: list[int]
    prefixes: list[int] = field(default_factory=list)
    """prefixes[i] is the hash of tokens[: i + 1]."""
    computed: int | None = None
    """Position up to which KV is written; None until the first row, which starts where the cached prefix ends."""
    sampled: int = 0
    """The step that sampled the last token; 0: it came with a plan."""
    proposed: list[int] = field(default_factory=list)
    """Drafts of that step, after the last token."""
    requested: int = 0
    """Number of drafts that the plan of that step requested."""
    drafts: list[int] = field(default_factory=list)
    """Drafts of the row between its forward pass and its sampling, at the end of `tokens`."""
    states_before: list[int | None] = field(default_factory=list)
    """Recurrent states before that row."""
    rejected: list[tuple[int, int]] = field(default_factory=list)
    """(step, number of its planned positions that must be computed again: rejected drafts, and the last known token of
    a row that was left out), of steps whose result is on its way."""
    hidden_sum: NDArray[np.float64] = field(default_factory=lambda: np.zeros(HIDDEN_SIZE))
    """Sum over the positions computed in this slot."""
    lora: LoRAAdapter | None = None
    tainted: bool = False
    """True: computed without its adapter, or behind such blocks."""


Row = tuple[int, int]
"""Slot and generation."""


@dataclass(frozen=True)
class SentMasks:
    """The masks that a step is sampled with."""

    messages: list[GrammarOutput]
    left_out: Collection[int] = ()
    """Slots whose masks are missing."""


Sampling = Callable[[SentMasks], ModelRunnerOutput]
"""The part of a step after its forward pass."""


@dataclass(frozen=True)
class DeferredStep:
    """A step between its forward pass and its sampling."""

    plan: SchedulerOutput
    sampling: Sampling
    masked: list[int]
    """Slots whose masks it waits for."""


def always() -> bool:
    return True


class OracleWorker:
    def __init__(
        self,
        limits: Limits,
        vocab: int,
        epoch: int = 1,
        speculating: Speculating | None = None,
        foresight: Foresight | None = None,
        loads: Callable[[], bool] = always,
    ) -> None:
        """`foresight` gives the drafter the right tokens; `speculating` decides how many drafts are right; `loads`
        whether the adapter of a request that enters can be loaded."""
        self._speculating, self._foresight = speculating, foresight
        self._loads, self._max_loras = loads, limits.max_loras
        self.failed: dict[int, dict[int, str]] = {}
        """Step -> slot -> digest of the adapter that could not be loaded; the reader removes steps."""
        self.tainted: set[int] = set()
        """Blocks with keys that were computed without the adapter of their request."""
        self._max_model_len, self._lookahead = limits.max_model_len, limits.lookahead
        self._planned_drafts: dict[int, int] = {}
        """Slot -> drafts in the last plan."""
        self.verified = Counter[str]()
        num_blocks, block_size = limits.num_blocks, limits.block_size
        self.num_slots, self.num_blocks, self.block_size = limits.num_slots, num_blocks, block_size
        self.num_states = num_states(limits.groups)
        self.groups = [group for group in limits.groups if not group.is_state]
        """Groups with keys."""
        self.vocab, self.epoch, self.stages = vocab, epoch, limits.stages
        self.confirmed = 0
        """The last step whose tokens the scheduler knew when it formed the next plan."""
        self.executed = 0
        """The last step that has ended, for readers beside the steps; tests say when."""
        self._known = 0
        """`confirmed` when the plan that is executed was formed."""
        self.needs = 0
        """The newest step that sampled an input of the last plan; 0: none did."""
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        """KV by block and offset; None: the block was given away and not written since."""
        self._written: dict[int, list[tuple[int, int]]] = {}
        """Step -> (block, offset) of the positions that it wrote, of the latest steps."""
        self.slots: dict[int, _Slot] = {}
        self._generations: dict[int, int] = {}
        self._last_step = 0
        self._computed: list[tuple[int, int, int]] = []
        """(slot, first position, last position + 1) of the rows of the last step."""
        self._deferred: DeferredStep | None = None
        self._queued: deque[tuple[SchedulerOutput, int]] = deque()
        """Plans that wait for the deferred step, each with the value of `confirmed` when it was sent."""
        self._releases: deque[tuple[int, bytes]] = deque()
        """Slots that were released, each with the last step before."""
        self._masks: dict[int, list[GrammarOutput]] = {}
        """Step id -> masks that have arrived."""
        self.entered: list[int] = []
        """`needs` of each plan that was executed; the reader clears it."""
        self.session = Session()
        self.session.leaves_rows_out = True
        self.session.on(Assignment(epoch, 0, 1, block_size, limits.num_slots, limits.max_num_batched_tokens))
        self.session.loaded()
        whole_steps = not limits.leaves_rows_out
        self.session.on(InitializeCache(num_blocks, limits.max_model_len, whole_steps=whole_steps))
        self.session.ready()

    def receive(self, frame: bytes) -> list[bytes]:
        """Process one message in the order that a worker's session requires. Return the encoded results of steps that
        were sampled: at once, or with their grammar masks."""
        match self.session.on(MESSAGES.decode(frame)):
            case SchedulerOutput() as plan:
                self._queued.append((plan, self.confirmed))
            case GrammarOutput() as grammar:
                self._masks.setdefault(grammar.step_id, []).append(grammar)
            case LoadBlocks():
                pass  # the world fills the blocks
            case ReleaseSlots() as release:
                self._releases.append((self.session.last_step, release.slots))
            case StepFault() as fault:
                raise OracleViolation(fault.error)
            case other:
                raise OracleViolation(f"unexpected {type(other).__name__}")
        return self._run()

    @property
    def waits_for_grammar(self) -> bool:
        return self._deferred is not None

    @property
    def is_behind(self) -> bool:
        """Return whether plans that were received are not executed yet."""
        return bool(self._queued)

    @property
    def holds_back(self) -> bool:
        """Return whether a plan that was received has a row of another request than those that wait for masks."""
        missing = set() if self._deferred is None else self._missing(self._deferred)
        return any(set(unpack(plan.slots).tolist()) - missing for plan, _ in self._queued)

    def leave_out(self) -> list[bytes]:
        """Sample the deferred step without the rows whose masks are missing. Return results as `receive` does."""
        self._demand(self._deferred is not None, "nothing waits to be sampled")
        return self._run(leaves_out=True)

    def _run(self, leaves_out: bool = False) -> list[bytes]:
        """Execute and sample queued steps until one waits for masks."""
        results = []
        while (step := self._deferred or self._next()) is not None:
            sent = self._sent(step, leaves_out)
            if sent is None:
                self._deferred = step
                break
            leaves_out, self._deferred = False, None
            self._masks = {i: late for i, late in self._masks.items() if i > step.plan.step_id}
            results.append(encode(step.sampling(sent)))
        return results

    def _next(self) -> DeferredStep | None:
        """Execute the next plan, if there is one."""
        while self._releases and self._releases[0][0] <= self._last_step:
            self._release(self._releases.popleft()[1])
        if not self._queued:
            return None
        plan, confirmed = self._queued.popleft()
        self._known = self._known_for(plan, confirmed)
        sampling = self._execute(plan)
        self.entered.append(self.needs)
        self._demand(bool(plan.masked) == plan.has_structured_output_requests, "masked rows")
        return DeferredStep(plan, sampling, unpack(plan.masked).tolist())

    def _known_for(self, plan: SchedulerOutput, confirmed: int) -> int:
        """Return the last step whose tokens the scheduler knew when it formed the plan."""
        return confirmed

    def _sent(self, step: DeferredStep, leaves_out: bool) -> SentMasks | None:
        """Return the masks that a step is sampled with now; None: it waits for some."""
        missing = self._missing(step)
        if missing and not leaves_out:
            return None
        return SentMasks(self._masks.get(step.plan.step_id, []), missing)

    def _missing(self, step: DeferredStep) -> set[int]:
        arrived = [slot for m in self._masks.get(step.plan.step_id, ()) for slot in unpack(m.slots).tolist()]
        return set(step.masked).difference(arrived)

    def _execute(self, plan: SchedulerOutput) -> Sampling:
        """Run the forward pass; return the rest of the step."""
        rows = self._begin(plan)
        for slot, generation, start, count, samples in rows:
            self._write(slot, generation, start, count, samples)
        for slot, start, end in self._computed:  # write before read, as in each layer
            for group in range(len(self.groups)):
                self._read(slot, group, start, end)
        sampled = [(row[0], row[1]) for row in rows if row[4]]
        return lambda masks: self._sample(plan, sampled, masks)

    def _begin(self, plan: SchedulerOutput) -> list[tuple[int, int, int, int, bool]]:
        """Apply the changes of the batch. Return the rows: slot, generation, start, count, samples."""
        self._demand(plan.epoch == self.epoch, f"epoch {plan.epoch}")
        self._demand(plan.step_id == self._last_step + 1, f"step {plan.step_id} after {self._last_step}")
        self._last_step, self.needs = plan.step_id, 0
        self._written.pop(plan.step_id - MOST_IN_FLIGHT, None)
        self._computed.clear()
        self._release(plan.released)
        for new in plan.new:
            self._enter(new)
        adapters = {s.lora.digest for s in self.slots.values() if s.lora is not None}
        self._demand(len(adapters) <= self._max_loras, "adapter seat: {} adapters are in use", len(adapters))
        self._append_blocks(plan)
        columns = (unpack(c).tolist() for c in (plan.slots, plan.generations, plan.starts, plan.counts))
        rows = list(zip(*columns, map(bool, plan.samples), strict=True))
        drafts = unpack(plan.drafts).tolist() if plan.drafts else [0] * len(rows)
        self._planned_drafts = {row[0]: k for row, k in zip(rows, drafts, strict=True) if k}
        self._demand(bool(rows), "an empty plan was sent")
        rests = plan.speculation_rests
        self._demand(not (rests and plan.num_speculative_tokens), "a drafter that rests proposes drafts")
        self._demand(len({row[0] for row in rows}) == len(rows), "a slot has two rows in one step")
        return rows

    def _release(self, slots: bytes) -> None:
        for slot in unpack(slots).tolist():
            self._demand(slot in self.slots, f"slot {slot} was released but is empty")
            del self.slots[slot]

    def _enter(self, new: NewRequest) -> None:
        slot = new.slot
        self._demand(0 <= slot < self.num_slots and slot not in self.slots, f"slot {slot} is taken")
        self._demand(new.generation > self._generations.get(slot, 0), f"slot {slot}: generation {new.generation}")
        self._generations[slot] = new.generation
        tokens, prefix = unpack(new.token_ids).tolist(), ROOT
        self._demand(0 < new.num_prompt_tokens <= len(tokens), f"slot {slot}: {new.num_prompt_tokens} of prompt")
        blocks = unpack(new.block_ids).tolist()
        states, table = blocks[: self.num_states], blocks[self.num_states :]
        entered = _Slot(new.generation, new.params, new.num_prompt_tokens, new.pooling, tokens, states, table)
        for block in states:
            self._poison(block)
        for token in distinct_tokens(unpack(new.token_ids), new.media).tolist():
            prefix = extend(prefix, token)
            entered.prefixes.append(prefix)
        entered.lora = new.lora
        if new.lora is not None and not self._loads():
            self.failed.setdefault(self._last_step, {})[slot] = new.lora.digest
            self._taint(entered)
        self.slots[slot] = entered

    def _taint(self, s: _Slot) -> None:
        s.tainted, s.prefixes = True, [extend(prefix, WITHOUT_ADAPTER) for prefix in s.prefixes]

    def _append_blocks(self, plan: SchedulerOutput) -> None:
        pairs = zip(unpack(plan.block_slots).tolist(), unpack(plan.block_ids).tolist(), strict=True)
        for slot, block in pairs:
            self.slots[slot].table.append(block)
            self._poison(block)

    def tear(self, last_whole: int) -> None:
        """The rank is lost in the middle of the steps behind `last_whole`: nobody knows what they have written."""
        for step, places in self._written.items():
            for block, offset in places if step > last_whole else ():
                self.kv[block][offset] = TORN

    def content(self, block: int) -> list[int | None]:
        """Return what a reader beside the steps sees."""
        unwritten = {place for step, places in self._written.items() if step > self.executed for place in places}
        return [TORN if (block, at) in unwritten else word for at, word in enumerate(self.kv[block])]

    def _poison(self, block: int) -> None:
        self.kv[block] = [None] * self.block_size
        self.tainted.discard(block)

    def _write(self, slot: int, generation: int, start: int, count: int, samples: bool) -> None:
        self._demand(slot in self.slots, "slot {} is empty", slot)
        s, size, end = self.slots[slot], self.block_size, start + count
        self._demand(s.generation == generation, "slot {}: generation {}, not {}", slot, generation, s.generation)
        if s.computed is None:  # blocks behind the cached prefix are fresh
            self._demand(start % size == 0 and start < len(s.tokens), "slot {} starts at {}", slot, start)
            for table in self._tables(s):
                for block in table[start // size :]:
                    self._poison(block)
                if not s.tainted and not self.tainted.isdisjoint(table[: start // size]):
                    self._taint(s)
            s.computed = start
        s.rejected = [(step, drafts) for step, drafts in s.rejected if step > self._known]
        unknown = sum(drafts for _, drafts in s.rejected)
        self._demand(
            start == s.computed + unknown,
            f"position bound: slot {slot} starts at {start}, its KV ends at {s.computed}, {unknown} rejections unknown",
        )
        self._demand(end <= self._max_model_len, "position bound: slot {} goes to {}", slot, end)
        ahead = min(end + self._lookahead, self._max_model_len)
        held = len(s.table) // len(self.groups) * size
        self._demand(ahead <= held, "slot {}: no block for position {}", slot, ahead - 1)
        planned = self._planned_drafts.get(slot, 0)
        start, end = s.computed, s.computed + count - planned
        self._demand(end > start and end <= len(s.tokens), "slot {}: {} from {} of unknown tokens", slot, count, start)
        self._demand(samples == (end == len(s.tokens)), "slot {}: samples={} at {}", slot, samples, end)
        self._take_drafts(slot, planned)
        end += len(s.drafts)
        if samples and s.sampled:
            self.needs = max(self.needs, s.sampled)
            self._demand(
                s.sampled <= self._known or self._last_step - s.sampled >= self.stages,
                f"stage spacing: slot {slot} needs the token of step {s.sampled} too early for {self.stages} stages",
            )
        s.states_before = [self.kv[block][0] for block in s.states]
        tables, written = self._tables(s), self._written.setdefault(self._last_step, [])
        for position in range(start, end):
            self._advance(slot, position)
            for group, table in enumerate(tables):
                block, offset = table[position // size], position % size
                self._demand(block != NO_BLOCK, "slot {}: no block for position {}", slot, position)
                word = in_group(s.prefixes[position], group)
                if self.kv[block][offset] != word:  # else a row that was left out computes its last position again
                    written.append((block, offset))
                self.kv[block][offset] = word
                if s.tainted:
                    self.tainted.add(block)
            if s.pooling is Pooling.MEAN:
                s.hidden_sum += hidden(s.prefixes[position])
        s.computed = end
        self._computed.append((slot, start, end))

    def _advance(self, slot: int, position: int) -> None:
        """Change the recurrent states by a position: they have seen all positions before, and nothing else."""
        s = self.slots[slot]
        for number, block in enumerate(s.states):
            before = in_group(s.prefixes[position - 1], -1 - number) if position else None
            if (found := self.kv[block][0]) != before:
                raise OracleViolation(
                    f"recurrent state: slot {slot} computes position {position} from state {found} in block {block}"
                )
            self.kv[block][0] = in_group(s.prefixes[position], -1 - number)
            self._written.setdefault(self._last_step, []).append((block, 0))

    def _take_drafts(self, slot: int, planned: int) -> None:
        """Append the row's drafts as if they were known tokens. There may be fewer than planned."""
        s = self.slots[slot]
        if planned:
            self._demand(
                planned <= s.requested,
                f"latest drafts: slot {slot} has {planned} drafts planned, step {s.sampled} proposed {s.requested}",
            )
        s.drafts, s.proposed, s.requested = s.proposed[:planned], [], 0
        for token in s.drafts:
            self._demand(0 <= token < self.vocab, "valid ids: slot {} has the draft {}", slot, token)
            s.tokens.append(token)
            s.prefixes.append(extend(s.prefixes[-1], token))

    def _tables(self, s: _Slot) -> list[list[int]]:
        """Return the table of each group."""
        return [s.table[group :: len(self.groups)] for group in range(len(self.groups))]

    def _read(self, slot: int, group: int, start: int, end: int) -> None:
        """Read what queries at positions start .. end - 1 read. What they find if they are tainted does not matter."""
        if self.slots[slot].tainted:
            return
        s, size, span = self.slots[slot], self.block_size, self.groups[group].size
        low = 0
        if self.groups[group].kind == "sliding_window":
            low = max(0, start + 1 - span)
        elif self.groups[group].kind == "chunked_local_attention":
            low = start - start % span
        table = self._tables(s)[group]
        while low < end:
            block, last = table[low // size], min(low // size * size + size, end)
            expected = [in_group(prefix, group) for prefix in s.prefixes[low:last]]
            if block == NO_BLOCK or self.kv[block][low % size : (last - 1) % size + 1] != expected:
                raise OracleViolation(
                    f"slot {slot} reads block {block} of group {group} for positions {low} to {last - 1}: "
                    f"foreign or unwritten KV"
                )
            low = last

    def _sample(self, plan: SchedulerOutput, rows: list[Row], sent: SentMasks) -> ModelRunnerOutput:
        tokens, scored, vectors = [], self._score_prompts(), {}
        masks = {slot: mask for grammar in sent.messages for slot, mask in self._masks_of(plan, rows, grammar).items()}
        counts, drafted, proposed = [], [], []
        for slot, _ in rows:
            s = self.slots[slot]
            if slot in sent.left_out:
                self._leave_out(slot, plan)
                counts.append(0)
                drafted.append(0)
                proposed += [NO_DRAFT] * plan.num_speculative_tokens
                continue
            if s.pooling is not Pooling.NONE:
                mean = s.hidden_sum / len(s.tokens)
                vectors[slot] = mean if s.pooling is Pooling.MEAN else hidden(s.prefixes[-1])
            allowed = masks.get(slot)
            acceptable = len(s.drafts) if allowed is None else min(len(s.drafts), len(allowed) - 1)
            row = self._accept(slot, acceptable, allowed, scored)
            s.sampled, s.requested = plan.step_id, plan.num_speculative_tokens
            self._propose(slot)
            tokens += row
            counts.append(len(row))
            drafted.append(acceptable)
            proposed += s.proposed + [NO_DRAFT] * (s.requested - len(s.proposed))
        return ModelRunnerOutput(
            plan.epoch,
            plan.step_id,
            pack([slot for slot, _ in rows]),
            pack([generation for _, generation in rows]),
            pack(counts),
            pack(tokens),
            logprobs=_logprobs(scored) if scored else None,
            embedding_slots=pack(list(vectors)),
            embeddings=b"".join(vector.astype(np.float32).tobytes() for vector in vectors.values()),
            drafted=pack(drafted) if plan.drafts else b"",
            draft_token_ids=pack(proposed) if plan.has_structured_output_requests else b"",
            failed_slots=pack([*self.failed.get(plan.step_id, ())]),
        )

    def _leave_out(self, slot: int, plan: SchedulerOutput) -> None:
        """Settle a row without a token: the next one begins with the last known token again, and has no drafts."""
        s = self.slots[slot]
        known = len(s.tokens) - len(s.drafts)
        del s.tokens[known:], s.prefixes[known:]
        self._take_back(s)
        s.drafts, s.proposed, s.computed = [], [], known - 1
        s.sampled, s.requested = plan.step_id, plan.num_speculative_tokens
        s.rejected.append((self._last_step, self._planned_drafts.get(slot, 0) + 1))

    def _take_back(self, s: _Slot) -> None:
        """Let the recurrent states be those before the row."""
        for block, before in zip(s.states, s.states_before, strict=True):
            self.kv[block][0] = before

    def _accept(
        self, slot: int, acceptable: int, masks: NDArray[np.int32] | None, scored: list[tuple[int, int, TokenLogprobs]]
    ) -> list[int]:
        """Sample the row token by token, as without drafts, until a token differs from the draft at its position."""
        s, had = self.slots[slot], len(self.slots[slot].drafts)
        known = len(s.tokens) - had
        del s.tokens[known:], s.prefixes[known:]
        row: list[int] = []
        for j in range(acceptable + 1):
            prompt, output = s.tokens[: s.num_prompt], s.tokens[s.num_prompt :]
            mask = None if masks is None else masks[j]
            token = choose(s.prefixes[-1], s.params, prompt, output, self.vocab, mask)
            if s.pooling is Pooling.NONE and s.params.logprobs is not None:
                scored.append((slot, len(s.tokens), scores_of(s.prefixes[-1], token, self.vocab, s.params.logprobs)))
            s.tokens.append(token)
            s.prefixes.append(extend(s.prefixes[-1], token))
            row.append(token)
            if j == acceptable or token != s.drafts[j]:
                break
        planned, s.drafts, s.computed = self._planned_drafts.get(slot, 0), [], known + len(row) - 1
        s.rejected.append((self._last_step, planned + 1 - len(row)))
        self.verified["planned"] += planned
        self.verified["fewer than planned"] += had < planned
        self.verified["refused by a grammar"] += acceptable < had
        self.verified["verified"] += acceptable
        self.verified["accepted"] += len(row) - 1
        return row

    def _propose(self, slot: int) -> None:
        """Propose drafts for the slot's next row, as many as fit the context."""
        s = self.slots[slot]
        how, first = self._speculating, len(s.tokens)
        if how is None or self._foresight is None:
            self._demand(not s.requested, f"{s.requested} drafts are requested, but there is no drafter")
            return
        fits = not how.longest or first + s.requested <= how.longest
        count = min(s.requested, self._max_model_len - first) if fits else 0
        if count > 0:
            right = self._foreseen(s, self._foresight(slot), first + count)[first:]
            identity = extend(s.prefixes[s.num_prompt - 1], s.params.seed)
            s.proposed = how.draft(right, identity, first, self.vocab)

    def _foreseen(self, s: _Slot, future: list[int], end: int) -> list[int]:
        """Return the slot's tokens up to `end`; behind its answer, those that would follow if it did not end."""
        known, prefix = s.tokens + future[len(s.tokens) :], s.prefixes[-1]
        for token in known[len(s.tokens) :]:
            prefix = extend(prefix, token)
        while len(known) < end:
            token = choose(prefix, s.params, known[: s.num_prompt], known[s.num_prompt :], self.vocab)
            known.append(token)
            prefix = extend(prefix, token)
        return known[:end]

    def _masks_of(self, plan: SchedulerOutput, rows: list[Row], grammar: GrammarOutput) -> dict[int, NDArray[np.int32]]:
        """Slot -> int32[masks, words]"""
        self._demand(grammar.epoch == plan.epoch, f"a grammar of epoch {grammar.epoch}")
        slots = unpack(grammar.slots).tolist()
        order = {slot: i for i, (slot, _) in enumerate(rows)}
        self._demand(slots == sorted(set(slots), key=order.__getitem__), f"grammar rows {slots} out of order")
        masks = unpack(grammar.bitmask).reshape(-1, -(-self.vocab // 32))
        counts = unpack(grammar.counts).tolist() if grammar.counts else [1] * len(slots)
        found, at = {}, 0
        for slot, count in zip(slots, counts, strict=True):
            planned = self._planned_drafts.get(slot, 0)
            self._demand(1 <= count <= planned + 1, f"slot {slot} has {count} masks for {planned} drafts")
            found[slot] = masks[at : at + count]
            at += count
        self._demand(at == len(masks), f"{len(masks)} masks came, {at} were counted")
        return found

    def _score_prompts(self) -> list[tuple[int, int, TokenLogprobs]]:
        """Return log-probabilities of the prompt tokens that the positions of the last step predict."""
        scored = []
        for slot, start, end in self._computed:
            s = self.slots[slot]
            if s.params.prompt_logprobs is None:
                continue
            for at in range(start + 1, min(end + 1, s.num_prompt)):
                scores = scores_of(s.prefixes[at - 1], s.tokens[at], self.vocab, s.params.prompt_logprobs)
                scored.append((slot, at, scores))
        return scored

    def _demand(self, holds: bool, otherwise: str, *values: object) -> None:
        if not holds:
            raise OracleViolation(f"step {self._last_step}: {otherwise.format(*values) if values else otherwise}")


def _logprobs(scored: list[tuple[int, int, TokenLogprobs]]) -> Logprobs:
    slots, positions, entries = zip(*scored, strict=True)
    return Logprobs(
        pack(slots),
        pack(positions),
        pack([len(entry.token_ids) for entry in entries]),
        pack([entry.token_rank for entry in entries]),
        pack(list(chain.from_iterable(entry.token_ids.tolist() for entry in entries))),
        b"".join(entry.values.tobytes() for entry in entries),
    )

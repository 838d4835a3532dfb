"""The simulated device of a rank, behind the production worker: a `ModelRunner` with the oracle in place of a model.

Loading, steps and operations that need all ranks take virtual time. A rank may hang in any of them.
"""

import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from protocol.codec import encode, pack, unpack
from protocol.membership import Assignment, InitializeCache, Loaded, Shard
from protocol.steps import GrammarOutput, ReleaseSlots, SchedulerOutput
from services.scheduler.core.limits import Limits
from services.worker.runner import Identity, Output, Progress, RanksLost
from tests.simulation.drafts import Speculating
from tests.simulation.oracle import TORN
from tests.simulation.reference import HIDDEN_SIZE
from tests.simulation.whole.hub import Hub, SimulatedProcess, Waiters
from tests.simulation.whole.stage import JOIN_TIMEOUT, CanaryOutput, ComputeStage, RankMessages, RankOracle, StageOutput
from tests.simulation.whole.tier import OracleMemory, SimulatedKeeper

VOCAB = 64
MAX_MODEL_LEN = 96
LOAD_PARTS = 4
"""Progress reports while weights are read."""

Foresight = Callable[[list[int], int], list[int]]
"""(prompt, seed) -> prompt and answer of the request."""


@dataclass
class Meeting:
    """An operation that several ranks of an epoch must reach."""

    present: set[int] = field(default_factory=set)
    waiters: Waiters = field(default_factory=Waiters)
    broken: bool = False


class Collectives:
    """torch.distributed: meetings by (epoch, operation, step), and messages between ranks by epoch."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._meetings: dict[tuple[int, str, int], Meeting] = {}
        self._messages: dict[int, RankMessages] = {}

    def messages(self, epoch: int) -> RankMessages:
        self._messages = {number: kept for number, kept in self._messages.items() if number >= epoch}
        return self._messages.setdefault(epoch, RankMessages())

    def meet(self, key: tuple[int, str, int], rank: int) -> Meeting:
        if key not in self._meetings:
            old = [other for other in self._meetings if other[0] < key[0]]
            for other in old:
                del self._meetings[other]
        meeting = self._meetings.setdefault(key, Meeting())
        meeting.present.add(rank)
        meeting.waiters.wake()
        return meeting

    def leave(self, epoch: int) -> None:
        """A rank of an epoch is gone. Those that wait for it may notice."""
        if self._hub.rng.random() < 0.7:
            self._hub.after(self._hub.rng.uniform(0.01, 1.0), partial(self._break, epoch))

    def _break(self, epoch: int) -> None:
        for (number, _, _), meeting in self._meetings.items():
            if number == epoch:
                meeting.broken = True
                meeting.waiters.wake()
        if epoch in self._messages:
            self._messages[epoch].broken = True
            self._messages[epoch].arrived.wake()


class Strike(Enum):
    """Effect of a poisoned step on its rank."""

    FAILS = "fails"
    RESULT_FAILS = "its result fails"
    CRASHES = "crashes"
    HANGS = "hangs"
    LACKS_MEMORY = "lacks memory"


@dataclass(frozen=True)
class Poison:
    """Fault of each step that computes one of a request's positions from `position` on.

    The output rank is always hit: if another rank alone fails in a step whose result has arrived, the requests that are
    in flight by then are blamed (docs/operations.md, "Limits").
    """

    strike: Strike
    position: int
    everywhere: bool = True
    """False: on the output rank alone."""


@dataclass(frozen=True)
class DeviceTraits:
    num_blocks: int = 48
    load_seconds: float = 0.5
    step_seconds: float = 0.05
    leaves_rows_out: bool = False
    loads_adapters: bool = True


class SimulatedDevice:
    """A `ModelRunner`."""

    def __init__(
        self,
        hub: Hub,
        process: SimulatedProcess,
        collectives: Collectives,
        traits: DeviceTraits,
        foresight: Foresight,
        poisons: Mapping[str, Poison],
        happened: Counter[str],
        keeper: SimulatedKeeper | None,
    ) -> None:
        """`poisons`: by external id of the request. `keeper`: None: KV memory ends with its process."""
        self._hub, self._process, self._collectives = hub, process, collectives
        self._traits, self._foresight, self._happened = traits, foresight, happened
        self._poisons = poisons
        self.kv_memory = OracleMemory(keeper, process)
        self.num_loads = 0
        """Number of times that weights were read."""
        self.hangs = False
        """True: the next operation never ends."""
        self.lacks_memory = False
        """True: the next step runs out of memory."""
        self.last_epoch = 0
        """The latest epoch of which anything was executed."""
        self.num_steps = 0
        self.shard: Shard | None = None
        self._assignment: Assignment | None = None
        self._stage: ComputeStage | None = None
        """In an epoch."""
        self._launched: tuple[int, float, float, bool] = (0, 0.0, 0.0, False)
        """The step executed last: its id, time of its launch, seconds of its forward pass, whether that fails."""
        self._poisoned: dict[int, Poison] = {}
        """By slot."""
        self._in_canary = False
        self._aborted = False
        self._on_abort = Waiters()
        process.on_end += [self._leave_meetings, self._tear]

    def _tear(self) -> None:
        """Steps in flight have written anything."""
        if self._stage is not None and self._assignment is not None and not self._assignment.shard.tp_rank:
            self._stage.oracle.tear(self._stage.last_whole)

    def _leave_meetings(self) -> None:
        if self._assignment is not None:
            self._collectives.leave(self._assignment.epoch)

    # -- ModelRunner ---------------------------------------------------------------------------------------------

    def identify(self) -> Identity:
        return Identity(
            "hash", "float32", (1, 2, 4), 4, leaves_rows_out=self._traits.leaves_rows_out, serves_loras=True
        )

    def load(self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None) -> Loaded:
        self._notice(assignment.epoch)
        self._aborted, self._assignment, self._stage = False, assignment, None
        if self.shard != assignment.shard:
            self.shard = None
            self.num_loads += 1
            for part in range(LOAD_PARTS):
                self._compute(self._traits.load_seconds / LOAD_PARTS)
                progress("weights", (part + 1) / LOAD_PARTS)
            self.shard = assignment.shard
        self.kv_memory.content = _identity(assignment)
        self._together("join", 0, assignment.world_size)
        blocks = self.kv_memory.find(_identity(assignment), assignment.block_size) or self._traits.num_blocks
        left = not self.num_steps and self.kv_memory.held() is not None
        self._happened["blocks of a lost worker found"] += left
        return Loaded("hash", VOCAB, MAX_MODEL_LEN, 64, blocks, True, hidden_size=HIDDEN_SIZE, num_loads=self.num_loads)

    def init_kv_cache(self, init: InitializeCache) -> None:
        a = self._assignment
        limits = Limits(
            a.num_slots // 2,
            a.max_num_batched_tokens,
            init.max_model_len,
            init.num_blocks,
            a.block_size,
            stages=a.pipeline_parallel_size,
            max_loras=a.max_loras,
            leaves_rows_out=self._traits.leaves_rows_out,
        )
        drafts = a.speculation
        lengths = () if drafts is None else tuple(range(1, drafts.num_speculative_tokens + 1))
        speculating = None if drafts is None else Speculating("by request", lengths)
        messages = self._collectives.messages(a.epoch)
        decides = a.rank == a.output_rank or not limits.leaves_rows_out
        loads = partial(getattr, self._traits, "loads_adapters")
        oracle = RankOracle(messages, decides, limits, VOCAB, a.epoch, speculating, self._future, loads)
        if self.kv_memory.begin(_identity(a), a.block_size, init.num_blocks, 1) == len(self.kv_memory.kv):
            oracle.kv = self.kv_memory.kv
        else:
            self.kv_memory.kv = oracle.kv
        self.kv_memory.kv[init.canary_block] = [TORN] * a.block_size
        self._stage = ComputeStage(self._hub, oracle, messages, a, self._happened)
        self.kv_memory.read = self._stage.content
        self._poisoned.clear()

    def _future(self, slot: int) -> list[int]:
        s = self._stage.oracle.slots[slot]
        return self._foresight(s.tokens[: s.num_prompt], s.params.seed)

    def execute_model(self, step: SchedulerOutput) -> None:
        a = self._assignment
        if step.step_id == 0:
            self._in_canary = True
            self._together("canary", 0, a.world_size)
            return
        self._notice(step.epoch)
        self._hang_perhaps()
        if self.lacks_memory:
            self.lacks_memory = False
            raise MemoryError
        poisoned = self._strike(step)
        self._together(f"step of stage {a.shard.pp_rank}", step.step_id, a.tensor_parallel_size)
        self._launched = step.step_id, self._hub.now, self._seconds(self._traits.step_seconds), poisoned
        self.num_steps += 1
        self._stage.receive(encode(step))

    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        if self._in_canary:
            return CanaryOutput()
        assert self._stage is not None
        return StageOutput(self._stage, *self._launched)

    def add_masks(self, grammar: GrammarOutput) -> None:
        self._stage.receive(encode(grammar))

    def end_masks(self) -> None:
        if self._stage is not None:
            self._stage.end()

    def release(self, slots: NDArray[np.int32]) -> None:
        if self._in_canary:
            self._in_canary = False
        else:
            self._stage.receive(encode(ReleaseSlots(self._assignment.epoch, pack(slots.tolist()))))

    def leave(self) -> None:
        self._leave_meetings()
        if self._stage is not None:
            self._stage.end()
            self._tear()
        self._stage, self._in_canary = None, False

    def abort(self) -> None:
        self._aborted = True
        self._on_abort.wake()
        if self._stage is not None:
            self._stage.end()

    def shutdown(self) -> None:
        self._leave_meetings()

    # -- poison --------------------------------------------------------------------------------------------------

    def _strike(self, step: SchedulerOutput) -> bool:
        """Let the poisoned requests of a step strike. Return whether its result fails."""
        for new in step.new:
            self._poisoned.pop(new.slot, None)
            if (poison := self._poisons.get(new.request_id)) is not None:
                self._poisoned[new.slot] = poison
        if not self._poisoned:
            return False
        a, columns = self._assignment, (step.slots, step.starts, step.counts)
        assert a is not None
        for slot, start, count in zip(*(unpack(column).tolist() for column in columns), strict=True):
            poison = self._poisoned.get(slot)
            if poison is None or start + count <= poison.position:
                continue
            if not poison.everywhere and a.rank != a.output_rank:
                continue
            self._happened[f"a poisoned step {poison.strike.value}"] += 1
            self._hub.log(self._process.name, "poisoned:", poison)
            match poison.strike:
                case Strike.FAILS:
                    raise RuntimeError("this step fails")
                case Strike.RESULT_FAILS:
                    return True
                case Strike.CRASHES:
                    self._hub.exit_now(-11)
                case Strike.HANGS:
                    self.hangs = True
                    self._hang_perhaps()
                case Strike.LACKS_MEMORY:
                    raise MemoryError
        return False

    # -- virtual time --------------------------------------------------------------------------------------------

    def _seconds(self, mean: float) -> float:
        return mean * (0.5 + self._hub.rng.random())

    def _compute(self, mean: float) -> None:
        self._hang_perhaps()
        seconds = self._seconds(mean)
        self._hub.sleep(seconds)
        self._process.work += seconds

    def _hang_perhaps(self) -> None:
        while self.hangs:
            self._hub.wait((), None)

    def _together(self, operation: str, step: int, size: int) -> None:
        """Wait until `size` ranks have reached this. Raises: RanksLost"""
        self._hang_perhaps()
        a = self._assignment
        if size == 1:
            return
        meeting = self._collectives.meet((a.epoch, operation, step), a.rank)
        until = self._hub.now + JOIN_TIMEOUT
        while len(meeting.present) < size:
            if self._aborted or meeting.broken or self._hub.now >= until:
                raise RanksLost("aborted" if self._aborted else "another rank does not answer")
            self._hub.wait((meeting.waiters, self._on_abort), until - self._hub.now)
        self._hang_perhaps()

    # -- what is checked -----------------------------------------------------------------------------------------

    def _notice(self, epoch: int) -> None:
        """Older incarnations have no effect."""
        if epoch < self.last_epoch:
            self._hub.failures.append(AssertionError(f"epoch {epoch} is executed after {self.last_epoch}"))
        self.last_epoch = epoch


def _identity(assignment: Assignment) -> str:
    return f"{assignment.shard} {assignment.block_size} {assignment.speculation}"

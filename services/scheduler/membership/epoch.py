"""The current epoch: its identifier, its size, and what its ranks are sent."""

from protocol.block_names import NamedBlocks
from protocol.codec import ProtocolError
from protocol.epochs import first_epoch
from protocol.membership import Assignment, EndEpoch, InitializeCache, Loaded, Register, Speculation, output_rank
from protocol.steps import LoadBlocks
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.membership.actions import Action, Send, Started
from services.scheduler.membership.formation import GroupSize, assign_ranks
from services.scheduler.membership.member_states import MemberEvent, MemberState
from services.scheduler.membership.roster import Roster
from services.scheduler.membership.sizes import fit
from services.scheduler.membership.step_watch import StepSize


def make_assignment(config: SchedulerConfig, size: GroupSize, epoch: int, rank: int, rendezvous: str) -> Assignment:
    """Return the assignment of a rank. `rendezvous`: where ranks meet; "" in a group of one."""
    s = config.speculative_config
    return Assignment(
        epoch=epoch,
        rank=rank,
        world_size=size.world,
        block_size=config.block_size,
        num_slots=2 * config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or 0,
        tensor_parallel_size=size.tensor_parallel,
        pipeline_parallel_size=size.pipeline_parallel,
        rendezvous=rendezvous,
        speculation=None if s is None else Speculation(**s.model_dump(exclude={"adaptive"}, exclude_none=True)),
        max_kv_groups=config.max_kv_groups,
        max_loras=config.num_loras,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
    )


class Epoch:
    def __init__(self, config: SchedulerConfig, roster: Roster, incarnation: int) -> None:
        self._config = config
        self._roster = roster
        self.id = first_epoch(incarnation)
        """The current epoch's, or the last one's if there is none."""
        self.has_shrunk = False
        self.size: GroupSize | None = None
        """None: there is no epoch."""
        self.model: Register | None = None
        """The registration of rank 0 of the first epoch; the frontends' tokenizer belongs to its model."""
        self.output_peer = b""
        """The rank that sends results, of the last epoch that was in effect."""
        self._adopted: dict[int, bytes] = {}
        """Blocks that the current epoch begins with, by their names, in the order in which they became whole."""
        self._dropped_in = 0
        """The last epoch in which names of blocks were dropped, of those that are known; 0: none were."""

    def shrink(self, failed: StepSize) -> str | None:
        """Let the steps of all later epochs have at most half of a step that ran out of memory: half of its rows if it
        only decoded, else half of its tokens.

        Returns: the new limit, for the log; None: half of the step is less than a block of tokens, or no row.
        """
        c = self._config
        if failed.longest <= 1 + c.num_drafts:
            setting, most, unit = "max_num_seqs", failed.rows // 2, "sequences"
        else:
            tokens = failed.positions // 2 // c.block_size * c.block_size
            setting, most, unit = "max_num_batched_tokens", tokens, "tokens"
        if not most:
            return None
        self._config = c.model_copy(update={setting: most})
        self.has_shrunk = True
        return f"{most} {unit}"

    def on_drop(self, names: bytes) -> list[Action]:
        """Names of blocks are dropped on the ranks: spares drop all of theirs, and blocks of `names` from their tiers.
        What other workers, or keepers, have in memory is not adopted (dropped block)."""
        self._dropped_in = self.id
        drop = LoadBlocks(self.id, 0, 0, b"", b"", dropped=names, drops_all=True)
        return [Send(member.peer, drop) for member in self._roster.spares]

    def begin(self, size: GroupSize, now: float) -> list[Action]:
        """Make ranks of spares: send each its assignment."""
        ranks = assign_ranks(self._roster.spares, size)
        # Later than every epoch that a worker knows, even if the clock went back between two schedulers.
        self.id = max(self.id, *(member.register.epoch for member in ranks)) + 1
        self.size = size
        self.model = self.model or ranks[0].register
        rendezvous = ranks[0].register.rendezvous if len(ranks) > 1 else ""
        for rank, member in enumerate(ranks):
            member.rank, member.loaded, member.last_step = rank, None, 0
            self._roster.apply(member.peer, MemberEvent.ASSIGN, now)
        return [
            Send(member.peer, make_assignment(self._config, size, self.id, rank, rendezvous))
            for rank, member in enumerate(ranks)
        ]

    def all_are(self, state: MemberState) -> bool:
        """Return whether there is an epoch and all of its ranks are in this state."""
        return self.size is not None and all(member.state is state for member in self._roster.ranks)

    def limits(self) -> Limits:
        """Return the engine's sizes for what the ranks have loaded.

        Raises: GroupError
        """
        leaves_rows_out = all(member.register.leaves_rows_out for member in self._roster.ranks)
        return fit(self._config, self._loaded(), leaves_rows_out)

    def initialize(self, now: float) -> list[Action]:
        """All ranks have loaded: send each the size of its cache. Adopt the blocks that all ranks hold (adopted block),
        without the one that their test step writes."""
        limits, ranks = self.limits(), self._roster.ranks
        for member in ranks:
            self._roster.apply(member.peer, MemberEvent.INITIALIZE, now)
        loaded = self._loaded()
        # A later one is of a scheduler whose clock was ahead: which drops of this one it has missed cannot be seen
        self._dropped_in = max([self._dropped_in, *(rank.dropped_in for rank in loaded if rank.dropped_in <= self.id)])
        held = [rank.held if rank.dropped_in == self._dropped_in else None for rank in loaded]
        self._adopted, canary = common_blocks(held, limits.num_blocks)
        whole_steps = not limits.leaves_rows_out
        message = InitializeCache(
            limits.num_blocks, limits.max_model_len, self.id, canary, whole_steps, self._dropped_in
        )
        return [Send(member.peer, message) for member in ranks]

    def start(self) -> Started:
        """All ranks are ready."""
        assert self.size is not None
        peers = [member.peer for member in self._roster.ranks]
        self.output_peer = peers[output_rank(*self.size)]
        blocks, names = [*self._adopted], [*self._adopted.values()]
        held = NamedBlocks.from_lists(blocks, names) if blocks else None
        loaded = self._loaded()
        kv_peers = tuple(rank.kv_peer for rank in loaded)
        kv_peers = kv_peers if all(kv_peers) else ()
        num_bytes = sum(rank.bytes_per_block for rank in loaded)
        kept = (rank.pins for rank in loaded if rank.pins is not None)
        pins = max(kept, key=lambda pins: pins.epoch, default=None)  # a rank may have been a spare since
        return Started(self.id, peers, self.limits(), loaded[0], held, kv_peers, num_bytes, pins)

    def end(self, reason: str, is_fault: bool, now: float) -> list[Action]:
        """Send all ranks that are left back to registration."""
        ranks, self.size = self._roster.ranks, None
        for member in ranks:
            self._roster.apply(member.peer, MemberEvent.END, now)
        return [Send(m.peer, EndEpoch(self.id, reason, is_fault), everywhere=True) for m in ranks]

    def _loaded(self) -> list[Loaded]:
        """In the order of ranks."""
        return [member.loaded for member in self._roster.ranks if member.loaded is not None]


def common_blocks(held: list[NamedBlocks | None], num_blocks: int) -> tuple[dict[int, bytes], int]:
    """Return the blocks below `num_blocks` that every rank holds under the same name, in the order of rank 0, and a
    block beside them, for the test step."""
    try:
        first, *others = [{} if blocks is None else dict(blocks.pairs()) for blocks in held]
    except ProtocolError:
        return {}, 0
    common = {
        block: name
        for block, name in first.items()
        if 0 <= block < num_blocks and all(other.get(block) == name for other in others)
    }
    free = next((block for block in range(num_blocks) if block not in common), None)
    return common, common.popitem()[0] if free is None else free

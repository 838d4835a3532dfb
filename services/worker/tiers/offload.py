"""The tiers of a worker over its epochs."""

import logging
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256

from protocol.block_names import NamedBlocks
from protocol.membership import Loaded, TierReport
from protocol.steps import BlocksLoaded, LoadBlocks
from services.config import WorkerConfig
from services.kv_keeper import KeptMemory
from services.worker.kv_memory import KVMemory
from services.worker.runner import LoadError
from services.worker.tiers.disk import DiskTier
from services.worker.tiers.host import HostTier
from services.worker.tiers.peers import PeerClient, PeerServer
from services.worker.tiers.transfers import BlockTransfers, DroppedNames, Tier

log = logging.getLogger("runahead.worker")

LAST_SECONDS = 2.0
"""Seconds for blocks that are not written yet when the worker leaves."""
MakeTiers = Callable[[WorkerConfig, str], list[Tier]]


def tiers_of(config: WorkerConfig, identity: str) -> list[Tier]:
    """Return the configured tiers for blocks of this identity, the fastest one first. Raises: LoadError"""
    tiers: list[Tier] = [HostTier(config.kv_offload_bytes)] if config.kv_offload_bytes else []
    if config.kv_offload_dir:
        tiers.append(DiskTier(config.kv_offload_dir, identity, config.kv_offload_dir_bytes))
    return tiers


class Offload:
    """Tiers and peers: whole blocks are written to tiers, and loads fill blocks from both. For the executing thread.

    Args:
        send: sends an answer, on any thread.
        make_tiers: other tiers than the configured ones, for tests.
    """

    def __init__(
        self, config: WorkerConfig, send: Callable[[BlocksLoaded], None], make_tiers: MakeTiers = tiers_of
    ) -> None:
        self._config, self._send, self._make_tiers = config, send, make_tiers
        self._identity, self._rank = "", 0
        self._tiers: list[Tier] = []
        self._transfers: BlockTransfers | None = None
        self._dropped = DroppedNames()
        self._kept: dict[tuple[int, int], KeptMemory] = {}
        """By epoch and ticket of a drop that is not answered: the keeper that must carry it out, too."""
        self._server: PeerServer | None = None
        self.has_tiers = bool(config.kv_offload_dir or config.kv_offload_bytes)
        self._is_used = self.has_tiers or bool(config.kv_peer_address)

    @property
    def kv_peer(self) -> str:
        """`Loaded.kv_peer`"""
        return "" if self._server is None else self._server.address

    def open(self, memory: KVMemory, loaded: Loaded, rank: int) -> None:
        """The weights are loaded. Raises: LoadError"""
        if not self._is_used and not (self._config.kv_keeper and not memory.content):
            return
        self._rank, identity = rank, f"{memory.content} {sorted(loaded.contents.items())}"
        if not memory.content:
            raise LoadError(
                "--kv-offload-dir, --kv-offload-bytes, --kv-peer-address and --kv-keeper: the KV blocks of a GPU stay "
                "there so far; use none of them"
            )
        if len(loaded.groups) > 1 or any(group.size for group in loaded.groups):
            raise LoadError(
                "--kv-offload-dir, --kv-offload-bytes and --kv-peer-address: groups of KV cache with windows are not "
                "offloaded yet; set --disable-hybrid-kv-cache-manager, or use none of them"
            )
        if identity != self._identity:
            self._identity, self._tiers = identity, self._make_tiers(self._config, identity)
        if self._config.kv_peer_address and self._server is None:
            self._server = PeerServer(self._config.kv_peer_address, self._config.security, self._find)

    def begin(self, memory: KVMemory) -> None:
        """An epoch's cache has begun."""
        if self._is_used:
            is_peer = self._server is not None
            peers = PeerClient(self._config.security, _digest(self._identity), self._rank) if is_peer else None
            self._transfers = BlockTransfers(memory, self._tiers, self._answer, peers, self._dropped)

    def forget(self) -> None:
        """This worker has missed a drop: memory may have blocks that the tiers of others have no more."""
        self._join_writer()
        for tier in self._tiers:
            if isinstance(tier, HostTier):
                tier.clear()

    def follow(self, whole: NamedBlocks) -> None:
        """Blocks became whole."""
        if self._transfers is not None and self._tiers:
            self._transfers.follow(whole)

    def load(self, message: LoadBlocks) -> None:
        """Fill blocks, and answer."""
        assert self._transfers is not None, "the scheduler knows whether there are tiers or peers"
        self._transfers.load(message)

    def drop(self, message: LoadBlocks, keeper: KeptMemory | None) -> None:
        """Drop blocks from the tiers, and what the keeper holds without a worker, and answer."""
        if keeper is not None:
            self._kept[message.epoch, message.ticket] = keeper
        if not message.dropped:  # tiers keep theirs: the answer does not wait for blocks that are being written
            self._answer(BlocksLoaded(message.epoch, message.ticket, 0))
        elif self._transfers is not None:
            self._transfers.drop(message)
        else:
            self._join_writer()
            self._dropped.begin(message)
            self._answer(self._dropped.carry_out(message, self._tiers))

    def _join_writer(self) -> None:
        """Wait for the thread of the last epoch, which may put a last block into a tier."""
        if (writer := self._dropped.writer) is not None:
            writer.join()

    def _answer(self, answer: BlocksLoaded) -> None:
        """Send an answer: that of a drop when the keeper has answered, for which no step waits. On any thread."""
        if (keeper := self._kept.pop((answer.epoch, answer.ticket), None)) is None:
            self._send(answer)
            return

        def finish() -> None:
            try:
                keeper.drop()
            except TimeoutError as error:
                log.error("KV blocks cannot be dropped: %s", error)
            else:
                self._send(answer)

        threading.Thread(target=finish, name="keeper's answer", daemon=True).start()

    def report(self) -> list[TierReport]:
        """Return `Pong.tiers`. Names of blocks are reported by rank 0 alone."""
        reports = []
        for tier in self._tiers if self._transfers is not None else ():
            names = tier.changes.take()
            reports.append(TierReport(tier.label, tier.num_bytes, *(() if self._rank else names)))
        return reports

    def end(self, leaves: bool = False) -> None:
        """The cache ends. `leaves`: so does the process."""
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers.end(LAST_SECONDS if leaves else 0.0)
        if leaves and self._server is not None:
            self._server.close()

    def _find(self, identity: bytes, names: Sequence[bytes]) -> tuple[int, memoryview]:
        """Called on the thread that serves peers."""
        transfers = self._transfers
        if transfers is None or identity != _digest(self._identity):
            return 0, memoryview(b"")
        return transfers.find(names)


def _digest(identity: str) -> bytes:
    return sha256(identity.encode()).digest()

"""Frontends that follow an engine's prefix cache over real sockets: they know the blocks of all frontends, by salt."""

from pathlib import Path

from protocol.block_names import names_of, split_names
from protocol.codec import Decoder, pack
from protocol.records import CachedBlocks, Subscribe
from protocol.requests import CacheAction, ControlCache, EngineMessage, FinishReason
from protocol.sampling import SamplingParams
from protocol.transport import Client
from tests.integration.scheduler.engine import PATIENCE, EngineProcesses, engine

SIM = {"backend": "sim", "sim_step_ms": 2.0, "sim_vocab_size": 1000}
BLOCK, PROMPT = 16, [*range(70)]


class CacheFollower:
    """A frontend that sends no request."""

    def __init__(self, running: EngineProcesses) -> None:
        self._client, self._decoder = Client(running.client_endpoint), Decoder[EngineMessage](EngineMessage)
        running.connections.callback(self._client.close)
        self._client.handshake("frontend", "follower", PATIENCE)
        self.send(Subscribe(steps=False, cached_blocks=True))
        self.names: set[bytes] = set()
        self.numbers: list[int] = []

    def send(self, message: Subscribe | ControlCache) -> None:
        self._client.send(message)

    def follow_until(self, names: set[bytes]) -> None:
        """Receive until these names are known."""
        while not names <= self.names:
            self.receive()

    def receive(self) -> None:
        frame = self._client.receive(PATIENCE)
        assert frame is not None, "the scheduler is silent"
        if isinstance(message := self._decoder.decode(frame), CachedBlocks):
            self.numbers.append(message.number)
            if message.number == 0:
                self.names.clear()
            self.names -= set(split_names(message.removed))
            self.names |= set(split_names(message.stored))


def test_followers_know_what_others_have_placed(tmp_path: Path) -> None:
    limits = {"max_model_len": 512, "block_size": BLOCK}
    with engine(tmp_path, limits, SIM) as running:
        early = CacheFollower(running)
        client = running.connect()
        for number, salt in enumerate(("one key", "another key")):
            client.generate(number, PROMPT, SamplingParams(40, temperature=0.0), cache_salt=salt)
        client.wait_finished(0, 1)
        assert all(finish.reason is FinishReason.LENGTH for finish in client.finished.values())
        expected = {name for salt in ("one key", "another key") for name in names_of(salt, pack(PROMPT), BLOCK)}
        early.follow_until(expected)
        late = CacheFollower(running)
        late.follow_until(expected)
        for follower in (early, late):  # the answers' blocks follow the prompts'
            while len(follower.names) < 2 * ((len(PROMPT) + 40 - 1) // BLOCK):
                follower.receive()
        assert early.names == late.names
        assert len(early.names) == 2 * ((len(PROMPT) + 40 - 1) // BLOCK)
        assert early.names.isdisjoint(names_of("", pack(PROMPT), BLOCK))
        assert early.numbers == [*range(len(early.numbers))]
        early.send(ControlCache(1, CacheAction.RESET))
        while early.names or late.names:
            for follower in (early, late):
                follower.receive()

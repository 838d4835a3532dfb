"""Attacks on the sockets of a real scheduler over tcp, by strangers and by peers with a key of one role.

The streams of the honest frontend must be those of an undisturbed run, and no honest worker may be lost.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.codec import encode, pack
from protocol.epochs import first_epoch
from protocol.membership import Heartbeat, LoadFailed, Register
from protocol.requests import AbortRequest, FinishReason, GenerateRequest
from protocol.sampling import SamplingParams
from protocol.security import Security
from protocol.steps import ModelRunnerOutput, StepFault
from protocol.transport import Client, HandshakeRefused, HandshakeTimeout
from services.cli.transport_keys import make_keys
from tests.integration.scheduler.engine import PATIENCE, EngineProcesses, FrontendConnection, engine

SIM = {"backend": "sim", "sim_step_ms": 10.0, "sim_vocab_size": 1000}
REQUESTS = range(8)
TOKENS = 80
MANY = 1100


class SecuredEngine:
    """A scheduler with two stages over tcp with keys, and an honest frontend."""

    def __init__(self, running: EngineProcesses, keys: Path, endpoints: dict[str, str]) -> None:
        self.running, self.keys, self.endpoints = running, keys, endpoints
        self.frontend = FrontendConnection(endpoints["frontend"], Security(keys / "frontend"))
        self.state = self.frontend.wait_ready()
        self._numbers = 0

    def connect(
        self, role: str, own: str | None = None, name: str = "", socket_of: str = "", seconds: float = PATIENCE
    ) -> Client:
        """Return a client after its handshake, with the key of `own` (default: of its role), at its role's socket."""
        kind = role.partition("-")[0]
        own = kind if own is None else own
        client = Client(self.endpoints[socket_of or kind], Security(self.keys / own if own else None))
        try:
            client.handshake(role, name, seconds)
        except BaseException:
            client.close()
            raise
        return client

    def generate(self) -> list[int]:
        """Open requests, the same ones every time. Return their numbers."""
        numbers = [self._numbers + i for i in REQUESTS]
        self._numbers += len(REQUESTS)
        for i, number in enumerate(numbers):
            prompt = [(i * 37 + j * 11) % 1000 for j in range(24 + i)]
            params = SamplingParams(max_tokens=TOKENS, temperature=float(i % 2), seed=i)
            self.frontend.generate(number, prompt, params)
        return numbers

    def tokens(self, numbers: list[int]) -> list[list[int]]:
        self.frontend.wait_finished(*numbers)
        assert {self.frontend.finished[number].reason for number in numbers} == {FinishReason.LENGTH}
        return [self.frontend.tokens[number] for number in numbers]

    def check_unharmed(self, numbers: list[int], expected: list[list[int]]) -> None:
        assert self.tokens(numbers) == expected
        before = self.frontend.state
        while self.frontend.state is before:
            self.frontend.receive()
        state = self.frontend.state
        assert state.stats["epochs_lost_total"] == 0
        assert [process.poll() for process in (self.running.scheduler, *self.running.workers)] == [None] * 3


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredEngine]:
    directory = tmp_path_factory.mktemp("engine")
    make_keys(directory / "keys")
    endpoints = {}
    for role in ("frontend", "worker"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoints[role] = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    scheduler = {
        "worker_endpoint": endpoints["worker"],
        "client_endpoint": endpoints["frontend"],
        "transport_keys": str(directory / "keys" / "scheduler"),
        "pipeline_parallel_size": 2,
        "max_model_len": 512,
    }
    worker = SIM | {"scheduler_endpoint": endpoints["worker"], "transport_keys": str(directory / "keys" / "worker")}
    with engine(directory, scheduler, worker, num_workers=2) as running:
        secured = SecuredEngine(running, directory / "keys", endpoints)
        yield secured
        secured.frontend.close()


@pytest.fixture(scope="module")
def undisturbed(secured: SecuredEngine) -> list[list[int]]:
    return secured.tokens(secured.generate())


def epoch_in_effect(secured: SecuredEngine) -> int:
    """The only epoch so far. A peer can guess it: it begins with the time of the scheduler's start."""
    return first_epoch(secured.state.incarnation) + 1


def expelled(client: Client) -> str:
    """Return why a client was refused, after reading what was sent to it before."""
    try:
        while client.receive(PATIENCE) is not None:
            pass
    except HandshakeRefused as refused:
        return str(refused)
    finally:
        client.close()
    raise AssertionError("the client was not refused")


def test_peer_without_the_key_of_its_role_runs_no_prompt_and_is_sent_none(
    secured: SecuredEngine, undisturbed: list[list[int]]
) -> None:
    numbers = secured.generate()
    for role, own, socket_of in (
        ("frontend", "", "frontend"),
        ("worker", "", "worker"),
        ("worker", "frontend", "worker"),
        ("frontend", "worker", "frontend"),
        ("frontend", "scheduler", "frontend"),
        ("worker", "worker", "frontend"),
    ):
        with pytest.raises((HandshakeRefused, HandshakeTimeout)):
            secured.connect(role, own, socket_of=socket_of, seconds=2.0)
    secured.check_unharmed(numbers, undisturbed)


def test_tokens_of_others_cannot_be_forged(secured: SecuredEngine, undisturbed: list[list[int]]) -> None:
    """By a worker that is not the output rank, on its connection for results or on the other one."""
    numbers = secured.generate()
    epoch, name = epoch_in_effect(secured), "intruder"
    for step in range(1, 2000, 400):
        forged = ModelRunnerOutput(epoch, step, pack([0]), pack([1]), pack([1]), pack([7]))
        first, second = secured.connect("worker", name=name), secured.connect("worker-results", name=name)
        second.send(forged)
        assert "another rank sends the results" in expelled(first)
        second.close()
        first = secured.connect("worker", name=f"{name} again")
        first.send(forged)
        assert "results belong on the connection for results" in expelled(first)
    lone = secured.connect("worker-results", name="nobody")
    lone.send(ModelRunnerOutput(epoch, 1, pack([0]), pack([1]), pack([1]), pack([7])))
    lone.send(StepFault(epoch, 1, "it failed"))
    secured.check_unharmed(numbers, undisturbed)
    lone.close()


def test_bad_frames_cost_their_sender_alone(secured: SecuredEngine, undisturbed: list[list[int]]) -> None:
    numbers = secured.generate()
    for frame in (b"\xc1", b"\x90", encode(Heartbeat(1, 1))[:-1], encode(AbortRequest([1])), b"\x00" * 1000):
        first = secured.connect("worker", name="bad")
        second = secured.connect("worker-results", name="bad")
        second.socket.send(frame)
        assert "bad message" in expelled(second)
        first.close()
    for frame in (b"\xc1", encode(Heartbeat(1, 1)), encode(Register("sim", "m"))):
        client = secured.connect("frontend")
        client.socket.send(frame)
        assert "bad message" in expelled(client)
    secured.check_unharmed(numbers, undisturbed)


def test_faults_of_a_stranger_are_its_own(secured: SecuredEngine, undisturbed: list[list[int]]) -> None:
    numbers, epoch = secured.generate(), epoch_in_effect(secured)
    first, second = secured.connect("worker", name="fake"), secured.connect("worker-results", name="fake")
    first.send(Register("sim", "m", model_hash="other"))
    assert "model hash mismatch" in expelled(first)
    second.send(StepFault(epoch, 1, "it failed"))
    second.close()
    first = secured.connect("worker", name="fake")
    first.send(LoadFailed("it cannot serve"))
    secured.check_unharmed(numbers, undisturbed)
    first.close()


def test_other_frontends_requests_are_not_aborted(secured: SecuredEngine, undisturbed: list[list[int]]) -> None:
    """A frontend numbers its own requests: the numbers of others mean nothing."""
    numbers = secured.generate()
    other = secured.connect("frontend")
    other.send(AbortRequest(numbers))
    other.send(GenerateRequest(numbers[0], pack([1, 2, 3]), 3, SamplingParams(max_tokens=4)))
    secured.check_unharmed(numbers, undisturbed)
    other.close()


@pytest.mark.parametrize("role", ["frontend", "worker"])
def test_many_peers_that_leave_at_once_change_nothing(
    secured: SecuredEngine, undisturbed: list[list[int]], role: str
) -> None:
    numbers = secured.generate()
    clients = []
    for number in range(MANY):
        kind = role.partition("-")[0]
        client = Client(secured.endpoints[kind], Security(secured.keys / kind))
        client.send_hello(role, f"{role} {number}")
        clients.append(client)
        if len(clients) == 50:
            clients[-1].handshake(role, f"{role} {number}", PATIENCE)
            for client in clients:
                client.close()
            clients.clear()
    secured.connect(role, name="honest").close()
    secured.check_unharmed(numbers, undisturbed)

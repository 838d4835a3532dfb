"""KV memory that outlives its worker: shared memory without a name, whose descriptors a keeper holds.

A worker connects to the keeper's socket, sends a digest of everything that the content of its cache depends on, and
gets the memory that an earlier worker has left under this digest, else an empty one. The memory is its own until the
connection ends. The kernel closes the connections of a process that was killed after its mappings, so nobody writes to
memory that another worker gets.

Memory without an owner is freed after some seconds, when a worker asks for one that is not there (it needs the room),
and when blocks are dropped. The time does not run while a worker is connected that has not asked yet: it loads.
"""

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.transport.endpoint import prepare_path

log = logging.getLogger("runahead")

KV_KEEPER = "RUNAHEAD_KV_KEEPER_SOCKET"
"""Environment variable of a worker: socket of the keeper in the process that has started it."""
MAX_CONNECTIONS = 256
TIMEOUT = 10.0
"""Seconds that a worker waits for a keeper."""
_DIGEST_BYTES, _DROP = 32, b"drop"


@dataclass
class _Memory:
    digest: bytes
    descriptor: int
    owner: Hashable | None
    """None: the worker has ended."""
    left: float = 0.0
    """When it ended, seconds on the monotonic clock."""


class Memories:
    """Memories of a keeper. Each has one owner at a time, or none."""

    def __init__(self) -> None:
        self._memories: list[_Memory] = []

    @property
    def owners(self) -> set[Hashable]:
        return {memory.owner for memory in self._memories}

    @property
    def oldest(self) -> float | None:
        """When the first one of those without an owner was left; None: all have one."""
        return min((memory.left for memory in self._memories if memory.owner is None), default=None)

    def claim(self, owner: Hashable, digest: bytes) -> int:
        """Return a descriptor of the memory that was left last under this digest, else of an empty one. The memory
        that the owner had is freed: it uses that no more. Raises: OSError"""
        self.end(owner, is_over=True)
        found = [memory for memory in self._memories if memory.owner is None and memory.digest == digest]
        if not found:
            self.free()
            found = [_Memory(digest, os.memfd_create("runahead-kv"), None)]
            self._memories += found
        memory = max(found, key=lambda memory: memory.left)
        memory.owner = owner
        return memory.descriptor

    def end(self, owner: Hashable, is_over: bool = False) -> None:
        """The owner has ended. `is_over`: it lives, and uses the memory no more."""
        for memory in [memory for memory in self._memories if memory.owner == owner]:
            memory.owner, memory.left = None, time.monotonic()
            if is_over or not os.fstat(memory.descriptor).st_size:
                self._close(memory)

    def free(self, before: float = float("inf")) -> None:
        """Free memory whose owner ended before this time."""
        for memory in [m for m in self._memories if m.owner is None and m.left <= before]:
            self._close(memory)

    def close(self) -> None:
        for memory in [*self._memories]:
            self._close(memory)

    def _close(self, memory: _Memory) -> None:
        self._memories.remove(memory)
        os.close(memory.descriptor)


class Keeper:
    """`path`: socket, for this user only. `seconds`: for which memory without an owner is kept.

    Raises: OSError, also if another keeper uses the socket; AttributeError: the system has no such memory.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        os.close(os.memfd_create("runahead-kv"))
        prepare_path(path)
        path.unlink(missing_ok=True)  # of a keeper that was killed
        self._path, self._seconds = path, seconds
        self._memories = Memories()
        self._peers: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(os.fspath(path))
        path.chmod(0o600)  # nobody can connect before `listen`
        self._listener.listen()

    def run(self, stop: socket.socket) -> None:
        """Serve workers until `stop` is readable."""
        with selectors.DefaultSelector() as selector:
            for source in (stop, self._listener):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._seconds_left())}
                if stop in ready:
                    break
                messages = [(peer, _receive(peer)) for peer in self._peers & ready]
                for peer, message in sorted(messages, key=lambda item: item[1] != b""):  # ends first
                    if not (message and self._answer(peer, message)):
                        selector.unregister(peer)
                        self._end(peer)
                if self._listener in ready and (accepted := self._accept()) is not None:
                    selector.register(accepted, selectors.EVENT_READ)
                if self._seconds_left() == 0:
                    self._memories.free(time.monotonic() - self._seconds)
        self._path.unlink(missing_ok=True)
        for peer in (self._listener, *self._peers):
            peer.close()
        self._memories.close()

    def _seconds_left(self) -> float | None:
        """Return the seconds until memory is freed; None: there is none without an owner, or a worker loads."""
        if (oldest := self._memories.oldest) is None or not self._peers <= self._memories.owners:
            return None
        return max(0.0, oldest + self._seconds - time.monotonic())

    def _accept(self) -> socket.socket | None:
        with contextlib.suppress(OSError):  # it has left
            peer, _ = self._listener.accept()
            if len(self._peers) < MAX_CONNECTIONS and _is_of_this_user(peer):
                peer.setblocking(False)
                self._peers.add(peer)
                return peer
            log.warning("a worker is refused: it is of another user, or there are %d already", MAX_CONNECTIONS)
            peer.close()
        return None

    def _answer(self, peer: socket.socket, message: bytes) -> bool:
        """Return False if the peer has sent nonsense or has left."""
        try:
            if message == _DROP:
                self._memories.free()
                return bool(peer.send(_DROP))
            if len(message) != _DIGEST_BYTES:
                return False
            return bool(socket.send_fds(peer, [message], [self._memories.claim(peer, message)]))
        except OSError as error:
            log.warning("a worker gets no KV memory: %s", error)
            return False

    def _end(self, peer: socket.socket) -> None:
        self._memories.end(peer)
        self._peers.discard(peer)
        peer.close()


@contextlib.contextmanager
def keeping(directory: Path, seconds: float) -> Iterator[dict[str, str]]:
    """Run a keeper in a thread, with its socket in a private directory. Yield the environment of workers that use it;
    it is empty where the system has no such memory."""
    path = directory / "kv"
    try:
        keeper = Keeper(path, seconds)
    except (AttributeError, OSError) as error:
        log.debug("KV memory does not outlive its worker: %s", error)
        yield {}
        return
    stop, end = socket.socketpair()
    thread = threading.Thread(target=keeper.run, args=(stop,), name="KV keeper", daemon=True)
    thread.start()
    try:
        yield {KV_KEEPER: str(path)}
    finally:
        end.close()
        thread.join()
        stop.close()


class KeptMemory:
    """A worker's claim to memory of the keeper at a socket."""

    def __init__(self, path: str) -> None:
        self._path = os.path.expanduser(path)
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        """Connect, if that was not done: nothing that is kept is freed until the claim. Raises: OSError"""
        self._socket = self._socket or self.connected()

    def claim(self, digest: bytes) -> int:
        """Return a descriptor of memory for this digest, which the caller owns. The memory of an earlier claim is
        freed.

        Raises: OSError, if no keeper answers.
        """
        for is_last in (False, True):
            try:
                self.connect()
                assert self._socket is not None
                return _ask(self._socket, digest)[0]
            except (OSError, IndexError) as error:  # the keeper may have been started again
                if self._socket is not None:
                    self._socket.close()
                    self._socket = None
                if is_last:
                    raise OSError(str(error)) from error
        raise AssertionError

    def drop(self) -> None:
        """Free all memory without an owner. Raises: TimeoutError, if that is not confirmed"""
        try:
            with self.connected() as peer:
                _ask(peer, _DROP)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, PermissionError):
            pass  # no keeper of this user is there: it has ended, and so has what it kept
        except OSError as error:
            raise TimeoutError(f"the keeper does not answer: {error}") from error

    def connected(self) -> socket.socket:
        """Return a connection that claims nothing. Raises: OSError"""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.settimeout(TIMEOUT)
            peer.connect(self._path)
            if not _is_of_this_user(peer):
                raise PermissionError(f"the keeper at {self._path} is of another user, who could read prompts")
        except OSError:
            peer.close()
            raise
        return peer


def _ask(peer: socket.socket, message: bytes) -> list[int]:
    """Return the descriptors in the answer. Raises: OSError"""
    peer.sendall(message)
    answer, descriptors, _, _ = socket.recv_fds(peer, _DIGEST_BYTES, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if answer != message:
        raise ConnectionResetError("the keeper has ended the connection")
    return descriptors


def _receive(peer: socket.socket) -> bytes:
    """Return what a worker has sent; b"": it has ended."""
    try:
        return peer.recv(_DIGEST_BYTES)
    except OSError:
        return b""


def _is_of_this_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())

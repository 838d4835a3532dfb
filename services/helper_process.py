"""A process beside a service for work that may crash, hang or fill its memory: that ends one request only."""

import os
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection

MAX_ANSWER_BYTES = 256 << 20
TRANSFER_SECONDS = 30
"""Time limit for the process to read a message, once the buffers of the sockets are full, or to go on with an answer
that it has begun."""


class HelperProcess:
    """A process that answers each message with another one. It ends with this object. Signals of a terminal do not
    reach it.

    Args:
        module: started as `python -m MODULE FD PARENT_PID`. FD is its end of a `multiprocessing.connection.Connection`.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", TRANSFER_SECONDS, 0))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | (environment or {}),
                process_group=0,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self.close = weakref.finalize(self, _end, self._process, self._connection)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process. For any thread."""
        self._process.kill()

    def exchange(self, message: bytes, seconds: float) -> bytes:
        """Return the answer to a message.

        Raises: EOFError or OSError, if the process has ended, or does not answer within `seconds`; it must be closed
        """
        self._connection.send_bytes(message)
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv_bytes(MAX_ANSWER_BYTES)


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()

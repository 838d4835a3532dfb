"""The connection of a worker to its scheduler: one for messages, one for results and heartbeats. Both are made anew
when another scheduler takes the place of a lost one."""

import logging
import os
import secrets
import socket
import time

from protocol.transport import Client, HandshakeTimeout, PeerGone, PeerSlow
from services.config import WorkerConfig
from services.process import HangAlarm
from services.worker.result_sender import ResultSender
from services.worker.runner import ModelRunner

log = logging.getLogger("runahead.worker")

CONNECT_ATTEMPT = 5.0
"""Seconds to wait for an answer from a scheduler before connecting anew."""
RECONNECT_PAUSE = 0.1
"""Seconds between two attempts."""
DRAIN_TIMEOUT = 10.0
"""Seconds that the worker waits for steps in flight when it leaves."""
LINGER_MS = 2000
"""Milliseconds that a closed socket keeps sending its last messages."""


class SchedulerLink:
    def __init__(self, config: WorkerConfig, runner: ModelRunner, alarm: HangAlarm) -> None:
        """`alarm`: set while this worker looks for a scheduler, and by the heartbeat thread while it has one."""
        self._config, self._runner, self._alarm = config, runner, alarm
        self.is_closing = False
        """The worker leaves: nothing is connected anew."""
        self.client, self.results = self._make_connections()

    def _make_connections(self) -> tuple[Client, ResultSender]:
        silence = self._config.scheduler_timeout_seconds
        client, results = _client(self._config), _client(self._config)
        return client, ResultSender(results, self._runner.abort, silence, self._alarm)

    def connect_within(self, seconds: float) -> None:
        """Connect, in attempts of some seconds: a scheduler that was found may be stopped, and another takes its place.

        Raises: HandshakeRefused; HandshakeTimeout, PeerGone or PeerSlow of the last attempt.
        """
        deadline, reported = time.monotonic() + seconds, False
        while True:
            self._alarm.set()
            try:
                self._connect(CONNECT_ATTEMPT)
                return
            except (HandshakeTimeout, PeerGone, PeerSlow):
                if not reported:
                    endpoint = self._config.scheduler_endpoint
                    log.info("no scheduler answers at %s; trying again for %.0f s", endpoint, seconds)
                    reported = True
                if time.monotonic() >= deadline or not self.renew():
                    raise
                time.sleep(RECONNECT_PAUSE)

    def _connect(self, timeout: float) -> None:
        """Raises: HandshakeRefused, HandshakeTimeout, PeerGone"""
        # Unique, and not to be guessed: nobody else can name the second connection like the first one.
        name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self.client.handshake("worker", name, timeout)
        self.results.handshake(name, timeout)
        self.results.start()

    def renew(self) -> bool:
        """Make new sockets in place of the old ones. Return False if this worker must end instead."""
        self.client.close()
        if self.is_closing or not self.results.close(DRAIN_TIMEOUT):
            return False
        self.client, self.results = self._make_connections()
        return True

    def close(self) -> bool:
        """Send what is queued. Return False if steps in flight did not end in time."""
        self.client.close()
        return self.results.close(DRAIN_TIMEOUT)


def _client(config: WorkerConfig) -> Client:
    client = Client(config.scheduler_endpoint, config.security)
    client.socket.linger = LINGER_MS  # a fault is a worker's last message, and must arrive
    return client

"""The scheduler's core and a whole worker on a real socket, with the weights of a `VllmWorker`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.membership import InitializeCache, Loaded, LoadProgress, Ping, Pong, Ready
from protocol.steps import ModelRunnerOutput
from services.worker.session import Session
from tests.integration.worker.scripted import ScriptedWorkerServer, worker_thread
from tests.vllm.driver import CONTEXT, VllmRun, VllmWorker


class SocketWorker(VllmWorker):
    """The worker behind a scheduler's socket."""

    def __init__(self, worker: VllmWorker, scheduler: ScriptedWorkerServer) -> None:
        vars(self).update(vars(worker))
        self._scheduler = scheduler

    def enter(self, num_blocks: int) -> Session:
        """Take the worker to the next epoch. Its own session is behind the socket; the one returned is not used."""
        scheduler = self._scheduler
        scheduler.registered()
        scheduler.send(self.next_assignment())
        while not isinstance(loaded := scheduler.next_message(), Loaded):
            assert isinstance(loaded, LoadProgress)
        self.loaded = loaded
        scheduler.send(InitializeCache(num_blocks, CONTEXT))
        assert scheduler.next_message() == Ready(self.epoch)
        return Session()


class SocketRun(VllmRun):
    """One epoch of a whole worker."""

    def __init__(self, worker: VllmWorker, scheduler: ScriptedWorkerServer, depth: int, late: int) -> None:
        self._scheduler = scheduler
        super().__init__(SocketWorker(worker, scheduler), depth, late=late)

    def dispatch(self) -> None:
        self._scheduler.send(*self.core.dispatch())

    def _next_result(self) -> ModelRunnerOutput:
        (result,) = self._scheduler.results(1)
        assert isinstance(result, ModelRunnerOutput)
        return result

    def wait_until_read(self) -> None:
        """Wait until the worker has read everything that was sent; a step may wait for its masks."""
        self._scheduler.send(Ping())
        assert isinstance(self._scheduler.next_message(), Pong)


@contextmanager
def socket_run(worker: VllmWorker, directory: Path, depth: int, late: int) -> Iterator[SocketRun]:
    """Run a worker in a thread with the runner of `worker`, which keeps its weights. `late`: as for `VllmRun`."""
    scheduler = ScriptedWorkerServer(f"ipc://{directory}/w")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.runner, "shutdown", worker.runner.leave)
        with worker_thread(scheduler, directory, lambda _: worker.runner):
            run = SocketRun(worker, scheduler, depth, late)
            worker.epoch += 1
            yield run
    scheduler.close()

"""The frontend's side of the process that renders chat templates."""

import logging
import threading

import msgspec

from services.checkpoint import CheckpointError
from services.frontend.templates import jobs, render_process
from services.helper_process import HelperProcess

log = logging.getLogger("runahead.frontend")

START_SECONDS = 60.0
"""Time limit for a renderer to start and compile the templates."""
PATIENCE_SECONDS = 5.0
"""Time beyond a job's own limit after which the renderer is killed: it may share its core."""
_OUTCOMES: msgspec.json.Decoder[jobs.Outcome] = msgspec.json.Decoder(jobs.Outcome)


def broken(reason: str) -> CheckpointError:
    return CheckpointError(f"the chat template is broken: {reason}; give another with --chat-template")


class Renderer:
    """Renders templates in a separate process, which is started again after it has died. Thread-safe.

    One process is enough: a prompt takes well below a millisecond, and none takes more than its limit.
    """

    def __init__(self, sources: jobs.TemplateSources) -> None:
        """Raises: CheckpointError, if a template is broken"""
        self._sources = msgspec.json.encode(sources)
        self._lock = threading.Lock()
        self._process: HelperProcess | None = self._started()

    def _started(self) -> HelperProcess:
        """Raises: CheckpointError"""
        process = HelperProcess(render_process.__name__)
        try:
            outcome: jobs.Outcome = _OUTCOMES.decode(process.exchange(self._sources, START_SECONDS))
        except (EOFError, OSError):
            outcome = jobs.TemplatesBroken("it takes too much time or memory to compile")
        if isinstance(outcome, jobs.TemplatesBroken):
            process.close()
            raise broken(outcome.reason)
        return process

    def render(self, job: jobs.Conversation) -> jobs.Outcome:
        with self._lock:
            if self._process is None or not self._process.is_alive:  # a process that ends while idle harms no request
                self._process = self._started()
            try:
                return _OUTCOMES.decode(
                    self._process.exchange(msgspec.json.encode(job), job.seconds + PATIENCE_SECONDS)
                )
            except (EOFError, OSError):
                log.warning("the renderer of chat templates is replaced: a template reached its limits")
                self._process = self._process.close()
                return jobs.LimitReached("rendering it takes too much time or memory")

"""Log line of each HTTP request that has ended, written by the event loop a moment later, many at once.

Between two requests most of this code has left the processor's caches, so a line at a time takes several times as long.
"""

import asyncio
import logging
from functools import partial

from services.frontend.metrics import outcome_of
from services.frontend.request_summary import RequestSummary

log = logging.getLogger("runahead.frontend")

DELAY = 0.05
"""Seconds between the end of a request and its line, at most."""


class EndedRequestLog:
    def __init__(self) -> None:
        self._ended: list[RequestSummary] = []

    def add(self, request: RequestSummary) -> None:
        """Write the line soon."""
        if not log.isEnabledFor(logging.INFO):
            return
        if not self._ended:
            asyncio.get_running_loop().call_later(DELAY, self.flush)
        self._ended.append(request)

    def flush(self) -> None:
        """Write all lines now."""
        ended, self._ended = self._ended, []
        for request in ended:
            log.handle(EndRecord(request))


class EndRecord(logging.LogRecord):
    """Log record about the end of a request.

    `log.info` would search for its caller and look up thread and process, which takes longer than everything else; a
    record of this class has none of them.
    """

    levelno = logging.INFO
    levelname = "INFO"
    args = exc_info = exc_text = stack_info = taskName = threadName = processName = thread = process = None  # noqa: N815
    pathname, filename, module, funcName, lineno = __file__, "request_log.py", __name__, "flush", 0  # noqa: N815
    relativeCreated = 0.0  # noqa: N815

    def __init__(self, request: RequestSummary) -> None:
        self.name = log.name
        self.created = request.at
        self.msecs = request.at % 1 * 1000
        reason = f": {request.reason}" if request.reason else ""
        self.msg = (
            f"request {outcome_of(request.status)}: request_id={request.request_id} status={request.status} "
            f"route={request.route} {request.text()}{reason}"
        )
        self.fields = partial(_fields, request)


def _fields(request: RequestSummary) -> dict[str, object]:
    """Return the members of the line in JSON."""
    found: dict[str, object] = {
        "outcome": outcome_of(request.status),
        "request_id": request.request_id,
        "status": request.status,
        "route": request.route,
    }
    if request.engines:
        found["engines"] = [*request.engines]
    return {**found, **request.fields()}

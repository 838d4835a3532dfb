"""A log line for each turn in the life of a request, with its external id. Attached at log level DEBUG only."""

import logging

from protocol.epochs import number_of
from protocol.records import RequestTimes
from protocol.requests import FinishReason
from services.scheduler.build import CoreListener, CoreStart
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.observer import (
    Event,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    RequestRefused,
    StepDispatched,
)

log = logging.getLogger("runahead.scheduler")


class RequestLog(CoreListener):
    """An observer that attaches itself."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], str] = {}
        """External ids of open requests."""

    def attach(self, core: EngineCore, start: CoreStart) -> None:
        core.observers.add(self)

    def observe(self, event: Event) -> None:
        match event:
            case RequestArrived(frontend=frontend, message=message):
                self._ids[frontend, message.number] = message.request_id
                log.debug("request_id=%s arrived: %d prompt tokens", message.request_id, message.num_prompt_tokens)
            case RequestRefused(frontend=frontend, request_id=request_id, finish=finish):
                self._ids.pop((frontend, finish.number), None)
                log.debug("request_id=%s refused: %s", request_id, finish.message)
            case StepDispatched(plan=plan, requests=requests) if requests:
                ids = ", ".join(self._id(key) for key in requests)
                log.debug("request_id=%s scheduled in step %d of epoch %d", ids, plan.step_id, number_of(plan.epoch))
            case RequestPreempted(request=key, cause=cause):
                log.debug("request_id=%s preempted: %s", self._id(key), cause.value)
            case RequestFinished(frontend=frontend, request_id=request_id, finish=finish):
                self._ids.pop((frontend, finish.number), None)
                level = logging.WARNING if finish.reason is FinishReason.ERROR else logging.DEBUG
                reason, times = finish.reason, _times(finish.times)
                text = "" if reason is FinishReason.INVALID else finish.message  # it quotes the grammar
                log.log(level, "request_id=%s finished: %s%s %s", request_id, reason.name, times, text)

    def _id(self, key: tuple[int, int]) -> str:
        return self._ids.get(key, "unknown")


def _times(times: RequestTimes | None) -> str:
    """Milliseconds since the request was queued."""
    if times is None or not times.queued:
        return ""
    moments = {"scheduled": times.scheduled, "first token": times.first_token, "ended": times.ended}
    return "".join(f", {name} after {1e3 * (at - times.queued):.1f} ms" for name, at in moments.items() if at)

"""The state that survives an epoch: requests, the waiting queue, outputs, counters, listeners and the time.

Rules (docs/invariants.md):

- A request is *open* from its admission until its `Finish` was taken by the shell. Every open request is in exactly one
  place: it is being compiled, in the waiting queue, being loaded, or it owns a live slot of the present epoch.
- `end` is the only place where a request becomes finished (one finish). No output of a request follows its `Finish`.
- Tokens of a request that has no slot are confirmed tokens; losing the workers never changes them.
"""

from collections import Counter

from msgspec.structs import replace

from protocol.records import RequestTimes
from protocol.requests import Finish, FinishReason, RequestOutputs
from services.scheduler.core.compiling import CompilingRequests
from services.scheduler.core.loading import LoadingRequests
from services.scheduler.core.masks import RequestMasks
from services.scheduler.core.observer import Observers, RequestFinished
from services.scheduler.core.outputs import OutputBuffer
from services.scheduler.core.pins import Pins
from services.scheduler.core.request import Request, RequestKey, RequestStatus
from services.scheduler.core.suspects import Suspects
from services.scheduler.core.waiting import WaitingQueue
from services.scheduler.grammar import INLINE_MASKS, Compiler, MaskMaker

TOTALS = (
    "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens",
    "external_prefix_cache_queries", "external_prefix_cache_hits",
    "admission_rejections:max_num_queued_reqs", "admission_rejections:max_num_queued_tokens",
    "admission_rejections:max_queue_seconds", "admission_rejections:max_media_bytes",
    "steps_total", "rollbacks_total", "left_out_rows_total", "stale_messages_total",
    "wasted_tokens_total:ignored_row", "wasted_tokens_total:rejected_draft", "wasted_tokens_total:left_out_row",
    "wasted_tokens_total:lost_epoch",
)  # fmt: skip
"""Counters that are published from the start; those of drafts and step sizes follow with the first ones."""


class RequestStore:
    def __init__(self, compiler: Compiler | None = None, mask_maker: MaskMaker = INLINE_MASKS) -> None:
        self.requests: dict[RequestKey, Request] = {}
        """Open requests."""
        self.compiling = CompilingRequests(compiler)
        self.masks = RequestMasks(mask_maker)
        self.waiting = WaitingQueue()
        self.loading = LoadingRequests()
        self.outputs = OutputBuffer()
        self.pins = Pins()
        self.suspects = Suspects()
        self.counters: Counter[str] = Counter(dict.fromkeys(TOTALS, 0))
        """Totals by metric name."""
        self.observers = Observers()
        self.now = 0.0
        """The time of the last `EngineCore.advance`, in seconds."""

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.compiling) + len(self.loading)

    @property
    def num_waiting_tokens(self) -> int:
        return self.waiting.num_tokens + self.compiling.num_tokens + self.loading.num_tokens

    def end(self, request: Request, finish: Finish | None) -> None:
        """Finish a request that has left the queue, its slot or the compiler. `finish` None: nothing is sent."""
        request.become(RequestStatus.FINISHED)
        self.suspects.forget(request.key)
        if finish is None and not self.observers.listening:
            return
        complete = replace(
            finish or request.finish_message(FinishReason.ABORT),
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            times=RequestTimes(request.queued, request.scheduled, request.first_token, self.now),
        )
        if finish is not None:
            self.outputs.finish(request.frontend, complete)
        if self.observers.listening:
            self.observers.emit(RequestFinished(request.frontend, request.request_id, complete))

    def take_outputs(self) -> list[tuple[int, RequestOutputs]]:
        """Return the outputs to publish, one message per frontend, and close the requests that have finished."""
        taken = self.outputs.take()
        for frontend, outputs in taken:
            for finish in outputs.finished:
                key = (frontend, finish.number)
                if key in self.requests and self.requests[key].finished:
                    del self.requests[key]
        return taken

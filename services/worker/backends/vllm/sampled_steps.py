"""Sampled steps whose tokens may still be on their way to the host.

A GPU's worker returns before a step is computed. The next step reads its tokens on the device, so vLLM's states of
requests have placeholders instead, and vLLM replaces them in a request that it adds to its batch by tokens that it
expects from the scheduler. Plans have no tokens; they are taken from the results here.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from services.worker.backends.vllm import vllm_api


class SampledStep:
    """The result of one step. For any thread.

    Args:
        output: of vLLM, which allows one call of `get_output`
    """

    def __init__(self, output: vllm_api.ModelRunnerOutput | vllm_api.AsyncModelRunnerOutput) -> None:
        self.is_deferred = isinstance(output, vllm_api.AsyncModelRunnerOutput)
        """vLLM has returned it before it was computed."""
        self._lock = threading.Lock()
        self._output = output

    def get(self) -> vllm_api.ModelRunnerOutput:
        """Wait, without spinning, until it is on the host."""
        with self._lock:
            if isinstance(self._output, vllm_api.AsyncModelRunnerOutput):
                self._output = self._output.get_output()
            return self._output


class _Unsettled(NamedTuple):
    """A step whose tokens are placeholders in vLLM's states."""

    step: SampledStep
    positions: Mapping[str, int]
    """Position of the sampled token, by request id."""


class TokenPlaceholders:
    """Steps whose tokens are placeholders in vLLM's states of requests. For the thread that runs the steps.

    When a step begins, only the tokens of the latest step are placeholders: vLLM replaces all placeholders at the end
    of a request's output by the one token of the step before, when a parameter needs the output. At a depth of two this
    waits for nothing, because the scheduler has the other results already; at any depth the device has work meanwhile.

    Args:
        requests: vLLM's own states by request id
    """

    def __init__(self, requests: Mapping[str, Any]) -> None:
        self._requests = requests
        self._unsettled: deque[_Unsettled] = deque()
        self._in_batch: frozenset[str] = frozenset()
        """Requests of the latest step. vLLM's batch has these and no others."""

    def add(self, step: SampledStep, positions: Mapping[str, int]) -> None:
        """Add the step just sampled. `positions`: position of the sampled token of each request that samples."""
        if step.is_deferred:
            self._unsettled.append(_Unsettled(step, positions))

    def begin_step(self, ids: Iterable[str]) -> dict[str, list[int]]:
        """Begin a step with rows of these requests.

        Returns: all tokens of each request with output that vLLM adds to its batch in this step. Waits for the latest
            step only if one of them was sampled there.
        """
        rows = frozenset(ids)
        entering = rows - self._in_batch
        self._in_batch = rows
        while len(self._unsettled) > 1:
            self._settle_first()
        if self._unsettled and not entering.isdisjoint(self._unsettled[0].positions):
            self._settle_first()
        states = {request_id: self._requests[request_id] for request_id in entering}
        return {
            request_id: [*state.prompt_token_ids, *state.output_token_ids]
            for request_id, state in states.items()
            if state.output_token_ids
        }

    def _settle_first(self) -> None:
        """Replace the placeholders of the oldest step. Requests that have left have no state."""
        step, positions = self._unsettled.popleft()
        output = step.get()
        for request_id, position in positions.items():
            if (state := self._requests.get(request_id)) is not None:
                [token] = output.sampled_token_ids[output.req_id_to_index[request_id]]
                state.output_token_ids[position - state.num_prompt_tokens] = token

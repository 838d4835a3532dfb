"""Checks of a request on arrival. They protect the shared loop: a request that cannot be served ends alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from protocol.codec import unpack
from protocol.records import RequestTimes
from protocol.requests import MAX_PRIORITY, MAX_RETRY_AFTER, Finish, FinishReason, GenerateRequest
from protocol.sampling import Pooling
from services.scheduler.core.limits import Limits
from services.scheduler.core.slots import Column
from services.scheduler.core.store import RequestStore

MAX_OPEN_MEDIA_BYTES = 2 << 30
"""Bytes of the images and sounds of all open requests, up to a new one."""
AGAIN = 2
"""Requests, and bytes of their files, that may be open with those that were admitted before, as a multiple of those
that new ones can fill."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Sizes of the engine that requests are checked against, besides the `Limits` of the epoch."""

    vocab_size: int
    hidden_size: int
    """Length of an embedding; 0: embeddings are refused."""
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_queue_seconds: float

    def refusal(
        self, message: GenerateRequest, limits: Limits, store: RequestStore, wait: Callable[[int], float]
    ) -> tuple[Finish, str] | None:
        """Return the end of a request that is not admitted, and the setting whose limit is reached; "": the request can
        never be served.

        Args:
            wait: returns the seconds that a new request with so many tokens is expected to wait for its first step.
        """
        tokens = unpack(message.token_ids)
        refused = partial(Finish, message.number, times=RequestTimes(ended=store.now))
        if (problem := next(self._impossible(message, tokens, limits), None)) is not None:
            return refused(FinishReason.INVALID, message=problem), ""
        compiles = store.compiling.compiler is not None
        if (problem := next(self._not_served(message, len(tokens), limits, compiles), None)) is not None:
            return refused(FinishReason.INVALID, message=problem, by_settings=True), ""
        if limit := self._full(message, len(tokens), limits, store):
            return refused(FinishReason.REJECTED, message="the server is overloaded; try again later"), limit
        if message.age:
            return None
        if (seconds := wait(len(tokens))) > self.max_queue_seconds:
            expected = f"a new request would wait about {seconds:.1f} s, and the limit is {self.max_queue_seconds:g} s"
            text = f"the server is overloaded: {expected}; try again later"
            retry_after = min(max(wait(1) - self.max_queue_seconds, 0.0), MAX_RETRY_AFTER)
            return refused(FinishReason.REJECTED, message=text, retry_after=retry_after), "max_queue_seconds"
        return None

    def _full(self, message: GenerateRequest, num_tokens: int, limits: Limits, store: RequestStore) -> str:
        """Return the limit of load that a request with so many tokens exceeds, or "".

        Of requests that were admitted before, all that were open under another scheduler fit: those that waited, within
        the limits of the queue, and those that ran. There is room for them twice, because a frontend that has lost its
        connection submits them before the requests of that connection have ended.
        """
        requests, times = store.num_waiting, 1
        most_requests, most_tokens = self.max_num_queued_reqs, self.max_num_queued_tokens
        if message.age:
            requests, times = len(store.requests), AGAIN
            most_requests += limits.max_num_seqs
            most_tokens += limits.max_num_seqs * limits.max_model_len
        if requests >= times * most_requests:
            return "max_num_queued_reqs"
        if store.num_waiting_tokens + num_tokens > times * most_tokens:
            return "max_num_queued_tokens"
        if message.media is not None:
            held = sum(len(r.media.data) for r in store.requests.values() if r.media is not None)
            if held + len(message.media.data) > times * MAX_OPEN_MEDIA_BYTES:
                return "max_media_bytes"
        return ""

    def _impossible(self, message: GenerateRequest, tokens: Column, limits: Limits) -> Iterator[str]:
        """Yield why no engine of these weights serves a request. Only the first reason may be read."""
        prompt, longest = message.num_prompt_tokens, limits.max_model_len - 1
        if prompt < 1 or len(tokens) < prompt:
            yield "the prompt is empty"
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            yield f"token ids must lie between 0 and {self.vocab_size - 1}"
        if prompt > longest:
            yield f"the prompt has {prompt} tokens, but the context holds at most {longest}"
        params, last = message.params, self.vocab_size - 1
        if max(params.stop_token_ids, default=0) > last:
            yield f"stop_token_ids must lie between 0 and {last}"
        if params.min_tokens > limits.max_model_len:
            yield f"min_tokens is {params.min_tokens}, but the context holds {limits.max_model_len} tokens"
        biased = (token for token, _ in params.logit_bias)
        bad = (token for word in params.bad_words for token in word)
        allowed = unpack(params.allowed_token_ids)
        highest = max(max(biased, default=0), max(bad, default=0), int(allowed.max(initial=0)))
        if highest > last or allowed.min(initial=0) < 0:
            yield f"logit_bias, bad_words and allowed_token_ids must lie between 0 and {last}"
        if abs(message.priority) > MAX_PRIORITY:
            yield f"priority must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}"

    def _not_served(self, message: GenerateRequest, num_tokens: int, limits: Limits, compiles: bool) -> Iterator[str]:
        """Yield why this engine does not serve a request that one with other settings may serve."""
        prompt, params = message.num_prompt_tokens, message.params
        if num_tokens - prompt >= min(params.max_tokens, limits.max_model_len - prompt):
            yield "every token that this request may have was already delivered"
        positions = limits.positions(prompt, params)
        if positions > limits.kv_capacity:
            yield f"the request needs {positions} tokens of KV cache, but it holds {limits.kv_capacity}"
        if message.structured is not None and not compiles:
            yield "structured output is not served: the scheduler was started without the model's tokenizer"
        if (message.pooling is Pooling.MODEL) != limits.pools_only:
            yield "this model generates no text" if limits.pools_only else "this model has no pooler of its own"
        if message.pooling is not Pooling.NONE and not self.hidden_size:
            yield "this backend serves no embeddings"
        if message.lora is not None and not limits.max_loras:
            yield "LoRA adapters are not served: the scheduler was started without --enable-lora"
        if message.media is None:
            return
        if not limits.encoder_budget:
            yield "images and sounds are not served: this model, or its backend, reads text only"
        if params.prompt_logprobs is not None or message.pooling is not Pooling.NONE:
            yield "prompt_logprobs and embeddings are not served with images or sounds"
        at = 0
        for item in message.media.items:
            if item.start < at or not item.length or item.end > prompt:
                yield "the positions of the images and sounds are impossible"
            if item.length > limits.encoder_budget:
                yield (
                    f"an image or sound takes {item.length} tokens, but a step has at most {limits.encoder_budget} "
                    "(--max-num-batched-tokens)"
                )
            at = item.end

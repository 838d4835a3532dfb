"""The choices of one HTTP request, from their submission until all have ended."""

import msgspec

from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams
from services.frontend.engine.streams import ResponseStream
from services.frontend.errors import APIError
from services.frontend.openai.answers.choice import Choice, ChoiceContext, Delivered
from services.frontend.openai.answers.writers import AnswerWriter
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas.responses import PromptLogprobs

NOTHING = Delivered()
OTHER_EVENTS = "its frontend is lost, and this one, with another release or other settings, cannot go on with it"


class Generation:
    """Submits one engine request per choice. The caller must close it."""

    def __init__(self, context: ChoiceContext, shared: GenerateRequest, writer: AnswerWriter, interval: int) -> None:
        """`interval`: tokens of a choice that are written together."""
        self.choices: list[Choice] = []
        self.response = ResponseStream(context.engine.flush_queue, shared.request_id, interval)
        self._context, self._shared, self._writer = context, shared, writer

    def close(self) -> None:
        """Abort the requests that are still open, and count the tokens that they have brought."""
        self._context.summary.output_tokens += sum(choice.num_unfinished_tokens for choice in self.choices)
        self._context.engine.abort(self.choices)
        if len(self._context.engine.engines) > 1:
            self._context.summary.engines = self.response.engines

    def submit(self, prompt: Prompt, params: SamplingParams, delivered: Delivered = NOTHING) -> None:
        """Submit the choices of one prompt. Each has its own seed; only the first requests the prompt's logprobs.

        Args:
            delivered: what the only choice goes on from.

        Raises: APIError
        """
        self._context.usage.prompt_lengths.append(len(prompt.token_ids))
        summary = self._context.summary
        summary.prompt_tokens += len(prompt.token_ids)
        summary.params = summary.params or params
        for sample in range(self._context.body.n or 1):
            writer = self._writer.next_choice()
            choice = Choice(self.response, self._context, prompt, params, is_first=sample == 0, writer=writer)
            if choice.replay(delivered.batches) != delivered.written:
                raise APIError(500, OTHER_EVENTS)
            self._context.engine.submit(choice, prompt.token_ids, params, self._shared, delivered.identity)
            self.choices.append(choice)
            seed = (params.seed + 1) % 2**64
            params = msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """Return vLLM's `prompt_logprobs` for each choice. Raises: APIError, if some have not arrived"""
        if not all(choice.prompt.is_scored for choice in self.choices):
            raise APIError(500, "log-probabilities of the prompt were lost")
        written: list[PromptLogprobs] = []
        for choice in self.choices:  # those of one prompt follow its first
            entry = self._context.formatter.prompt_json(choice.prompt) if choice.is_first else written[-1]
            written.append(entry)
        return written

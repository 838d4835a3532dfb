"""Requests whose grammar is being compiled. They wait beside the queue and hold no seat, no block, no place in it."""

from itertools import takewhile

from protocol.sampling import StructuredOutputParams
from services.scheduler.core.request import Request
from services.scheduler.grammar import Compiler, Grammar

REPLAYED_TOKENS = 1000
"""Output tokens that one call of `replay` passes to a grammar, about 2 ms of work."""


class CompilingRequests:
    def __init__(self, compiler: Compiler | None) -> None:
        """`compiler`: None: no request is compiled."""
        self.compiler = compiler
        self.by_ticket: dict[int, Request] = {}
        """A ticket is never used twice."""

    def __len__(self) -> int:
        return len(self.by_ticket)

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.by_ticket.values())

    def submit(self, ticket: int, request: Request, params: StructuredOutputParams, again: bool) -> None:
        """`again`: the request was admitted before."""
        assert self.compiler is not None
        self.by_ticket[ticket] = request
        self.compiler.submit(ticket, params, request.params.eos_token_ids, again)

    def replay(self, ticket: int, grammar: Grammar | str) -> bool:
        """Let a grammar accept some of the output tokens that its request came with; `EngineCore.on_grammar` does not
        repeat them. Return False if others are left. Call it in turns, because a request may have come with 100,000
        tokens."""
        request = self.by_ticket.get(ticket)
        if request is None or isinstance(grammar, str):
            return True
        begin = request.num_prompt_tokens + request.num_replayed
        tokens = request.token_ids[begin : begin + REPLAYED_TOKENS].tolist()
        accepted = len([*takewhile(grammar.accept, tokens)])
        request.num_replayed += accepted
        return accepted < REPLAYED_TOKENS

    def cancel(self, request: Request) -> bool:
        """Remove a request that ends. Return False if it is not here."""
        ticket = next((ticket for ticket, waits in self.by_ticket.items() if waits is request), None)
        if ticket is None or self.compiler is None:
            return False
        del self.by_ticket[ticket]
        self.compiler.cancel(ticket)
        return True

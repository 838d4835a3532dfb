"""Requests whose grammar is being compiled. They wait beside the queue and hold no seat, no block, no place in it."""

from collections.abc import Iterator

from protocol.sampling import StructuredOutputParams
from services.scheduler.core.request import Request
from services.scheduler.grammar import Compiler


class CompilingRequests:
    """Requests by ticket; a ticket is never used twice."""

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._by_ticket: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_ticket.values())

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._by_ticket

    @property
    def serves(self) -> bool:
        """Return whether there is a compiler."""
        return self._compiler is not None

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self._by_ticket.values())

    def submit(self, ticket: int, request: Request, params: StructuredOutputParams, again: bool) -> None:
        """`again`: the request was admitted before."""
        if self._compiler is None:
            raise ValueError("structured output is requested, but there is no compiler")
        self._by_ticket[ticket] = request
        self._compiler.submit(ticket, params, request.params.eos_token_ids, again)

    def get(self, ticket: int) -> Request | None:
        """Return the request whose grammar has arrived; None if it ended meanwhile."""
        return self._by_ticket.get(ticket)

    def take(self, ticket: int) -> Request | None:
        """Remove the request whose grammar has arrived; None if it ended meanwhile."""
        return self._by_ticket.pop(ticket, None)

    def cancel(self, request: Request) -> bool:
        """Remove a request that ends. Return False if it is not here."""
        ticket = next((ticket for ticket, waits in self._by_ticket.items() if waits is request), None)
        if ticket is None or self._compiler is None:
            return False
        del self._by_ticket[ticket]
        self._compiler.cancel(ticket)
        return True

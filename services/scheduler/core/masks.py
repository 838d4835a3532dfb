"""Masks of constrained requests, made by a `MaskMaker`.

A request's masks belong to its confirmed tokens: they are made for its next row once no earlier sampling row of it is
in flight, serve every row that is planned until a token is emitted, and are dropped then. Neither preemption nor the
loss of the workers changes them.
"""

from services.scheduler.core.request import Request
from services.scheduler.grammar import MaskMaker, Masks


class RequestMasks:
    """Masks by request; those that are being made by ticket. A ticket is never used twice."""

    def __init__(self, maker: MaskMaker) -> None:
        self.maker = maker
        self._by_ticket: dict[int, Request] = {}
        self.last_ticket = 0
        """Number of times that masks were made or begun."""

    def __len__(self) -> int:
        """Masks that are being made, those of ended requests included."""
        return len(self._by_ticket)

    def get(self, request: Request, num_drafts: int, num_words: int) -> Masks | None:
        """Return the masks of the request's next row, or None while they are being made.

        Args:
            num_drafts: drafts that the row verifies.
            num_words: int32 words of one mask.
        """
        if request.masks is None and not request.mask_ticket:
            assert request.grammar is not None
            self.last_ticket += 1
            drafts = request.draft_ids[:num_drafts].tolist() if num_drafts else []
            request.masks = self.maker.submit(self.last_ticket, request.grammar, drafts, num_words)
            if request.masks is None:
                request.mask_ticket = self.last_ticket
                self._by_ticket[self.last_ticket] = request
        return request.masks

    def take(self, ticket: int, masks: Masks) -> None:
        """Give the request the masks that were made for it; it may have ended.

        Raises: KeyError, if the ticket is unknown.
        """
        request = self._by_ticket.pop(ticket)
        request.masks, request.mask_ticket = masks, 0

"""A stored response, which clients may continue by `previous_response_id`."""

from dataclasses import dataclass

import msgspec

from services.frontend.errors import APIError, invalid
from services.frontend.responses_api.background import Run
from services.frontend.responses_api.response_file import ITEM_LIST, StoredHead
from services.frontend.responses_api.schemas import Item

_NOT_CONTINUED = ("queued", "in_progress", "failed", "cancelled")
"""Statuses of responses without a whole answer."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    head: StoredHead
    written: bytes | Run
    """The response; that of one which was created with `background` may grow."""

    @property
    def response(self) -> bytes:
        """The response as it is now."""
        return self.written if isinstance(self.written, bytes) else self.written.response

    def items(self) -> list[Item]:
        """Return the conversation up to and with the answer. Raises: APIError, if the answer is not whole"""
        response = msgspec.json.decode(self.response)
        if response.get("status") in _NOT_CONTINUED:
            raise invalid(
                f"the response is {response['status']}; only one that is completed or incomplete can be continued",
                "previous_response_id",
            )
        return self.head.items() + ITEM_LIST.validate_python(response["output"])

    def run(self, param: str | None = None) -> Run:
        """Return the run of a response with `background`. Raises: APIError, if it is another one"""
        if isinstance(self.written, bytes):
            raise invalid(
                "this response was not created with background; its events were not kept, and it cannot be cancelled",
                param,
            )
        return self.written

    def given(self) -> list[Item]:
        """Return the items of this turn's request."""
        return self.head.items()[-self.head.num_given :]


def not_stored(id: str, param: str | None) -> APIError:
    return APIError(
        404,
        f"response {id!r:.80} is not stored here: it is unknown, deleted, expired, or was made by another frontend",
        param,
        "previous_response_not_found" if param else "response_not_found",
        logged="this response is not stored here",
    )

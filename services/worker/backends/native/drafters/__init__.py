"""What proposes drafts: one class per method."""

from services.worker.backends.native.drafters.base import Drafter, Target
from services.worker.runner import LoadError


def create(target: Target) -> Drafter:
    """The drafter that the scheduler's `--speculative-config` asks for.

    Raises: LoadError, when there is none, or its checkpoint cannot be used with this model.
    """
    match target.speculation.method:
        case method:
            raise LoadError(f"speculation by {method} is not supported; the native backend has none")

"""Drafters: one module per method."""

from services.worker.backends.native.drafters.base import Drafter, TargetModel
from services.worker.backends.native.drafters.deferred import deferred
from services.worker.backends.native.drafters.draft_model import draft_model_drafter
from services.worker.backends.native.drafters.eagle import eagle_drafter
from services.worker.backends.native.drafters.ngram import ngram_drafter
from services.worker.runner import LoadError


def create(target: TargetModel) -> Drafter:
    """The drafter of the scheduler's `--speculative-config`.

    Raises: LoadError, when there is none, or its checkpoint cannot be used with this model.
    """
    match target.speculation.method:
        case "ngram":
            return ngram_drafter(target)
        case "draft_model":
            return draft_model_drafter(target)
        case "eagle" | "eagle3":
            return deferred(eagle_drafter(target))
        case method:
            raise LoadError(f"speculation by {method} is not supported; the native backend has none")

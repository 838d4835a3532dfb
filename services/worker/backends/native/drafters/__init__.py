"""Drafters: one module per method."""

from services.worker.backends.native.drafters.base import Drafter, TargetModel
from services.worker.backends.native.drafters.deferred import DeferredDrafter
from services.worker.backends.native.drafters.draft_model import DraftModelDrafter
from services.worker.backends.native.drafters.eagle import EagleDrafter
from services.worker.backends.native.drafters.ngram import NgramDrafter
from services.worker.runner import LoadError


def create(target: TargetModel) -> Drafter:
    """The drafter of the scheduler's `--speculative-config`.

    Raises: LoadError, when there is none, or its checkpoint cannot be used with this model.
    """
    match target.speculation.method:
        case "ngram":
            return NgramDrafter(target)
        case "draft_model":
            return DraftModelDrafter(target)
        case "eagle" | "eagle3":
            return DeferredDrafter(EagleDrafter(target))
        case method:
            raise LoadError(f"speculation by {method} is not supported; the native backend has none")

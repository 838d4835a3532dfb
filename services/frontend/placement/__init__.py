"""Placement of requests on engines: a core without sockets and clock."""

from services.frontend.placement.decisions import (
    Decision,
    EngineReport,
    Hold,
    Move,
    Place,
    Reason,
    Refuse,
)
from services.frontend.placement.engine_states import (
    SILENT_AFTER,
    Condition,
    EngineEvent,
    IllegalTransition,
    condition_after,
)
from services.frontend.placement.placement import Placement

__all__ = [
    "SILENT_AFTER",
    "Condition",
    "Decision",
    "EngineEvent",
    "EngineReport",
    "Hold",
    "IllegalTransition",
    "Move",
    "Place",
    "Placement",
    "Reason",
    "Refuse",
    "condition_after",
]

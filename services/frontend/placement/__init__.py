"""Placement of requests on engines: a core without sockets and clock."""

from services.frontend.placement.decisions import (
    Decision,
    EngineReport,
    Hold,
    Move,
    Place,
    PlacementLimits,
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
from services.frontend.placement.policies import PlacementPolicy, PlacementView, find_placement_policy

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
    "PlacementLimits",
    "PlacementPolicy",
    "PlacementView",
    "Reason",
    "Refuse",
    "condition_after",
    "find_placement_policy",
]

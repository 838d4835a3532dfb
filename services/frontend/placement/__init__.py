"""Placement of requests on engines: a core without sockets and clock."""

from services.frontend.placement.decisions import (
    Condition,
    Decision,
    EngineReport,
    Hold,
    LoadAhead,
    Move,
    Place,
    Reason,
    RefuseRequest,
    Role,
)
from services.frontend.placement.placement import Placement
from services.frontend.placement.policies import PlacementPolicy, PlacementView, find_placement_policy

"""Routes of `--enable-admin-routes`, which change the engine."""

from fastapi import APIRouter
from typing_extensions import TypedDict

from services.frontend.context import Context
from services.frontend.openapi import GUARDED, errors

router = APIRouter(responses=errors(400, *GUARDED, 503))


class ResetResponse(TypedDict):
    success: bool
    """False: running requests still share blocks."""


@router.post("/reset_prefix_cache", summary="Empties the prefix cache")
async def reset_prefix_cache(context: Context, reset_running_requests: bool = False) -> ResetResponse:
    return {"success": await context.engine.reset_prefix_cache(reset_running_requests)}

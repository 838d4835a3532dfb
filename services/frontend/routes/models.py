"""/v1/models: the names under which the model is served, in OpenAI's and Anthropic's form at once."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Path
from typing_extensions import TypedDict

from services.frontend.context import AppContext, Context
from services.frontend.openai.schemas.responses import Natural
from services.frontend.openapi import GUARDED, errors

router = APIRouter(responses=errors(*GUARDED))


class ModelEntry(TypedDict):
    id: str
    object: Literal["model"]
    created: Natural
    owned_by: str
    max_model_len: Natural | None
    type: Literal["model"]
    display_name: str
    created_at: str
    """RFC 3339."""
    root: str
    """vLLM's: the name of the checkpoint."""
    parent: str | None
    """The model of an adapter."""


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelEntry]
    first_id: str
    last_id: str
    has_more: Literal[False]


@router.get("/v1/models", summary="Models that are served")
async def models(context: Context) -> ModelList:
    names = context.model.all_names
    data = [_entry(context, name) for name in names]
    return {"object": "list", "data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}


@router.get("/v1/models/{name:path}", summary="One of the models", responses=errors(400, 404))
async def model(name: Annotated[str, Path(max_length=512)], context: Context) -> ModelEntry:
    context.model.adapter(name)
    return _entry(context, name)


def _entry(context: AppContext, name: str) -> ModelEntry:
    is_adapter = context.model.adapters.get(name) is not None
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "runahead",
        "max_model_len": context.engine.state.max_model_len or None,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.started, UTC).isoformat().replace("+00:00", "Z"),
        "root": name if is_adapter else context.model.root,
        "parent": context.model.names[0] if is_adapter else None,
    }

"""Routes that routers and people ask about the server. Answers have names and sizes, and no paths or keys."""

from fastapi import APIRouter
from typing_extensions import TypedDict

from services import release
from services.frontend.context import AppContext, Context
from services.frontend.openai.schemas.responses import Natural
from services.frontend.openai.tasks import GENERATE
from services.frontend.openapi import GUARDED, errors
from services.frontend.routes.probes import PHASE_TEXTS

router = APIRouter(responses=errors(*GUARDED))


class VersionResponse(TypedDict):
    version: str


class NamedModel(TypedDict):
    """Name of the model in the API, under each key that routers read it from."""

    model_id: str
    model_path: str
    tokenizer_path: str
    served_model_name: str


class ServerInfo(VersionResponse, NamedModel):
    phase: str
    detail: str
    """One line for people."""
    served_model_names: list[str]
    max_model_len: Natural | None
    num_blocks: Natural
    """KV-cache blocks."""
    block_size: Natural
    """Tokens per block."""
    max_num_seqs: Natural
    features: dict[str, str]
    """Combination of features of the engine."""


class ModelInfo(NamedModel):
    is_generation: bool
    task: str
    """"generate", or what the model computes instead."""
    max_model_len: Natural | None


class TokenizerInfo(TypedDict):
    tokenizer_class: str
    special_tokens: dict[str, str]
    chat_template: str | None


class LoadResponse(TypedDict):
    server_load: Natural


@router.get("/version", summary="Version of the server")
async def version() -> VersionResponse:
    return {"version": release.version()}


@router.get("/server_info", summary="State and sizes of the engine")
@router.get("/get_server_info", summary="State and sizes of the engine, as older routers read them")
async def server_info(context: Context) -> ServerInfo:
    state = context.engine.state
    return {
        **_named(context),
        "version": release.version(),
        "phase": state.phase.name.lower(),
        "detail": PHASE_TEXTS[state.phase],
        "served_model_names": context.model.names,
        "max_model_len": state.max_model_len or None,
        "num_blocks": state.num_blocks,
        "block_size": state.block_size,
        "max_num_seqs": state.max_num_seqs,
        "features": state.info,
    }


def _named(context: AppContext) -> NamedModel:
    name = context.model.names[0]
    return {"model_id": name, "model_path": name, "tokenizer_path": name, "served_model_name": name}


@router.get("/model_info", summary="The model, as SGLang's routers read it")
@router.get("/get_model_info", summary="The model, as older routers read it")
async def model_info(context: Context) -> ModelInfo:
    state = context.engine.state
    return {
        **_named(context),
        "is_generation": state.pooling is None,
        "task": GENERATE if state.pooling is None else state.pooling.task,
        "max_model_len": state.max_model_len or None,
    }


@router.get("/tokenizer_info", summary="Special tokens and chat template")
async def tokenizer_info(context: Context) -> TokenizerInfo:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "special_tokens": context.model.tokenizer.special,
        "chat_template": context.model.template.text,
    }


@router.get("/load", summary="Number of open requests")
async def load(context: Context) -> LoadResponse:
    return {"server_load": context.engine.num_open}

"""The routes of a model by what it computes. Other routes are refused by name."""

from protocol.pooling import PoolingModel
from services.frontend.errors import invalid

GENERATE = "generate"
ROUTES = {
    GENERATE: "/v1/chat/completions, /v1/completions or /v1/embeddings",
    "embed": "/v1/embeddings, /score, /rerank or /pooling",
    "classify": "/classify or /pooling; with one class /score or /rerank",
    "token_embed": "/score, /rerank or /pooling",
    "token_classify": "/pooling",
}


ANSWER_PATHS = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses",
        "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling",
    }
)  # fmt: skip
"""Routes that submit requests to the engine."""


def check_task(model: PoolingModel | None, *tasks: str) -> None:
    """
    Args:
        model: None: the engine's model generates text.

    Raises: APIError, if the model serves none of the tasks
    """
    task = GENERATE if model is None else model.task
    if task not in tasks:
        raise invalid(f"this model is served for the task {task}: use {ROUTES[task]}", "model")

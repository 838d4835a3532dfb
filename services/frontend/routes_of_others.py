"""Routes of vLLM, SGLang, llama.cpp, Ollama and OpenAI that are not served, with a hint for each."""

_BY_HINT = {
    "use /v1/completions": (
        "/completion /generate /generate_stream /infill /inference/v1/generate /api/generate /v1/engines"
    ),
    "use /v1/chat/completions": "/api/chat /invocations",
    "use /v1/embeddings": "/embedding /encode /api/embed /api/embeddings",
    "use /rerank": "/reranking /v1/reranking",
    "use /v1/models": "/api/tags /api/show",
    "use /server_info": "/props /slots /api/ps",
    "use /readyz": "/health_generate",
    "use /version": "/api/version",
    "use /tokenize with messages": "/apply-template",
    "use /reset_prefix_cache, which needs --enable-admin-routes": "/flush_cache",
    "use /v1/load_lora_adapter, which needs --enable-admin-routes": "/load_lora_adapter /lora-adapters",
    "close the connection of the request to end it": "/abort_request",
    "use `runahead run-batch`": "/v1/files /v1/batches /v1/messages/batches",
    "use `runahead trace`": "/start_profile /stop_profile",
    "a server has the model that it was started with": "/api/pull /api/create /api/delete",
    "an engine does not sleep": "/sleep /wake_up /is_sleeping",
}
_HINTS = {route: text for text, routes in _BY_HINT.items() for route in routes.split()}


def hint(path: str) -> str | None:
    """Return what to do instead of calling a route that others have, or one below it; None for any other path."""
    return next((text for route, text in _HINTS.items() if f"{path}/".startswith(f"{route}/")), None)

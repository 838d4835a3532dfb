"""Settings of `runahead run-batch`."""

from pydantic import Field

from services.config.base import ServiceConfig, TrustConfig
from services.config.http import HttpConfig
from services.config.serve import CONNECTION, OMITTED, ServeConfig


class RunBatchConfig(TrustConfig, ServeConfig):
    """Settings of a batch, and of the services that it starts. Names are those of `vllm run-batch`."""

    input_file: str = Field("", description="File with a request per line, in the format of OpenAI's batch files.")
    output_file: str = Field("", description="File to write: an answer per line, in the order of the input.")
    url: str = Field(
        "",
        pattern="^(https?://.*)?$",
        description="URL of a running server, without /v1. Default: none; the services are started for the batch.",
    )
    max_concurrency: int | None = Field(
        None, ge=1, description="Maximum number of requests open at once. Default: --max-num-seqs."
    )


WITHOUT_SERVER = (
    OMITTED
    | CONNECTION
    | {"headless"}
    | (set(HttpConfig.model_fields) - set(ServiceConfig.model_fields) - {"api_key", "api_key_file"})
)
"""Settings of a server that has users; a batch has none of them."""

"""Settings that all services share."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from protocol.security import Security

CHECKPOINT = (
    "Directory, GGUF file or Hugging Face name of the checkpoint; NAME:Q4_K_M is one of several GGUF files there. "
    "Default: SmolLM2-135M-Instruct, if it is installed."
)
"""Description of the setting `model` of frontends and workers."""
REVISION = "Branch, tag or commit on the hub, for every file. Default: the main branch."
ENABLE_LORA = "Serve LoRA adapters beside the model; --backend vllm only."
MAX_LORA_RANK = "Maximum rank of a LoRA adapter."
TOKENIZER = "Directory or Hugging Face name of another tokenizer. Default: the checkpoint's."


def from_json(value: object) -> object:
    """Parse JSON from a flag or the environment. A file may contain the mapping itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None


def as_list(value: object) -> object:
    """Return a list of one text, or another value as it is."""
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(as_list)]


def flag(name: str) -> str:
    """Return the flag of a field: `--max-num-seqs` for `max_num_seqs`."""
    return "--" + name.replace("_", "-")


class BaseConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    def refusals(self) -> Iterator[str]:
        """Yield the reasons why these settings cannot be combined. The first one is reported."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for reason in self.refusals():
            raise ValueError(reason)
        return self


class ClientConfig(BaseConfig):
    """Settings of a command that calls a server: what it presents, and what it trusts."""

    api_key: Texts = Field(default_factory=list)
    """API key. The first one is sent, if there are several, as in the environment of a server. Default: none."""
    insecure: bool = False
    """Do not check the server's certificate."""
    cacert: str = ""
    """File with the authorities to trust. Default: those of the system; certificates of this machine's addresses are
    not checked."""
    ssl_certfile: str | None = None
    """File with a certificate for a server that asks its clients for one, PEM. Default: none."""
    ssl_keyfile: str | None = None
    """File with the key of the certificate, PEM. Default: in the certificate's file."""

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            yield "--ssl-keyfile needs --ssl-certfile"


class ServiceConfig(BaseConfig):
    """Settings of every service."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity of messages on stderr."""
    log_format: Literal["text", "json"] = "text"
    """Form of messages on stderr: lines of text, or a JSON object per line."""
    transport_keys: str | None = None
    """Directory with the keys of this service (`runahead keys` makes them): tcp connections between services are
    authenticated and encrypted. Default: none, for ipc and loopback."""
    insecure_transport: bool = False
    """Allow tcp connections beyond loopback without keys. Anyone who reaches the scheduler can then act as a frontend
    or as a worker, and anyone who reaches the endpoint of KV events reads prompts."""
    scheduler_timeout_seconds: float = Field(10.0, ge=2)
    """Seconds without a message from the scheduler after which frontends and workers look for another one. A scheduler
    that did not run for so long exits."""
    recovery_timeout_seconds: float = Field(300.0, gt=0)
    """Seconds that open requests wait for the replacement of a lost worker or scheduler before they fail, and that a
    worker waits for another scheduler before it exits."""

    @property
    def security(self) -> Security:
        """Protection of connections between services."""
        return Security(Path(self.transport_keys) if self.transport_keys else None, self.insecure_transport)

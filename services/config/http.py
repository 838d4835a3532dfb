"""Settings of the HTTP server: where it listens, and whom it answers."""

import ipaddress
import json
import re
from collections.abc import Iterator

from pydantic import Field, field_validator

from services.config.base import ServiceConfig, Texts, as_list, flag

LOOPBACK_NAMES = ("localhost", "*.localhost", "127.0.0.1", "[::1]")
"""Values of the header Host that no name server can make another site's pages send."""


class HttpConfig(ServiceConfig):
    host: str = Field("127.0.0.1", min_length=1)  # "" would be all addresses
    """Address of the HTTP server."""
    port: int = Field(8000, ge=0, le=65535)
    """Port of the HTTP server. 0: any free port."""
    uds: str | None = None
    """Path of a Unix socket to listen on, instead of host and port. Default: none."""
    root_path: str = Field("", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    """Path below which a proxy serves the API, such as /llm. Requests may have it or not."""
    ssl_certfile: str | None = None
    """File with the server's certificate chain, PEM. Default: none, which is plain HTTP."""
    ssl_keyfile: str | None = None
    """File with the key of the certificate, PEM. Default: in the certificate's file."""
    ssl_ca_certs: str | None = None
    """File with certificates of authorities, PEM. Clients, probes included, must have a certificate that one of them
    has signed. Default: none."""
    api_key: Texts = Field(default_factory=list)
    """API keys, one of which every request must carry as its bearer token. Default: none."""
    api_key_file: str | None = None
    """File with API keys, one per line, such as a secret of Docker or Kubernetes. Default: none."""
    allowed_hosts: Texts = Field(default_factory=list)
    """Values of the header Host that are answered, such as llm.example.com or *.example.com; probes are always
    answered; * means all. Default: all, but without an API key on a loopback address or a Unix socket only localhost,
    *.localhost, 127.0.0.1, [::1] and --host."""
    allowed_origins: Texts = Field(default_factory=list)
    """Origins of web pages that may use the API from a browser (CORS), such as https://chat.example.com; * means all.
    Default: none."""
    allowed_methods: Texts = Field(default_factory=lambda: ["*"])
    """HTTP methods that such pages may use."""
    allowed_headers: Texts = Field(default_factory=lambda: ["*"])
    """Headers that such pages may send."""
    allow_credentials: bool = False
    """Let such pages send cookies and HTTP authentication of the browser."""

    ui: bool = True
    """Serve the page at /: a chat and a live view of the engine. It has no data of its own and asks for an API key if
    one is configured."""

    @property
    def is_local(self) -> bool:
        """True if only this machine can connect."""
        try:
            is_loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            is_loopback = self.host == "localhost"
        return self.uds is not None or is_loopback

    @property
    def answered_hosts(self) -> list[str]:
        """Values of the header Host that are answered; empty: all.

        Without a key, only its address protects a local server, and a page of any site reaches it by DNS rebinding: by
        a name of its own that leads to this address.
        """
        if self.allowed_hosts or self.api_key or not self.is_local:
            return self.allowed_hosts
        return [*LOOPBACK_NAMES, f"[{self.host}]" if ":" in self.host else self.host]

    @field_validator("allowed_origins", "allowed_methods", "allowed_headers", mode="before")
    @classmethod
    def _from_json(cls, given: object) -> object:
        """Read also vLLM's form, a JSON list."""
        texts = as_list(given)
        text = ",".join(map(str, texts)) if isinstance(texts, list) else ""
        return json.loads(text) if text.startswith("[") else given

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin not in ("*", "null", "file://") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    f"{origin!r} is no origin, which is SCHEME://HOST[:PORT], such as https://chat.example.com"
                )
        return origins

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"[^/:\s]+|\[[0-9A-Fa-f:.]+\]", name):
                raise ValueError(f"{name!r} is no host name such as llm.example.com; it has no scheme and no port")
        return names

    @field_validator("api_key")
    @classmethod
    def check_keys(cls, keys: list[str]) -> list[str]:
        """Refuse an empty key, such as that of a variable that is not set: it would open the API to everyone; and one
        that most clients cannot send. Raises: ValueError"""
        if not all(key.strip() for key in keys):
            raise ValueError("a key is empty; give a key, or leave the setting out")
        if not all(key.isascii() and key.isprintable() for key in keys):
            raise ValueError("a key has characters that clients cannot send; use printable ASCII")
        return keys

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                yield f"{flag(name)} needs --ssl-certfile"

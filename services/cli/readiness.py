"""Loading state of a frontend, from its HTTP probes."""

import http.client
import json
from dataclasses import dataclass

from services.cli.healthcheck import bearer, client_tls, get
from services.config import HttpConfig

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1", "": "127.0.0.1"}  # noqa: S104
ANSWER_TIMEOUT = 2.0
"""Seconds."""


@dataclass(frozen=True)
class LoadingState:
    ready: bool
    phase: str
    progress: float
    """0 to 1"""


class FrontendProbe:
    """HTTP client of one frontend. A frontend that listens on any address is reached on the loopback address."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        host, scheme = ANY_ADDRESS.get(config.host, config.host), "http" if config.ssl_certfile is None else "https"
        at = f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"
        self._server = at if config.uds is None else "http://localhost"
        """The address, without the root path."""

    @property
    def url(self) -> str:
        """The address for other programs; a Unix socket has none of its own."""
        return self._server + self._config.root_path

    def curl(self) -> str:
        """Return the command that reaches the frontend, without a path."""
        unix = f"--unix-socket {self._config.uds} " if self._config.uds is not None else ""
        trust = f"--cacert {self._config.ssl_certfile} " if self._config.ssl_certfile is not None else ""
        return f"curl {unix}{trust}{self.url}"

    def loading_state(self) -> LoadingState | None:
        """Return None while the frontend does not answer."""
        answer = self._get("/readyz")
        if answer is None:
            return None
        status, body = answer
        phase = str(body.get("detail") or body.get("phase") or "starting")
        progress = body.get("progress")
        return LoadingState(status == 200, phase, progress if isinstance(progress, int | float) else 0.0)

    def model_info(self) -> dict[str, object]:
        """Return the answer of /model_info; {} if the frontend does not answer."""
        return (self._get("/model_info") or (0, {}))[1]

    def _get(self, path: str) -> tuple[int, dict[str, object]] | None:
        config, tls = self._config, None
        if config.ssl_certfile is not None and config.uds is None:
            certificate = config.ssl_certfile if config.ssl_ca_certs is not None else None  # it may be a client's, too
            tls = client_tls(None, certificate, config.ssl_keyfile)
        try:
            status, content = get(self._server + path, ANSWER_TIMEOUT, tls, config.uds, bearer(config.api_key))
            body = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError):
            return None
        return status, body if isinstance(body, dict) else {}

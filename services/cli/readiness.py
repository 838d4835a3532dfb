"""Loading state of a frontend, from its HTTP probes."""

import http.client
import json
import socket
from dataclasses import dataclass

from services.cli.healthcheck import own_tls
from services.config import HttpConfig

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
ANSWER_TIMEOUT = 2.0
"""Seconds."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


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
        self._host, self._port = ANY_ADDRESS.get(config.host, config.host), config.port
        self._headers = {"Authorization": f"Bearer {config.api_key[0]}"} if config.api_key else {}

    @property
    def url(self) -> str:
        """The address for other programs; a Unix socket has none of its own."""
        if self._config.uds is not None:
            return f"http://localhost{self._config.root_path}"
        scheme = "http" if self._config.ssl_certfile is None else "https"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{scheme}://{host}:{self._port}{self._config.root_path}"

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

    def model(self) -> str:
        """Return the first model name of the API, or "" if it names none."""
        _, body = self._get("/v1/models") or (0, {})
        models = body.get("data")
        return str(models[0].get("id", "")) if isinstance(models, list) and models else ""

    def task(self) -> str:
        """Return what the model computes, "generate" or a task of vLLM's; "" if the frontend does not answer."""
        _, body = self._get("/model_info") or (0, {})
        return str(body.get("task", ""))

    def _connection(self) -> http.client.HTTPConnection:
        config = self._config
        if config.uds is not None:
            return UnixConnection(config.uds, ANSWER_TIMEOUT)
        if config.ssl_certfile is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_TIMEOUT)
        context = own_tls()
        if config.ssl_ca_certs is not None:  # the server's certificate may also be a client's
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        return http.client.HTTPSConnection(self._host, self._port, timeout=ANSWER_TIMEOUT, context=context)

    def _get(self, path: str) -> tuple[int, dict[str, object]] | None:
        connection = self._connection()
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            body = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()
        return response.status, body if isinstance(body, dict) else {}

"""Loading state of a frontend, from its HTTP probes."""

import http.client
import json
from dataclasses import dataclass

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
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

    def __init__(self, host: str, port: int, api_key: str = "") -> None:
        self._host, self._port = ANY_ADDRESS.get(host, host), port
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

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

    def _get(self, path: str) -> tuple[int, dict[str, object]] | None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_TIMEOUT)
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            body = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()
        return response.status, body if isinstance(body, dict) else {}

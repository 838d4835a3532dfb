"""Certificates of servers, and HTTP clients without any: reading them takes 0.2 s for each client, and most tests only
use http."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests.waiting import PATIENCE

CERTIFICATES = Path(__file__).parent / "integration" / "frontend" / "certificates"
AUTHORITY, CERTIFICATE, KEY = (str(CERTIFICATES / name) for name in ("ca.pem", "server.pem", "server.key"))
TLS = ("--ssl-certfile", CERTIFICATE, "--ssl-keyfile", KEY)


@pytest.fixture(scope="session", autouse=True)
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let httpx, which the client of OpenAI uses as well, find no certificates. Where a test sets no limit, it waits
    for longer than 5 s: a busy machine stops a server for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(DEFAULT_TIMEOUT_CONFIG, name, PATIENCE)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        patch.delenv("SSL_CERT_FILE", raising=False)
        yield

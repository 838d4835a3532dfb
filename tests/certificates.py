"""Certificates of servers, and HTTP clients without any: reading them takes 0.2 s for each client, and most tests only
use http."""

from collections.abc import Iterator
from pathlib import Path

import pytest

CERTIFICATES = Path(__file__).parent / "integration" / "frontend" / "certificates"
AUTHORITY, CERTIFICATE, KEY = (str(CERTIFICATES / name) for name in ("ca.pem", "server.pem", "server.key"))
TLS = ("--ssl-certfile", CERTIFICATE, "--ssl-keyfile", KEY)


@pytest.fixture(scope="session", autouse=True)
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let httpx, which the client of OpenAI uses as well, find no certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        patch.delenv("SSL_CERT_FILE", raising=False)
        yield

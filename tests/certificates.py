"""HTTP clients without certificates: reading them takes 0.2 s for each client, and tests only use http."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let httpx, which the client of OpenAI uses as well, find no certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        patch.delenv("SSL_CERT_FILE", raising=False)
        yield

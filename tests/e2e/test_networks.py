"""`serve` with TLS, behind a proxy's path, and on a Unix socket."""

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import certifi
import httpx
import pytest

from services.cli.healthcheck import Unhealthy, healthcheck, main
from tests.certificates import AUTHORITY, CERTIFICATE, KEY, TLS
from tests.e2e.server import ServeProcess, serving

SIM = ("--backend", "sim")
BODY = {"prompt": "Hi", "max_tokens": 3, "stream": True}


@contextmanager
def served(*arguments: str) -> Iterator[ServeProcess]:
    with serving(*SIM, *arguments) as server:
        yield server
        server.stop()


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=AUTHORITY)


def test_tls_with_a_root_path() -> None:
    with served(*TLS, "--root-path", "/llm") as server:
        assert re.fullmatch(r"https://127\.0\.0\.1:\d+/llm", server.url)
        with httpx.Client(verify=trusting()) as client:
            answer = client.post(f"{server.url}/v1/completions", json=BODY)
            assert answer.text.endswith("data: [DONE]\n\n")
            assert client.get(server.url.removesuffix("/llm") + "/v1/models").status_code == 200
        healthcheck(f"{server.url}/readyz")
        healthcheck(f"{server.url}/readyz", cacert=AUTHORITY)
        with pytest.raises(Unhealthy, match="CERTIFICATE_VERIFY_FAILED"):
            healthcheck(f"{server.url}/readyz", cacert=certifi.where())
        with pytest.raises(Unhealthy, match=r"--cacert: cannot use /missing\.pem: No such file"):
            healthcheck(f"{server.url}/readyz", cacert="/missing.pem")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/readyz")  # nobody vouches for the certificate
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{server.url.replace('https', 'http')}/readyz")


def test_clients_need_a_certificate_where_authorities_are_given() -> None:
    with served(*TLS, "--ssl-ca-certs", AUTHORITY) as server:
        with httpx.Client(verify=trusting()) as client, pytest.raises(httpx.HTTPError):
            client.get(f"{server.url}/v1/models")
        with pytest.raises(Unhealthy):
            healthcheck(f"{server.url}/readyz")
        for url in (server.url, server.url.replace("https", "http")):  # that of a container's health check
            assert main([url, *TLS, "--cacert", AUTHORITY]) == 0
        context = trusting()
        context.load_cert_chain(CERTIFICATE, KEY)
        with httpx.Client(verify=context) as client:
            assert client.get(f"{server.url}/v1/models").status_code == 200


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "api"
    with served("--uds", str(path)) as server:
        assert f"curl --unix-socket {path} http://localhost/v1/" in server.welcome
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            answer = client.post("http://localhost/v1/completions", json=BODY)
            assert answer.text.endswith("data: [DONE]\n\n")
    assert not path.exists()

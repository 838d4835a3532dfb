"""A connection without a socket."""

import asyncio
from unittest.mock import Mock

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from services.frontend.http.connection import Connection


async def test_a_body_that_is_not_http_ends_the_connection_although_its_request_was_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    connection = Connection(uvicorn.Config(app, log_config=None, lifespan="off"), ServerState(), {})
    transport = Mock(spec=asyncio.Transport)
    transport.is_closing.return_value = False
    connection.connection_made(transport)
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n"
    connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\n" + upgrade + b"transfer-encoding: chunked\r\n\r\n")
    assert caplog.messages == [], "an upgrade that is ignored is no warning"
    await asyncio.sleep(0)
    connection.data_received(b"no chunk\r\n")
    transport.close.assert_called_once()
    connection.connection_lost(None)

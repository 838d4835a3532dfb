"""A frontend as a replica of a Ray Serve deployment: behind Serve's proxy, and on a port of its own."""

import asyncio
import contextlib
import logging
from collections.abc import MutableMapping
from typing import Any

from ray import serve
from ray.serve.schema import ApplicationStatus
from starlette.types import ASGIApp, Receive, Scope, Send

from services.cli import logs
from services.cli.preflight import check, with_keys
from services.config import FrontendConfig, RayConfig
from services.frontend.http.listener import listen
from services.frontend.model import ServedModel
from services.frontend.service import FrontendService
from services.process import NO_ALARM
from services.ray.actors import check_version
from services.ray.cluster import check_resources
from services.ray.discovery import Discovery
from services.ray.keys import key_directory

log = logging.getLogger("runahead.ray")


class FrontendReplica:
    """
    Args:
        settings: those of `RayConfig` that were given.
        version: version of Runahead of the application.
        engines: handle of the other deployment, which makes both one application. Requests do not pass through it.
    """

    async def __init__(self, settings: dict[str, Any], version: str, engines: object) -> None:  # type: ignore[misc]  # Serve awaits it
        check_version(version)
        given = RayConfig(**settings)
        logs.configure(given.log_level, given.log_format)
        self._stack = contextlib.ExitStack()
        keys = self._stack.enter_context(key_directory("frontend"))
        application = serve.get_replica_context().app_name
        if serve.status().applications[application].status == ApplicationStatus.DEPLOYING:
            check_resources(given)  # not when Serve replaces what was lost with a node
        file = Discovery(application, keys).file
        own = {"transport_keys": str(keys.path), "engines": str(file), "port": given.port}
        config = with_keys(FrontendConfig.model_validate(given.service_settings(FrontendConfig) | own))
        check(config)
        model = await asyncio.to_thread(ServedModel.load, config)
        listener = self._stack.enter_context(listen(config))
        self._service = FrontendService(config, model, listener, NO_ALARM)
        self._serving = asyncio.create_task(self._service.run())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _below_prefix(self._service.app)

    async def check_health(self) -> None:
        """Raises: RuntimeError, if this frontend has ended"""
        if self._serving.done():
            raise RuntimeError(f"the frontend has ended with status {self._serving.result()}")

    async def __del__(self) -> None:
        if hasattr(self, "_serving"):
            self._service.stop()
            await asyncio.wait({self._serving})
            self._stack.close()


def _below_prefix(app: ASGIApp) -> ASGIApp:
    """Return the application for Serve, which passes the complete path, with the route prefix apart as `root_path`."""

    async def behind_proxy(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        root = scope.get("root_path", "")
        own: MutableMapping[str, Any] = {**scope, "path": scope["path"].removeprefix(root) or "/", "root_path": ""}
        await app(own, receive, send)

    return behind_proxy


async def _lifespan(receive: Receive, send: Send) -> None:
    """Serve requires answers to these events."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})

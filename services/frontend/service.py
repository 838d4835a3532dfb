"""The frontend process: an HTTP server and one connection to the scheduler."""

import asyncio
import contextlib
import logging
import signal

import uvicorn

from protocol.transport import HandshakeRefused
from services.checkpoint import CheckpointError
from services.config import FrontendConfig
from services.frontend.app import build
from services.frontend.engine_client import EngineClient
from services.frontend.guards import Guards
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai.serving import Serving

log = logging.getLogger("runahead.frontend")

EXIT_MODEL = 3
EXIT_REFUSED = 4


class _Server(uvicorn.Server):
    """Signals are ours: the first drains, the second stops at once."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


async def _serve(config: FrontendConfig, model: ServedModel) -> int:
    engine = EngineClient(config.scheduler_endpoint)
    metrics = Metrics(engine)
    app = build(model, Serving(engine, model.tokenizer, metrics), metrics)
    server = _Server(
        uvicorn.Config(
            Guards(app, config.api_key, config.max_body_bytes),
            host=config.host,
            port=config.port,
            http="h11",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=65_536,
        )
    )

    def on_signal() -> None:
        if engine.draining:
            server.force_exit = server.should_exit = True
            return
        engine.draining = True
        log.info("draining: open requests finish, new ones are refused")
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    connection = asyncio.create_task(engine.run())
    serving = asyncio.create_task(server.serve())
    done, _ = await asyncio.wait({connection, serving}, return_when=asyncio.FIRST_COMPLETED)
    if connection in done and isinstance(error := connection.exception(), HandshakeRefused):
        log.error("the scheduler refused this frontend: %s", error)
        server.should_exit = True
        await serving
        return EXIT_REFUSED
    await asyncio.gather(*done)
    connection.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await connection
    return 0


def run(config: FrontendConfig) -> int:
    """One frontend until it is told to stop. Returns the exit status: 0, 3 for a model that cannot be served, 4 when
    the scheduler refused it."""
    try:
        model = ServedModel.load(config)
    except CheckpointError as error:
        log.error("%s", error)
        return EXIT_MODEL
    with asyncio.Runner(loop_factory=_loop) as runner:
        return runner.run(_serve(config, model))


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()

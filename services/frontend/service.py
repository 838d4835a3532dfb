"""The frontend process: an HTTP server and one connection to the scheduler."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Iterator

import uvicorn
import uvloop

from protocol.transport import HandshakeRefused
from services.checkpoint import CheckpointError
from services.checkpoint.gguf import forget_headers
from services.config import FrontendConfig
from services.frontend.app import with_routes
from services.frontend.context import AppContext
from services.frontend.engine.addresses import numbered
from services.frontend.engine.client import EngineClient
from services.frontend.engine.placement_recording import PlacementRecording
from services.frontend.engine.replan import Replans
from services.frontend.errors import APIError
from services.frontend.http.connection import Connection
from services.frontend.http.guards import Guards, with_cors
from services.frontend.http.listener import listen
from services.frontend.load_log import log_load
from services.frontend.metrics import Metrics
from services.frontend.model import ServedModel
from services.frontend.openai.answering import Answering
from services.frontend.openai.parameters.body import BodyParser
from services.frontend.page.files import load_page
from services.frontend.placement import Placement
from services.frontend.request_log import EndedRequestLog
from services.frontend.responses_api.files import response_files
from services.frontend.steps.ring import StepRing
from services.process import HANG_FACTOR, STARTED, HangAlarm, end_start_up, start_log

log = logging.getLogger("runahead.frontend")

EXIT_MODEL = 3
EXIT_REFUSED = 4
MAX_HEAD_BYTES = 65_536
"""Maximum size of a request line with its headers."""
KEEP_ALIVE_SECONDS = 75
"""Time until an idle connection is closed. Longer than the idle time of most clients and proxies (5 to 60 s), as a
request that is sent while the server closes its connection is lost."""
STOP_GRACE = 0.5
"""Seconds that the last bytes of each response have to leave when the server is stopped at once."""
ALARM_INTERVAL = 1.0
"""Seconds between two times at which the event loop sets the alarm."""
DRAIN_INTERVAL = 0.05
"""Seconds between checks for open requests while draining."""
GC_THRESHOLD = 20_000
"""Allocations between searches for reference cycles; a step of many streams makes thousands without a cycle."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `FrontendService`."""
        yield


class FrontendService:
    """Owns the HTTP server and the connection to the scheduler. `alarm`: set every second while it serves.

    Raises: OSError, if the directory of responses cannot be used
    """

    def __init__(self, config: FrontendConfig, model: ServedModel, listener: socket.socket, alarm: HangAlarm) -> None:
        self._config, self._listener, self._alarm = config, listener, alarm
        path = config.record_placement
        self._open = contextlib.ExitStack()
        recording = None if path is None else self._open.enter_context(contextlib.closing(PlacementRecording(path)))
        self.engine = EngineClient(
            [] if config.engines else numbered(config.scheduler_endpoint),
            config.max_open_requests,
            config.scheduler_timeout_seconds,
            config.recovery_timeout_seconds,
            config.request_timeout,
            config.security,
            model.tokenizer.digest,
            StepRing(config.step_ring) if config.step_ring else None,
            Placement(config.placement_policy, seed=os.getpid(), record=recording),
        )
        self._metrics = metrics = Metrics(self.engine, model.names[0])
        export_trace = None
        if config.otlp_traces_endpoint is not None:
            from services.frontend.traces import TraceExporter

            traces = TraceExporter(config.otlp_traces_endpoint, model.names[0], self.engine)
            self._open.callback(traces.close)
            export_trace = traces.export
        page = load_page() if config.ui else {}
        self._request_log = EndedRequestLog()
        self._responses = self._open.enter_context(response_files(config))
        interval = config.stream_interval
        answering = Answering(self.engine, model, metrics, self._request_log, export_trace, interval)
        self._open.callback(answering.prompts.close)
        bodies, replans = BodyParser(config.unknown_parameters), Replans(self.engine, config.control_socket)
        app = with_routes(config, page)
        app.state.context = AppContext(self.engine, model, metrics, answering, bodies, replans, self._responses)
        checks = config.max_body_bytes, frozenset(page), answering.shed, metrics.on_response
        self.app = with_cors(Guards(app, config, *checks), config)
        """The application behind the checks of every request."""
        self.server = _Server(
            uvicorn.Config(
                self.app,
                http=Connection,
                loop="none",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,  # its lines about start and end repeat ours
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
            )
        )
        self._drain: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until stopped. Return the exit status."""
        others = {asyncio.create_task(self._responses.keep_bounds())} if self._responses else set()
        others |= {asyncio.create_task(log_load(self.engine, self._metrics)), asyncio.create_task(self._set_alarm())}
        for task in others:
            task.add_done_callback(_log_failure)
        connection = asyncio.create_task(self.engine.run(self._config.engines))
        serving = asyncio.create_task(self.server.serve([self._listener]))
        await asyncio.wait({connection, serving}, return_when=asyncio.FIRST_COMPLETED)
        self.engine.drain()
        if connection.done():  # nobody reads the outputs of open requests any more
            self.engine.fail_all(APIError(503, "the server ends without its engine; the request was not completed"))
        self.server.should_exit = True
        try:
            await serving
            if connection.done():
                await connection
        except HandshakeRefused as error:
            log.error("the scheduler refused this frontend: %s", error)
            return EXIT_REFUSED
        finally:
            for task in (connection, *others):
                task.cancel()
            await asyncio.wait({connection, *others})
            self._request_log.flush()
            self._open.close()
        return 0

    async def _set_alarm(self) -> None:
        try:
            while True:
                self._alarm.set()
                await asyncio.sleep(ALARM_INTERVAL)
        finally:
            self._alarm.cancel()

    def stop(self) -> None:
        """Drain at the first call: open requests finish, new ones are refused. Stop at the second."""
        if self._drain is None:
            log.info("draining: %d open requests finish, new ones are refused", self.engine.num_open)
            self.engine.drain()
            self._drain = asyncio.get_running_loop().create_task(self._exit_when_drained())
            return
        log.info("stopping now")
        self.engine.fail_all(APIError(503, "the server was stopped; the request was not completed"))
        self.server.should_exit = True
        asyncio.get_running_loop().call_later(STOP_GRACE, setattr, self.server, "force_exit", True)

    async def _exit_when_drained(self) -> None:
        """Stop when no request is open. Until then the port stays open: probes and new requests get a 503."""
        while self.engine.num_open:  # noqa: ASYNC110  polled, so that the end of a request costs nothing
            await asyncio.sleep(DRAIN_INTERVAL)
        self.server.should_exit = True  # the server still writes the last bytes of each response


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log the unexpected end of a task that streams do not need: ending the frontend would break them."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task of the frontend has failed: %s", error, exc_info=error)


def run(config: FrontendConfig) -> int:
    """Run a frontend until it is stopped. Return the exit status: 0, 3 if the model cannot be served, 4 if the
    scheduler refused this frontend.

    Raises: OSError, if the port is taken
    """
    start_log.debug("loading the tokenizer")
    try:
        model = ServedModel.load(config)
    except CheckpointError as error:
        log.error("%s", error)
        return EXIT_MODEL
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # connections beyond the limit would be reset
    with listen(config) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        alarm = HangAlarm.install(HANG_FACTOR * config.scheduler_timeout_seconds)
        start_log.debug("building the API")
        service = FrontendService(config, model, listener, alarm)
        forget_headers()
        end_start_up()
        gc.set_threshold(GC_THRESHOLD)
        start_log.debug(STARTED)
        for number in (signal.SIGTERM, signal.SIGINT):
            runner.get_loop().add_signal_handler(number, service.stop)
        return runner.run(service.run())

"""TCP proxies between services, which cut connections, stop forwarding in one direction, or delay what they forward."""

import asyncio
import contextlib
import enum
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

from tests.waiting import PATIENCE


class Way(enum.Enum):
    TO_SERVER = enum.auto()
    TO_CLIENT = enum.auto()


class ProxiedConnection:
    """One connection, forwarded in both directions. It is closed when both have ended."""

    def __init__(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        seconds: Callable[[], float],
    ) -> None:
        self._writers = client[1], server[1]
        self._lanes = {Way.TO_SERVER: (client[0], server[1]), Way.TO_CLIENT: (server[0], client[1])}
        self._seconds = seconds
        self.flows = {way: asyncio.Event() for way in Way}
        for flow in self.flows.values():
            flow.set()
        self._head = b""
        """First bytes from the client."""

    @property
    def carries_plans(self) -> bool:
        """Return whether this is a worker's connection for plans, and not the one for results."""
        return b"worker-results" not in self._head

    async def run(self) -> None:
        try:
            await asyncio.gather(*map(self._forward, Way))
        except ConnectionError:
            self.abort()
        finally:
            for writer in self._writers:
                writer.close()

    async def _forward(self, way: Way) -> None:
        reader, writer = self._lanes[way]
        while data := await reader.read(1 << 16):
            if way is Way.TO_SERVER and len(self._head) < 1024:
                self._head += data
            await asyncio.sleep(self._seconds())
            await self.flows[way].wait()
            writer.write(data)
            await writer.drain()
        await self.flows[way].wait()
        with contextlib.suppress(OSError):  # the other side has closed it
            writer.write_eof()

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        for flow in self.flows.values():
            flow.set()


class TcpProxy:
    """Forwards connections from a port of its own to `port`. Its methods run in the loop of `Proxies`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._connections: dict[ProxiedConnection, asyncio.Task[None]] = {}
        self._stalled: set[Way] = set()
        self._is_cut = False
        self._delay = 0.0
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = ProxiedConnection((reader, writer), server, lambda: self._delay)
        for way in self._stalled:
            connection.flows[way].clear()
        if self._is_cut:  # meanwhile
            connection.abort()
        task = self._connections[connection] = asyncio.create_task(connection.run())
        try:
            await task
        finally:
            del self._connections[connection]

    async def cut(self) -> None:
        """Break all connections and make none until `restore`."""
        self._is_cut = True
        for connection in self._connections:
            connection.abort()

    async def stall(self, way: Way) -> None:
        """Forward nothing in one direction until `restore`; the connections live, and new ones are accepted."""
        self._stalled.add(way)
        for connection in self._connections:
            connection.flows[way].clear()

    async def stall_plans(self) -> None:
        """Forward no plans on the connections that there are; new ones are not affected."""
        for connection in self._connections:
            if connection.carries_plans:
                connection.flows[Way.TO_CLIENT].clear()

    async def delay(self, seconds: float) -> None:
        """Forward everything so much later until `restore`."""
        self._delay = seconds

    async def restore(self) -> None:
        """Forward everything, also what was held back."""
        self._is_cut, self._delay = False, 0.0
        self._stalled.clear()
        for connection in self._connections:
            for flow in connection.flows.values():
                flow.set()

    async def close(self) -> None:
        await self.cut()
        self._server.close()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)


async def _blackhole(link: TcpProxy) -> None:
    for way in Way:
        await link.stall(way)


LinkFault = Callable[[TcpProxy], Coroutine[Any, Any, None]]
FAULTS: dict[str, LinkFault] = {
    "cut": TcpProxy.cut,
    "deaf scheduler": lambda link: link.stall(Way.TO_SERVER),
    "mute scheduler": lambda link: link.stall(Way.TO_CLIENT),
    "both directions": _blackhole,
}


class Proxies:
    """Proxies in a thread of their own: they forward also while a test waits."""

    def __init__(self, *ports: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._proxies = [TcpProxy(port) for port in ports]
        for proxy in self._proxies:
            self.do(proxy.start())

    @property
    def ports(self) -> list[int]:
        return [proxy.port for proxy in self._proxies]

    def __getitem__(self, index: int) -> TcpProxy:
        return self._proxies[index]

    def do(self, action: Coroutine[Any, Any, None]) -> None:
        """Run a method of a proxy."""
        asyncio.run_coroutine_threadsafe(action, self._loop).result(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies:
            self.do(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

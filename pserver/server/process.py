"""The life of one server process."""

import asyncio
import logging
import signal
from collections.abc import Callable

from pserver.config import ServerSettings
from pserver.server.heap import keep_freed_memory
from pserver.server.node import ServerNode
from pserver.transport.grpc_channel import GrpcChannel
from pserver.transport.grpc_server import GrpcServer

logger = logging.getLogger(__name__)


def run_server(settings: ServerSettings, on_ready: Callable[[str], None]) -> None:
    """Runs a server until SIGTERM (waits for calls under way, at most `drain_s`) or SIGINT (stops at once).

    Call it on the main thread.

    Args:
        on_ready: called once with the server's address, when it answers and is linked to its coordinator.

    Raises:
        ConfigError: the address cannot be bound, or the coordinator refuses this server, now or later.
        DeadlineExceeded: the coordinator did not answer.
    """
    keep_freed_memory()
    asyncio.run(_run(settings, on_ready))


async def _run(settings: ServerSettings, on_ready: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    told: asyncio.Future[signal.Signals] = loop.create_future()

    interrupted = asyncio.Event()

    def tell(number: signal.Signals) -> None:
        if number is signal.SIGINT:
            interrupted.set()
        if not told.done():
            told.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell, number)
    node = ServerNode(settings)
    server = GrpcServer(node.handlers, host=settings.host, port=settings.port, stream_port=settings.stream_port)
    try:
        address = await server.start()
        starting = asyncio.create_task(node.start(address, GrpcChannel))
        await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            on_ready(address)
            refused = asyncio.create_task(node.refused())
            await asyncio.wait((refused, told), return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                raise await refused
            refused.cancel()
        else:
            starting.cancel()
        if told.result() is signal.SIGTERM:
            logger.info("SIGTERM: draining, for at most %g s", settings.drain_s)
            draining = asyncio.create_task(server.drain(settings.drain_s))
            impatient = asyncio.create_task(interrupted.wait())
            await asyncio.wait((draining, impatient), return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            impatient.cancel()
        logger.info("server %s stops", settings.name)
    finally:
        await node.stop()
        await server.stop()

"""`truegate serve`: one HTTP process (this one) and one engine process, from start to drained end.

Invariant: the port is ours before anything is loaded, nothing is served before the engine's self-test has passed, and
no engine process outlives this one.
"""

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from truegate.config import EngineConfig
from truegate.errors import InvalidRun, UserError
from truegate.hub import model_folder, model_name
from truegate.serve.client import WORKER_COMMAND, EngineClient, EngineProcess, spawn
from truegate.serve.memory import steady_heap
from truegate.serve.worker import LOG_FORMAT

log = logging.getLogger("truegate.serve")

HEADER_LIMIT = 64 << 10  # bytes of a request's head
IDLE_SECONDS = 60  # a connection without a request is kept so long


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What `truegate serve` was told, beside the engine's own settings."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 30000
    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    restart: bool = False
    drain_seconds: int = 60
    limits: dict[str, float | int | None] = field(default_factory=dict)  # of generation.Limits
    log_requests: bool = False
    worker_command: Sequence[str] = WORKER_COMMAND  # tests put a scripted engine here


def serve(options: ServeOptions) -> None:
    """Run until told to stop; InvalidRun if the engine died, the engine's own error if it could not start."""
    _refuse_empty(options)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = model_folder(options.engine.model)
    options = replace(options, names=options.names or (model_name(options.engine.model),))
    engine_config = replace(options.engine, model=str(folder), threads=options.engine.threads or default_threads())
    options = replace(options, engine=engine_config)
    fault = fault_sentence(engine_config.fault, folder) if engine_config.fault is not None else None
    listener = bind(options.host, options.port)
    _raise_file_limit()
    steady_heap()
    engine = spawn(options.engine, options.worker_command)
    try:
        asyncio.run(_Server(options, listener, engine, fault).run())
    finally:
        if engine.process.poll() is None:
            engine.process.kill()
        engine.process.wait()


def _refuse_empty(options: ServeOptions) -> None:
    """A key that is empty lets everybody in, and one with blanks around it nobody."""
    if any(not key or key != key.strip() for key in options.api_keys):
        raise UserError("--api-key (or TRUEGATE_API_KEY) is empty or has blanks around it: give a key, or leave it out")
    if any(not name.strip() for name in options.names):
        raise UserError("--served-model-name is empty: give a name, or leave it out")


def default_threads() -> int | None:
    """Of the engine's torch: all cores but one, which HTTP needs; fewer threads than cores also never wait in turn."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(1, cores - 1)


def fault_sentence(name: str, folder: Path) -> str:
    """What the fault does, with this model's numbers; UserError for a name that the catalogue does not have."""
    from truegate.law.families import specs_of
    from truegate.law.faults import named

    fault = named(name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scale = next((spec.routed_scale for spec in specs_of(config) if spec is not None), 1.0)
    return fault.says.format(scale=f"{scale:g}", inverse=f"{1 / scale:.3f}")


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket, not yet listening; UserError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"--host {host} is no address of this machine: {error}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            raise UserError(f"--host {host} is no address of this machine: {error.strerror}") from None
        raise UserError(f"cannot listen on {host}:{port} ({error}): choose another --port") from None
    return listener


def _raise_file_limit() -> None:
    """A thousand idle connections are a thousand open files; the default soft limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Server:
    """One run of the server."""

    def __init__(
        self, options: ServeOptions, listener: socket.socket, engine: EngineProcess, fault: str | None
    ) -> None:
        self.options, self.listener, self.engine, self.fault = options, listener, engine, fault
        self.began = time.monotonic()
        self.signals = 0
        self.died: str | None = None
        self.http: Any = None  # uvicorn.Server; the HTTP stack is imported while the engine process loads
        self.client: EngineClient | None = None
        self._starting: asyncio.Task[object] | None = None

    async def run(self) -> None:
        with self._handled_signals():
            try:
                await self._run()
            finally:
                if self.client is not None:
                    await self.client.stop(drain=False)  # whatever was to be finished has been
        if self.died is not None:
            raise InvalidRun(f"the server stopped: {self.died}")

    async def _run(self) -> None:
        options = self.options
        self.client = EngineClient(
            options.engine, restart=options.restart, command=options.worker_command, on_dead=self._on_dead
        )
        self._starting = asyncio.ensure_future(self.client.start(self.engine))
        await asyncio.sleep(0)  # the engine process is loading: import the HTTP stack meanwhile
        from truegate.engine.tokenizer import Tokenizer
        from truegate.serve.api import RANDOM
        from truegate.serve.generation import Limits, Service
        from truegate.serve.metrics import Metrics

        metrics = Metrics(options.names[0])
        self.client.on_output = metrics.observe
        folder = model_folder(options.engine.model)
        service = Service(
            names=options.names,
            folder=folder,
            tokenizer=Tokenizer(folder),
            client=self.client,
            metrics=metrics,
            limits=Limits(**options.limits),
            log_requests=options.log_requests,
            fault=self.fault,
        )
        metrics.watch(self.client)
        self.http = _http_server(service, options)
        try:
            await self._starting
        except asyncio.CancelledError:
            return  # told to stop while loading
        if self.died is not None:
            return  # the engine was ready, and is gone already
        self._announce_fault()
        if options.engine.load_format == "dummy":
            log.warning(RANDOM)
        self.listener.listen(2048)
        host, port = self.listener.getsockname()[:2]
        if not options.api_keys and not ipaddress.ip_address(host).is_loopback:
            log.warning("listening on %s without --api-key: whoever reaches it may use it", host)
        log.info(
            "%s is served at http://%s:%d/v1 after %.1f s; self-test: %s",
            options.names[0],
            f"[{host}]" if ":" in host else host,
            port,
            time.monotonic() - self.began,
            ((self.client.stats and self.client.stats.self_test) or "none").partition(":")[0],
        )
        await self.http.serve(sockets=[self.listener])

    def _on_dead(self, code: int, reason: str) -> None:
        self.died = reason
        if self.http is not None:
            self.http.should_exit = True

    def _announce_fault(self) -> None:
        if self.fault is not None:
            line = f"FAULT PLANTED: {self.options.engine.fault}: {self.fault}"
            more = "The answers of this server are wrong on purpose; /health says so too."
            log.warning("\n%s\n%s\n%s\n%s", "!" * 80, line, more, "!" * 80)

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C drain; the second one ends at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self.signals += 1
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            return
        if self.http is None or self.client is None:
            return
        if self.signals == 1:
            log.info("draining: %d answers run; once more ends at once", self.client.open_answers)
        else:
            self.http.force_exit = True
        self.http.should_exit = True


def _http_server(service: Any, options: ServeOptions) -> Any:
    import uvicorn

    from truegate.serve.api import build_app

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # ours are installed already, and a drained end is exit code 0

    return Server(
        uvicorn.Config(
            build_app(service, api_keys=options.api_keys),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            h11_max_incomplete_event_size=HEADER_LIMIT,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=options.drain_seconds,
        )
    )

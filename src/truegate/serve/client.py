"""The HTTP process's view of the engine process: start it, submit to it, notice its death, start it again if told to.

Invariant: every stream that `submit` returned ends: by its answers' finish reasons, or by EngineDied.
"""

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from truegate.config import EngineConfig
from truegate.errors import EXIT_INVALID, TruegateError, UserError
from truegate.serve.messages import (
    Add,
    Cancel,
    Channel,
    ChannelClosed,
    Failed,
    Heartbeat,
    Loading,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Start,
)
from truegate.types import EngineStats, Request, StepOutput

log = logging.getLogger("truegate.serve")

WORKER_COMMAND = (sys.executable, "-m", "truegate.serve.worker")
RESTART_LIMIT = 3  # deaths within RESTART_WINDOW seconds after which "restart" gives up
RESTART_WINDOW = 60.0
STOP_SECONDS = 5.0  # given to the engine process to leave on its own

State = Literal["starting", "ready", "restarting", "stopping", "dead"]


class EngineDied(Exception):
    """The engine process ended, or broke, while this request was in it."""


class EngineFailed(TruegateError):
    """The engine process could not start; carries its own line and exit code."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.error)
        self.exit_code = failure.exit_code


@dataclass(kw_only=True, slots=True)
class EngineProcess:
    """A started engine process and our end of its channel."""

    process: subprocess.Popen[bytes]
    channel: Channel


def spawn(config: EngineConfig, command: Sequence[str] = WORKER_COMMAND) -> EngineProcess:
    """Start an engine process and tell it what to load; returns at once."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    channel = Channel(ours)
    channel.send(Start(config=config))
    return EngineProcess(process=process, channel=channel)


class Mailbox:
    """Outputs on their way from the engine to one HTTP response, which may hold several requests; one consumer."""

    def __init__(self) -> None:
        self.abandoned = False
        self._pending: list[tuple[Stream, StepOutput]] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, stream: "Stream", output: StepOutput) -> None:
        self._pending.append((stream, output))
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def abandon(self) -> None:
        """The client is gone: `take` returns nothing more."""
        self.abandoned = True
        self._wake()

    async def take(self) -> list[tuple["Stream", StepOutput]]:
        """All outputs since the last call, at least one; [] once the client is gone; raises what `fail` was given."""
        if not (self._pending or self._error or self.abandoned):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.abandoned:
            return []
        if self._error and not self._pending:
            raise self._error
        taken, self._pending = self._pending, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(kw_only=True, slots=True, eq=False)
class Stream:
    """One request in the engine, and when its tokens came (by answer)."""

    request: Request
    position: int  # which prompt of the HTTP request
    mailbox: Mailbox
    submitted: float
    open_answers: int
    first_token: dict[int, float] = field(default_factory=dict)
    last_token: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)


class EngineClient:
    """Submits requests to the engine process and watches over it; lives in one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        restart: bool = False,
        command: Sequence[str] = WORKER_COMMAND,
        on_output: Callable[[Stream, StepOutput, float], None] = lambda stream, output, now: None,
        on_dead: Callable[[int, str], None] = lambda code, reason: None,
    ) -> None:
        self.config = config
        self.restart = restart
        self.command = command
        self.on_output = on_output
        self.on_dead = on_dead  # the engine is gone for good: exit code and reason
        self.state: State = "starting"
        self.stage = "starting the engine process"
        self.reason = ""  # of the last death
        self.restarts = 0
        self.ready: Ready | None = None  # the last one
        self.stats: EngineStats | None = None
        self.heard = time.monotonic()  # when the engine process last said anything
        self._streams: dict[str, Stream] = {}
        self._engine: EngineProcess | None = None
        self._started: asyncio.Future[Ready] | None = None
        self._deaths: list[float] = []
        self._failure: Failed | None = None
        self._writing = False

    @property
    def pid(self) -> int | None:
        return self._engine.process.pid if self._engine else None

    @property
    def resolved(self) -> EngineConfig:
        """The engine's settings as it filled them in; those asked for until it has."""
        return self.ready.config if self.ready else self.config

    @property
    def vocab_size(self) -> int:
        return self.ready.vocab_size if self.ready else 0

    @property
    def open_answers(self) -> int:
        """Answers that are queued or being computed."""
        return sum(stream.open_answers for stream in self._streams.values())

    async def start(self, engine: EngineProcess | None = None) -> Ready:
        """Attach to a spawned engine process (or spawn one) and wait until it is ready, or raise EngineFailed."""
        self._attach(engine or spawn(self.config, self.command))
        assert self._started is not None
        return await self._started

    def submit(self, request: Request, mailbox: Mailbox, position: int = 0) -> Stream:
        """Send a request to the engine, its outputs to go to `mailbox`; raises EngineDied while there is no engine."""
        if self.state != "ready" or self._engine is None:
            raise EngineDied(f"the engine is {self.state}" + (f": {self.reason}" if self.reason else ""))
        stream = Stream(
            request=request,
            position=position,
            mailbox=mailbox,
            submitted=time.monotonic(),
            open_answers=request.params.n,
        )
        self._streams[request.request_id] = stream
        self._send(Add(request=request))
        return stream

    def release(self, stream: Stream) -> None:
        """The response is done with this stream: what still runs for it is cancelled."""
        if self._streams.pop(stream.request.request_id, None) is not None and stream.open_answers > 0:
            self._send(Cancel(request_id=stream.request.request_id))

    async def stop(self, *, drain: bool = True) -> None:
        """End the engine process: tell it, wait, and kill it if it does not leave (or is still loading)."""
        listening, self.state = self.state == "ready", "stopping"
        if self._engine is None:
            return
        process = self._engine.process
        if not listening:
            process.kill()
        self._send(Shutdown(drain=drain))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(process.wait, STOP_SECONDS + 1), STOP_SECONDS)
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)
        self._detach()

    def _attach(self, engine: EngineProcess) -> None:
        loop = asyncio.get_running_loop()
        self._engine, self._failure = engine, None
        self._started = loop.create_future()
        loop.add_reader(engine.channel, self._on_readable)
        if engine.channel.unsent:
            self._watch_writable()

    def _detach(self) -> None:
        if self._engine is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._engine.channel)
        loop.remove_writer(self._engine.channel)
        self._writing = False
        self._engine.channel.close()
        self._engine = None

    def _send(self, message: object) -> None:
        if self._engine is None:
            return
        try:
            self._engine.channel.send(message)
        except ChannelClosed:
            return  # the reader sees the same end and handles it
        if self._engine.channel.unsent:
            self._watch_writable()

    def _watch_writable(self) -> None:
        if not self._writing and self._engine is not None:
            self._writing = True
            asyncio.get_running_loop().add_writer(self._engine.channel, self._on_writable)

    def _on_writable(self) -> None:
        assert self._engine is not None
        with contextlib.suppress(ChannelClosed):
            self._engine.channel.flush()
        if not self._engine.channel.unsent:
            asyncio.get_running_loop().remove_writer(self._engine.channel)
            self._writing = False

    def _on_readable(self) -> None:
        assert self._engine is not None
        try:
            messages = self._engine.channel.receive()
        except ChannelClosed:
            self._on_death()
            return
        self.heard = time.monotonic()
        for message in messages:
            self._handle(message)

    def _handle(self, message: object) -> None:
        match message:
            case Outputs(outputs=outputs, stats=stats):
                if stats is not None:
                    self.stats = stats
                for output in outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:  # else its client left and the abort has just come back
                        if output.finish_reason is not None:
                            stream.open_answers -= 1
                        self.on_output(stream, output, self.heard)
                        stream.mailbox.put(stream, output)
            case Refused(request_id=request_id, error=error):
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.open_answers = 0
                    stream.mailbox.fail(UserError(error))
            case Heartbeat(stats=stats):
                self.stats = stats
            case Loading(stage=stage):
                self.stage = stage
            case Ready():
                self.ready, self.stats = message, message.stats
                if self.state != "stopping":  # told to stop while it was loading: its end is no death
                    self.state = "ready"
                if self._started is not None and not self._started.done():
                    self._started.set_result(message)
            case Failed():
                self._failure = message
                if message.details:
                    log.error("the engine process broke:\n%s", message.details)

    def _on_death(self) -> None:
        """The channel ended: error what runs, then start again or report that it is over."""
        assert self._engine is not None
        engine, was_ready = self._engine, self.state == "ready"
        self._detach()
        for stream in self._streams.values():
            stream.mailbox.fail(EngineDied("the engine process ended while this request was running"))
        self._streams.clear()
        if self.state == "stopping":
            return
        code = _exit_code(engine.process)
        failure = self._failure or Failed(error=f"the engine process ended with code {code}", exit_code=EXIT_INVALID)
        self.reason = failure.error
        now = time.monotonic()
        self._deaths = [moment for moment in self._deaths if now - moment < RESTART_WINDOW] + [now]
        refused_to_start = self._failure is not None and not was_ready  # would only repeat itself
        if self.restart and self.ready is not None and not refused_to_start and len(self._deaths) <= RESTART_LIMIT:
            log.error("%s; starting it again (%d of %d)", failure.error, len(self._deaths), RESTART_LIMIT)
            self.state, self.restarts = "restarting", self.restarts + 1
            self._attach(spawn(self.config, self.command))
            assert self._started is not None
            self._started.add_done_callback(_retrieve)
            return
        self.state = "dead"
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineFailed(failure))
        if self.ready is not None:  # else whoever waits for the first start tells it, once
            log.error("%s", failure.error)
        self.on_dead(failure.exit_code, failure.error)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process whose channel has closed; it is gone, or about to be."""
    try:
        return process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _retrieve(future: asyncio.Future[Ready]) -> None:
    if not future.cancelled():
        future.exception()

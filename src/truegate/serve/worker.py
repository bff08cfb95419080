"""The engine process: loads one engine, then feeds it messages and sends back what each step produced.

Invariant: between two steps nothing here waits for the other process; every accepted request is answered to its end
or named in a Failed message. Run as `python -m truegate.serve.worker FD`, FD being its end of the socket pair.
"""

import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from truegate.config import EngineConfig
from truegate.errors import EXIT_INVALID, TruegateError
from truegate.serve.memory import steady_heap
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

HEARTBEAT_SECONDS = 1.0
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"  # of both processes


class EngineLike(Protocol):
    """What this process asks of an engine; `truegate.engine.core.Engine` is the one the product has."""

    config: EngineConfig
    tokenizer: Any
    model_config: dict[str, Any]

    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
    @property
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def shutdown(self, *, drain: bool = True) -> list[StepOutput]: ...


class Worker:
    """The loop around one engine."""

    def __init__(self, channel: Channel, engine: EngineLike) -> None:
        self.channel = channel
        self.engine = engine
        self.leaving: Shutdown | None = None
        self._stats_at = 0.0

    def run(self) -> None:
        """Serve until told to shut down or until the other process is gone."""
        self.channel.send(
            Ready(
                config=self.engine.config,
                vocab_size=self.engine.model_config.get("vocab_size") or self.engine.tokenizer.vocab_size,
                stats=self.engine.stats(),
            )
        )
        while self.leaving is None:
            if not self.engine.has_work:
                self.channel.wait(HEARTBEAT_SECONDS)
            self._take_messages()
            self._report(self.engine.step() if self.engine.has_work else [])
        self._report(self.engine.shutdown(drain=self.leaving.drain))
        while self.channel.unsent:
            self.channel.wait(HEARTBEAT_SECONDS)
            self.channel.flush()

    def _take_messages(self) -> None:
        for message in self.channel.receive():
            match message:
                case Add(request=request):
                    try:
                        self.engine.add(request)
                    except TruegateError as error:
                        self.channel.send(Refused(request_id=request.request_id, error=str(error)))
                case Cancel(request_id=request_id):
                    self.engine.cancel(request_id)
                case Shutdown():
                    self.leaving = message

    def _report(self, outputs: list[StepOutput]) -> None:
        now = time.monotonic()
        stats = None
        if now - self._stats_at >= HEARTBEAT_SECONDS or (outputs and not self.engine.has_work):
            stats, self._stats_at = self.engine.stats(), now
        if outputs:
            self.channel.send(Outputs(outputs=outputs, stats=stats))
        elif stats is not None:
            self.channel.send(Heartbeat(stats=stats))
        else:
            self.channel.flush()


def serve_engine(channel: Channel, build: Callable[[EngineConfig], EngineLike]) -> int:
    """Build the engine that the first message asks for and serve it; returns the process's exit code."""
    try:
        try:
            engine = build(_first_message(channel).config)
            Worker(channel, engine).run()
        except ChannelClosed:
            return EXIT_INVALID  # the HTTP process is gone: nobody is left to answer to
        except TruegateError as error:
            _farewell(channel, Failed(error=str(error), exit_code=error.exit_code))
            return error.exit_code
        except Exception as error:
            line = f"{type(error).__name__}: {error}"
            _farewell(channel, Failed(error=line, exit_code=EXIT_INVALID, details=traceback.format_exc()))
            return EXIT_INVALID
    except ChannelClosed:
        return EXIT_INVALID
    return 0


def _first_message(channel: Channel) -> Start:
    while True:
        channel.wait(HEARTBEAT_SECONDS)
        for message in channel.receive():
            if isinstance(message, Start):
                return message


def _farewell(channel: Channel, message: Failed) -> None:
    channel.send(message)
    while channel.unsent:
        channel.wait(HEARTBEAT_SECONDS)
        channel.flush()


def channel_from_argv(argv: list[str]) -> Channel:
    """The channel whose file descriptor is the last word of the command line; signals are left to the HTTP process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the HTTP process drains us
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return Channel(socket.socket(fileno=int(argv[-1])))


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT, stream=sys.stderr)
    steady_heap()
    channel = channel_from_argv(sys.argv)

    def build(config: EngineConfig) -> EngineLike:
        channel.send(Loading(stage="importing torch"))
        from truegate.engine.core import Engine

        channel.send(Loading(stage="loading the model"))
        return Engine(config)

    code = serve_engine(channel, build)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to save, and interpreter teardown of torch takes a while


if __name__ == "__main__":
    main()

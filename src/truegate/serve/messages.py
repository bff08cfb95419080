"""What the HTTP process and the engine process say to each other, and the channel they say it over.

Invariant: neither side ever waits for the other to read; what the socket does not take yet stays in a buffer here.
Frames are a 4-byte length and a pickle; both ends are this program, joined by a socket pair nobody else can open.
"""

import pickle
import select
import socket
import struct
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from truegate.config import EngineConfig
from truegate.types import EngineStats, Request, StepOutput

_LENGTH = struct.Struct("<I")
_READ_SIZE = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """First message to the engine process: what to load."""

    config: EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """End: finish what runs (drain) or abort it, then leave."""

    drain: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """The engine process says what it is doing before it is ready."""

    stage: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The engine is loaded and its self-test passed (or there was none to run)."""

    config: EngineConfig  # resolved: max_model_len and the rest are filled in
    vocab_size: int
    stats: EngineStats


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The engine could not start, or a step broke; the process ends after this message."""

    error: str
    exit_code: int
    details: str = ""  # the traceback, for the log


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Everything one step produced, in one frame."""

    outputs: list[StepOutput]
    stats: EngineStats | None = None  # now and then

    def __reduce__(self) -> tuple[Any, ...]:
        """As plain tuples: a slotted dataclass pickles ten times slower, and this is one per token."""
        return _unpack, ([_pack(output) for output in self.outputs], self.stats)


_NAMES = tuple(one.name for one in fields(StepOutput))
_pack = attrgetter(*_NAMES)


def _unpack(rows: list[tuple[Any, ...]], stats: EngineStats | None) -> Outputs:
    return Outputs(outputs=[StepOutput(**dict(zip(_NAMES, row, strict=True))) for row in rows], stats=stats)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The engine would not take a request, and why: the request's fault."""

    request_id: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Sent while the engine is idle, so that silence means trouble."""

    stats: EngineStats = field(repr=False)


class ChannelClosed(Exception):
    """The other process is gone."""


class Channel:
    """One end of the socket pair, without a thread: `send` buffers, `receive` takes what is there."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.setblocking(False)
        self._inbox = bytearray()
        self._outbox = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._outbox)

    def send(self, message: Any) -> None:
        """Queue one message and push what the socket takes; raises ChannelClosed when there is nobody left."""
        body = pickle.dumps(message, protocol=5)
        self._outbox += _LENGTH.pack(len(body))
        self._outbox += body
        self.flush()

    def flush(self) -> None:
        while self._outbox:
            try:
                sent = self.socket.send(self._outbox)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            del self._outbox[:sent]

    def receive(self) -> list[Any]:
        """The messages that have fully arrived, in order; raises ChannelClosed at the end of the stream."""
        closed = False
        while not closed:
            try:
                chunk = self.socket.recv(_READ_SIZE)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            closed = not chunk
            self._inbox += chunk
        messages = self._parse()
        if closed and not messages:
            raise ChannelClosed("the other process closed the channel")
        return messages

    def _parse(self) -> list[Any]:
        messages, start = [], 0
        while len(self._inbox) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._inbox, start)
            end = start + _LENGTH.size + size
            if len(self._inbox) < end:
                break
            messages.append(pickle.loads(memoryview(self._inbox)[start + _LENGTH.size : end]))
            start = end
        del self._inbox[:start]
        return messages

    def wait(self, seconds: float) -> None:
        """Sleep until a message may be here, the socket takes more of the buffer, or `seconds` have passed."""
        select.select([self.socket], [self.socket] if self._outbox else [], [], seconds)

    def close(self) -> None:
        self.socket.close()

"""From a running job to an HTTP response, in one body or as server-sent events.

Invariant: the choices of a streamed response, joined, are those of the unstreamed one; a stream ends with [DONE] or, if
it broke, with an event {"error": ...}, never silently.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from truegate.serve.answers import Answer, Piece, usage
from truegate.serve.client import EngineDied
from truegate.serve.errors import ApiError, engine_died
from truegate.serve.generation import Job
from truegate.serve.protocol import Sampling

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # nobody reads it but the counter


class Shape(Protocol):
    """What the two APIs write differently."""

    prefix: str  # of the response's id
    kind: str  # "object" of an unstreamed response
    chunk_kind: str

    def top(self) -> dict[str, Any]:
        """Fields beside the choices that belong to the prompt; said once."""
        ...

    def whole(self, answer: Answer) -> dict[str, Any]: ...
    def opening(self, answer: Answer) -> dict[str, Any] | None:
        """The chunk that begins an answer, if it has one of its own."""
        ...

    def delta(self, answer: Answer, piece: Piece) -> str | None:
        """The choice of one chunk as JSON, or None if there is nothing to say yet."""
        ...


async def respond(job: Job, body: Sampling, request: Request, shape: Shape) -> Response:
    """Wait for the first output (a refusal by the engine is still a plain error then), and answer as asked."""
    job.watch(request.receive)
    head = {
        "id": f"{shape.prefix}-{uuid.uuid4().hex}",
        "object": shape.chunk_kind if body.stream else shape.kind,
        "created": int(time.time()),
        "model": job.service.names[0],
    }
    try:
        came = await job.next()
        job.raise_if_broken()
        if body.stream:
            return EventStream(job, _events(job, body, shape, head, came))
        while came and not job.done:
            came = await job.next()
            job.raise_if_broken()
    except BaseException:
        job.close()
        raise
    job.close()
    if not came:
        return Response(status_code=CLIENT_GONE)
    choices = {"choices": [shape.whole(answer) for answer in job.answers]}
    return JSONResponse(head | choices | {"usage": _usage(job)} | shape.top())


class EventStream(Response):
    """Sends what `events` yields and closes the job, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, events: AsyncIterator[bytes]) -> None:
        super().__init__()
        self.job, self.events = job, events
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # tells nginx to pass each event on at once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self.events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = DONE
            except EngineDied as error:
                last = _event(dump(engine_died(error).body()))
            except ApiError as error:
                last = _event(dump(error.body()))
            if not self.job.mailbox.abandoned:
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self.job.close()


async def _events(
    job: Job, body: Sampling, shape: Shape, head: dict[str, Any], came: Sequence[tuple[Answer, Piece]]
) -> AsyncIterator[bytes]:
    plain = _ChunkWriter(head, usage_field=body.include_usage)
    writer = _ChunkWriter(head | shape.top(), usage_field=body.include_usage)
    begun: set[int] = set()
    counting = body.continuous_usage
    while came:
        out = []
        for answer, piece in came:
            counts = _usage(job) if counting else None
            opening = None
            if answer.index not in begun:
                begun.add(answer.index)
                opening = shape.opening(answer)
            for choice in (dump(opening) if opening is not None else None, shape.delta(answer, piece)):
                if choice is not None:
                    out.append(writer.chunk(choice, counts))
                    writer = plain
        if out:
            yield b"".join(out)
        job.raise_if_broken()
        if job.done:
            break
        came = await job.next()
    if body.include_usage and job.done:
        yield plain.chunk("", _usage(job))


class _ChunkWriter:
    """Writes chunks of one response: a fixed head, the choices, and token counts where they were asked for."""

    def __init__(self, head: dict[str, Any], *, usage_field: bool) -> None:
        self._head = dump(head)[:-1] + ',"choices":['
        self._tail = '],"usage":null}' if usage_field else "]}"

    def chunk(self, choice: str, counts: dict[str, Any] | None) -> bytes:
        if counts is None:
            return _event(self._head + choice + self._tail)
        return _event(f'{self._head}{choice}],"usage":{dump(counts)}}}')


def _usage(job: Job) -> dict[str, Any]:
    return usage(job.answers, job.prompt_tokens, job.cached_tokens)


def _event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

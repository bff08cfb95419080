"""What stands between the socket and the routes: the API key, the size and the pace of bodies, and the count.

Invariant: a body above the limit is never held in memory, and a client that stops sending is not waited for.
"""

import asyncio
import hmac
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from truegate.serve.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/metrics"})  # probes and scrapers carry no key
DRAIN_FACTOR = 8  # of the limit: how much of a refused body is read and dropped so that the client sees the answer


class Gate:
    """ASGI middleware; `keys` empty means that everybody may come in."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: tuple[str, ...],
        max_body_bytes: int,
        body_timeout: float,
        count: Callable[[str, int], None],
    ) -> None:
        self.app, self.count = app, count
        self.keys = tuple(key.encode() for key in keys)
        self.max_body_bytes, self.body_timeout = max_body_bytes, body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self.count(getattr(route, "path", "other"), message["status"])
            await send(message)

        refusal = None if self._may_enter(scope["path"], headers) else _no_key()
        if refusal is None:
            await self.app(scope, _Body(receive, self.max_body_bytes, self.body_timeout), counted)
        else:
            await refusal.response()(scope, receive, counted)

    def _may_enter(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if not self.keys or path in OPEN_PATHS:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self.keys]  # all of them: no early way out
        return scheme.lower() == b"bearer" and any(matches)


class _Body:
    """A `receive` that counts bytes and watches the clock until the body is complete."""

    def __init__(self, receive: Receive, limit: int, timeout: float) -> None:
        self.receive, self.limit, self.timeout = receive, limit, timeout
        self.size, self.complete = 0, False
        self.deadline = asyncio.get_running_loop().time() + timeout

    async def __call__(self) -> Message:
        if self.complete:
            return await self.receive()
        message = await self._next()
        if self.size > self.limit:
            while not self.complete and self.size <= DRAIN_FACTOR * self.limit:
                await self._next()
            raise HTTPException(413, f"the body is larger than {self.limit} bytes (--max-body-bytes)")
        return message

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self.receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self.timeout:g} s (--body-timeout)") from None
        if message["type"] == "http.request":
            self.size += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        else:
            self.complete = True
        return message


def _no_key() -> ApiError:
    return ApiError(401, "this server wants an API key: send `Authorization: Bearer KEY`", code="invalid_api_key")

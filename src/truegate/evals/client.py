"""One request to an OpenAI-compatible server, turned into a Reply: a valid answer or a named error, never a guess.

Invariant: nothing is sent that was not asked for (strict servers refuse unknown fields), and a 200 body is checked
before it is believed.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from truegate.errors import InvalidRun, UserError
from truegate.evals.score import Reply
from truegate.evals.tasks import Item, Mode

BODY_LIMIT = 64 * 2**20  # a reply larger than this is no answer
RETRY_STATUS = (429, 500, 502, 503, 504)
BACKOFF_S = 0.5
MAX_WAIT_S = 30.0
CONNECT_S = 30.0
RESERVED = ("model", "messages", "prompt", "max_tokens", "temperature", "top_p", "stop", "stream", "n")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What is sent besides the prompt; None and empty values are not sent."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The JSON fields of a request."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.top_p is not None:
            body["top_p"] = self.top_p
        if self.stop:
            body["stop"] = list(self.stop)
        return body | dict(self.extra)


def base_url(url: str) -> str:
    """`url` with a scheme and ending in /v1, whether it was given with either or not."""
    text = url.strip()
    text = (text if "://" in text else f"http://{text}").rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models"):
        text = text.removesuffix(ending)
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UserError(f"--url {url!r}: not an address like http://127.0.0.1:8000")
    return text if text.endswith("/v1") else f"{text}/v1"


class Client:
    """Asks one model of one server; every worker holds a connection of its own.

    A shared pool looks through all its connections for every request: at 128 of them that costs more than the request.
    """

    def __init__(self, *, url: str, model: str, mode: Mode, timeout_s: float, retries: int, key: str):
        self._url = f"{base_url(url)}/{'chat/completions' if mode == 'chat' else 'completions'}"
        self._model, self._mode, self._timeout_s, self._retries = model, mode, timeout_s, retries
        self._headers = _headers(key)
        self._tls = httpx.create_ssl_context()  # made once: it takes longer than a request

    def connection(self) -> httpx.AsyncClient:
        """One connection, opened with the first request and kept for the next ones."""
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        timeout = httpx.Timeout(self._timeout_s, connect=min(CONNECT_S, self._timeout_s))
        return httpx.AsyncClient(verify=self._tls, limits=limits, timeout=timeout, headers=self._headers)

    async def ask(self, http: httpx.AsyncClient, item: Item, sampling: Sampling) -> Reply:
        """The reply to one item; overload, server errors and lost connections are tried again, nothing else is."""
        started = time.monotonic()
        wait = BACKOFF_S
        for attempt in range(self._retries + 1):
            reply, again = await self._once(http, self._body(item, sampling))
            if again is None or attempt == self._retries:
                break
            await asyncio.sleep(min(MAX_WAIT_S, max(wait, again)))
            wait *= 2
        return _timed(reply, time.monotonic() - started)

    def _body(self, item: Item, sampling: Sampling) -> dict[str, Any]:
        asked = {"messages": item.messages()} if self._mode == "chat" else {"prompt": item.input}
        return {"model": self._model, **asked, **sampling.fields()}

    async def _once(self, http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Reply, float | None]:
        """(reply, seconds the server asks to wait before another try, or None where another try is of no use)."""
        try:
            async with asyncio.timeout(self._timeout_s):
                status, headers, content = await self._post(http, body)
        except (TimeoutError, httpx.TimeoutException):
            return Reply(error=f"timeout: no reply within {self._timeout_s:g} s"), None
        except httpx.ConnectError as error:
            return Reply(error=f"connect: {error}"), 0.0
        except httpx.HTTPError as error:
            return Reply(error=f"dropped: {type(error).__name__}: {error}"), 0.0
        except _TooLarge:
            return Reply(error=f"body: more than {BODY_LIMIT >> 20} MiB"), None
        if status != 200:
            again = _seconds(headers.get("retry-after")) if status in RETRY_STATUS else None
            return Reply(error=f"http: {status} {_error_text(content)}"), again
        return read_body(content, self._mode), None

    async def _post(self, http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, httpx.Headers, bytes]:
        async with http.stream("POST", self._url, json=body) as response:
            parts, size = [], 0
            async for part in response.aiter_bytes():
                size += len(part)
                if size > BODY_LIMIT:
                    raise _TooLarge
                parts.append(part)
            return response.status_code, response.headers, b"".join(parts)


class _TooLarge(Exception):
    pass


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _timed(reply: Reply, seconds: float) -> Reply:
    return Reply(**{**reply.__dict__, "seconds": seconds})


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header)) if header else 0.0
    except ValueError:
        return 0.0


def _error_text(content: bytes) -> str:
    """The message of an error body in OpenAI's shape, else its first characters."""
    text = content[:2000].decode("utf-8", "replace")
    try:
        body = json.loads(content)
        error = body.get("error", body.get("message", text))
        text = error.get("message", str(error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        pass
    shown = "".join(c if c.isprintable() else " " for c in str(text))  # it goes to terminals and reports
    return " ".join(shown.split())[:300]


def read_body(content: bytes, mode: Mode) -> Reply:
    """The Reply in the body of a 200 response; a body that is not a completion is an error of kind `body`."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return Reply(error=f"body: not JSON: {_error_text(content)[:80]!r}")
    if not isinstance(body, dict):
        return Reply(error=f"body: a {type(body).__name__}, not an object")
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        detail = f" ({_error_text(content)[:120]})" if "error" in body else ""
        return Reply(error=f"body: no choices{detail}")
    choice = choices[0]
    usage = body["usage"] if isinstance(body.get("usage"), dict) else {}
    finish = choice.get("finish_reason")
    message: Any = choice.get("message") if mode == "chat" else {"content": choice.get("text")}
    if not isinstance(message, dict):
        return Reply(error="body: a choice without a message")
    text = _plain(message.get("content"))
    reasoning = _plain(message.get("reasoning_content")) or _plain(message.get("reasoning"))
    if text is None and reasoning is None and (mode == "completion" or "content" not in message):
        return Reply(error="body: a choice without text")
    return Reply(
        text=text or "",
        reasoning=reasoning or "",
        finish=finish if isinstance(finish, str) else None,
        tokens=_count(usage.get("completion_tokens")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
    )


def _plain(value: Any) -> str | None:
    """Text, or the joined text parts of a content list; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(p["text"] for p in value if isinstance(p, dict) and isinstance(p.get("text"), str))
    return None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def first_model(url: str, *, key: str, timeout_s: float = 30.0) -> str:
    """The first model that the server lists; says what to do where there is no server or no list."""
    address = f"{base_url(url)}/models"
    try:
        response = httpx.get(address, headers=_headers(key), timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InvalidRun(f"no server answers at {address} ({error or type(error).__name__}): is it running?") from None
    if response.status_code in (401, 403):
        raise UserError(f"{address} answers {response.status_code}: give --api-key, or set OPENAI_API_KEY")
    try:
        model = response.json()["data"][0]["id"] if response.status_code == 200 else None
    except (ValueError, KeyError, IndexError, TypeError):
        model = None
    if not isinstance(model, str) or not model:
        raise InvalidRun(f"{address} does not list a model (HTTP {response.status_code}): give --model, or check --url")
    return model

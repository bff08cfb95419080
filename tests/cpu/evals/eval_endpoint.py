"""A scripted OpenAI-compatible server on loopback: for every request a function decides what comes back.

It runs in a thread of its own (tests) or as a process (`python eval_endpoint.py PORT_FILE`, for the speed benchmark).
"""

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "scripted/model"


@dataclass(frozen=True, kw_only=True)
class Act:
    """What the server does with one request: a status and body, or worse."""

    body: Any = None  # dict (sent as JSON) or bytes (sent as they are)
    status: int = 200
    delay_s: float = 0.0
    drop: bool = False  # close the connection without a reply
    half: bool = False  # promise more bytes than are sent, then close
    headers: dict[str, str] = field(default_factory=dict)


Script = Callable[[str, int, dict[str, Any]], Act]  # (prompt text, times asked before, request body) -> Act


def reply(text: str | None, *, finish: str = "stop", tokens: int | None = 10, reasoning: str | None = None) -> Act:
    """A well-formed chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    body: dict[str, Any] = {"choices": [{"index": 0, "message": message, "text": text, "finish_reason": finish}]}
    if tokens is not None:
        body["usage"] = {"completion_tokens": tokens, "prompt_tokens": 5}
    return Act(body=body)


def prompt_of(body: dict[str, Any]) -> str:
    """The text of the last message, or the prompt."""
    return body["messages"][-1]["content"] if "messages" in body else body["prompt"]


class Endpoint:
    """The server; `asked` counts requests by prompt, `bodies` keeps the last request body."""

    def __init__(self, script: Script) -> None:
        self._script, self._port, self._ready = script, 0, threading.Event()
        self.asked: Counter[str] = Counter()
        self.last: dict[str, Any] = {}
        self.in_flight = self.most_in_flight = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "Endpoint":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self.start())
        self._ready.set()
        self._loop.run_forever()
        self._server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def start(self) -> int:
        """Listen on a free port of the loopback address."""
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=512)
        self._port = self._server.sockets[0].getsockname()[1]
        return self._port

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *fields = head.split("\r\n")
        headers = dict(f.lower().split(": ", 1) for f in fields if ": " in f)
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        if "/models" in line:
            act = Act(body={"data": [{"id": MODEL}]})
        else:
            body = json.loads(content)
            prompt = prompt_of(body)
            self.last = body
            act = self._script(prompt, self.asked[prompt], body)
            self.asked[prompt] += 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if act.delay_s:
                await asyncio.sleep(act.delay_s)
            self.in_flight -= 1
        if act.drop:
            return False
        data = act.body if isinstance(act.body, bytes) else json.dumps(act.body).encode()
        extra = "".join(f"{name}: {value}\r\n" for name, value in act.headers.items())
        size = len(data) + (1000 if act.half else 0)
        writer.write(f"HTTP/1.1 {act.status} X\r\ncontent-length: {size}\r\n{extra}\r\n".encode() + data)
        await writer.drain()
        return not act.half


def _fast(prompt: str, before: int, body: dict[str, Any]) -> Act:
    """For the speed benchmark: some reasoning, then a number, after a short while."""
    return Act(body=reply("We work it out step by step. " * 20 + "\n#### 42", tokens=160).body, delay_s=0.02)


async def _serve(port_file: Path) -> None:
    endpoint = Endpoint(_fast)
    port_file.write_text(str(await endpoint.start()))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))

"""`truegate chat`: a conversation with any OpenAI-compatible server, streamed to the terminal.

Invariant: an answer that broke off is shown as it came, with the reason, and is not kept in the conversation.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from truegate.errors import InvalidRun, UserError
from truegate.evals.client import base_url

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit leaves (so does Ctrl-D)"


class Conversation:
    """Messages so far, and the server they go to."""

    def __init__(
        self, url: str, *, model: str | None, api_key: str | None, system: str | None, options: dict[str, Any]
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.base = base_url(url)
        self.http = httpx.Client(base_url=self.base, headers=headers, timeout=httpx.Timeout(10, read=600))
        self.options = {key: value for key, value in options.items() if value is not None}
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.model = model or self._first_model()
        self.finish_reason: str | None = None

    def ask(self, text: str) -> Iterator[str]:
        """The pieces of the answer as they come; InvalidRun if the server breaks off."""
        messages = [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]
        messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": messages, "stream": True, **self.options}
        pieces: list[str] = []
        self.finish_reason = None
        try:
            with self.http.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise InvalidRun(f"the server refuses ({response.status_code}): {_reason(response)}")
                for piece in self._pieces(response):
                    pieces.append(piece)
                    yield piece
        except httpx.TransportError as error:
            raise InvalidRun(f"the connection to {self.base} broke: {error}") from None
        self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(pieces)}]

    def _pieces(self, response: httpx.Response) -> Iterator[str]:
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if event.get("error"):
                raise InvalidRun(f"the server broke off: {event['error'].get('message', event['error'])}")
            for choice in event.get("choices") or []:
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                piece = (choice.get("delta") or {}).get("content")
                if piece:
                    yield piece

    def _first_model(self) -> str:
        try:
            response = self.http.get("/models")
        except httpx.TransportError as error:
            raise UserError(f"no server answers at {self.base} ({error}): start one with `truegate serve`") from None
        if response.status_code != 200:
            raise UserError(f"{self.base}/models says {response.status_code}: {_reason(response)}")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{self.base}/models lists no model: give --model") from None


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:200]


def talk(conversation: Conversation, *, once: str | None) -> None:
    """The loop of the terminal; `once` asks one thing and returns."""
    if once is not None:
        _show(conversation, once)
        return
    print(f"{conversation.model} at {conversation.base}. {HELP}", file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        command, _, rest = text.partition(" ")
        match command:
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                conversation.turns.clear()
            case "/system":
                conversation.system = rest or None
            case "/help":
                print(HELP, file=sys.stderr)
            case _:
                try:
                    _show(conversation, text)
                except InvalidRun as error:
                    print(f"\n{error}", file=sys.stderr)


def _show(conversation: Conversation, text: str) -> None:
    try:
        for piece in conversation.ask(text):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", file=sys.stderr)
        return
    print()
    if conversation.finish_reason not in ("stop", None):
        print(f"[ended by: {conversation.finish_reason}]", file=sys.stderr)

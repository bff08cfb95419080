"""A loopback HTTP server around the toy engine: completions as engines answer them, with manners that can be bad."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from truegate.canary.api import Api
from truegate.canary.inprocess import InProcess


@contextmanager
def run_server(toy: Any, manners: Any) -> Iterator[str]:
    words = toy.manifest.vocabulary.words(toy.manifest.config["vocab_size"])
    ids = {w: i for i, w in enumerate(words)}
    lock = threading.Lock()
    released, dead = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def do_GET(self) -> None:
            if dead.is_set():
                self._hang_up()
            elif self.path == "/v1/models":
                self._send(200, {"object": "list", "data": [{"id": "toy"}]})
            elif self.path == "/get_model_info" and manners.style == "native":
                self._send(200, {"model_path": "toy"})
            else:
                self._send(404, {"error": "no such page"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            manners.seen.append(body)
            if (rank := self.headers.get("X-data-parallel-rank")) is not None:
                manners.ranks.append(rank)
            if manners.dies_after is not None and len(manners.seen) > manners.dies_after:
                dead.set()
                self._hang_up()
                return
            if manners.hangs_after is not None and len(manners.seen) > manners.hangs_after:
                if manners.drips:
                    self.send_response(200)
                    self.send_header("Content-Length", "100000")
                    self.end_headers()
                for _ in range(100):
                    if released.wait(0.2):
                        break
                    if manners.drips:
                        self.wfile.write(b" ")
                self.close_connection = True
                return
            if manners.answers_so is not None and len(manners.seen) > manners.answers_so_after:
                self._send(200, manners.answers_so)
                return
            try:
                self._send(200, self._answer(body))
            except ValueError as error:
                self._send(400, {"error": str(error)})

        def _answer(self, body: dict[str, Any]) -> Any:
            native = self.path == "/generate"
            if native != (manners.style == "native") or self.path == "/v1/chat/completions":
                raise ValueError("not found")
            prompts = self._prompts(body.get("input_ids") if native else body.get("prompt"))
            top = min(body.get("top_logprobs_num" if native else "logprobs", 0) or 0, 1000)
            if top > manners.top:
                raise ValueError(f"logprobs must be at most {manners.top}")
            steps = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
            api = Api(endpoint="completions", ids=True, top=top)
            old = manners.becomes is None or len(manners.seen) <= manners.becomes_after
            forward = toy.forward if old else manners.becomes.forward
            with lock:
                answers = InProcess(forward).complete(api, prompts, steps)
                echoed = []
                if body.get("echo"):
                    if not manners.echo:
                        raise ValueError("echo is not supported")
                    echoed = [InProcess(forward).complete(api, [[t] for t in p], 1) for p in prompts]
            if native:
                return [self._native(a) for a in answers] if len(prompts) > 1 else self._native(answers[0])
            return {"choices": [self._choice(i, a, p, echoed[i] if echoed else None)
                                for i, (a, p) in enumerate(zip(answers, prompts, strict=True))]}  # fmt: skip

        def _prompts(self, given: Any) -> list[list[int]]:
            many = isinstance(given, list) and given and isinstance(given[0], list | str)
            prompts = given if many else [given]
            if len(prompts) > 1 and not manners.batched:
                raise ValueError("one prompt a request")
            out = []
            for p in prompts:
                if isinstance(p, str):
                    out.append([ids[w] for w in p.split()])
                elif not manners.ids:
                    raise ValueError("prompt must be text")
                else:
                    out.append(p)
            return out

        def _lp(self, value: float) -> float:
            return float("nan") if manners.nan else value

        def _choice(self, index: int, answer: Any, prompt: list[int], echoed: Any) -> dict[str, Any]:
            text = " ".join(words[t] for t in answer.tokens)
            if not answer.tops:
                return {"index": index, "text": text}
            if manners.style == "content":
                content = [{"id": t, "token": words[t], "logprob": self._lp(top[t]), "top_logprobs": [
                    {"id": k, "token": words[k], "logprob": self._lp(v)} for k, v in top.items()]}
                    for t, top in zip(answer.tokens, answer.tops, strict=True)]  # fmt: skip
                return {"index": index, "text": text, "logprobs": {"content": content}}
            tokens = [words[t] for t in answer.tokens]
            tops: list[Any] = [{words[k]: self._lp(v) for k, v in top.items()} for top in answer.tops]
            if echoed is not None:
                tokens = [words[t] for t in prompt] + tokens
                tops = [None, *({words[k]: v for k, v in e.tops[0].items()} for e in echoed[:-1]), *tops]
            return {"index": index, "text": text, "logprobs": {"tokens": tokens, "top_logprobs": tops}}

        def _native(self, answer: Any) -> dict[str, Any]:
            meta: dict[str, Any] = {"output_token_logprobs": [[0.0, t, None] for t in answer.tokens]}
            if answer.tops:
                meta["output_top_logprobs"] = [[[v, k, None] for k, v in top.items()] for top in answer.tops]
            return {"text": " ".join(words[t] for t in answer.tokens), "meta_info": meta}

        def _send(self, status: int, data: Any) -> None:
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        released.set()
        server.shutdown()
        server.server_close()


np.seterr(over="ignore")

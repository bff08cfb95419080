"""A scripted OpenAI endpoint with known timings, on loopback: answers stream one token per `gap` seconds."""

import json
import time
from http.server import BaseHTTPRequestHandler

FIRST, GAP = 0.05, 0.01  # seconds to the first token, and between tokens


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # the connection's end is the body's end

    def log_message(self, *args) -> None: ...

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.inside += 1
            self.server.most_inside = max(self.server.most_inside, self.server.inside)
        try:
            self._answer(body)
        finally:
            with self.server.lock:
                self.server.inside -= 1

    def _answer(self, body: dict) -> None:
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        if "FAIL" in prompt:
            self._send(500, {"error": {"message": "out of luck"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        time.sleep(FIRST)
        for place in range(body["max_tokens"]):
            if "BREAK" in prompt and place == 2:
                return  # the stream ends without a finish reason
            if place:
                time.sleep(GAP)
            last = place == body["max_tokens"] - 1
            piece = {"delta": {"content": "x "}} if "messages" in body else {"text": "x "}
            self._event({"choices": [{"index": 0, **piece, "finish_reason": "length" if last else None}]})
        if "NOUSAGE" not in prompt:
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": body["max_tokens"]}
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body: dict) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

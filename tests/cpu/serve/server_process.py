"""A server in its own process, and the little tokenizer of the scripted engine."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import tokenizers
from openai import OpenAI
from tokenizers import decoders, models, pre_tokenizers

HERE = Path(__file__).parent
FAKE_COMMAND = (sys.executable, str(HERE / "fake_engine.py"))
TEMPLATE = (
    "{% for m in messages %}{{ raise_exception('no spies here') if 'SPY' in m.content }}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROUTING = {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "hidden_size": 16, "intermediate_size": 16,
}  # fmt: skip
LAUNCH = """
import json, sys
from truegate.config import EngineConfig
from truegate.errors import TruegateError
from truegate.serve.main import ServeOptions, serve
options = json.loads(sys.argv[1])
engine = EngineConfig(**options.pop("engine"))
for key in ("names", "api_keys", "worker_command"):
    if key in options:
        options[key] = tuple(options[key])
try:
    serve(ServeOptions(engine=engine, **options))
except TruegateError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer without merges: ids 0..255 are bytes, then <|end|> (256) and the role marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 256, **ROUTING}))
    return folder


@dataclass(kw_only=True)
class Server:
    """A running server process."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def post(self, path: str, body: object, key: str = "none") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=30)

    def send_raw(self, path: str, body: object, key: str = "none") -> socket.socket:
        """A connection that has sent a whole request and read nothing."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(head.encode() + content)
        return connection

    def in_flight(self) -> int:
        return self.get("/health").json()["answers_in_flight"]

    def health(self) -> int | None:
        try:
            return self.get("/health").status_code
        except httpx.TransportError:
            return None

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> float:
        """Seconds until the condition held."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, self.log.read_text()[-2000:]
            time.sleep(0.02)
        return time.monotonic() - began

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

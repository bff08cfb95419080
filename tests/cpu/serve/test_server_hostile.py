"""Clients that misbehave: no 5xx, no hang, and the server still answers the next one."""

import contextlib
import json
import resource
import socket
import struct
import time

import httpx
import pytest
from server_process import Server

PLAIN = "/v1/completions"
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(autouse=True)
def alive_after(fake: Server):
    yield
    answer = fake.post(PLAIN, {"prompt": "ok", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "ok"
    fake.wait_for(lambda: fake.in_flight() == 0, 10)


def read_all(connection: socket.socket, seconds: float = 10) -> bytes:
    connection.settimeout(seconds)
    out = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            out += chunk
    return out


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def raw(fake: Server, content: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", fake.port), timeout=10)
    connection.sendall(content)
    return connection


@pytest.mark.parametrize("size", [3 << 20, 10 << 20])
def test_a_huge_prompt_is_refused_quickly(fake, size):
    began = time.monotonic()
    answer = fake.post(PLAIN, {"prompt": "x" * size})
    assert answer.status_code == (413 if size > 4 << 20 else 400), answer.text
    assert time.monotonic() - began < 5


def test_a_huge_list_of_token_ids_is_refused(fake):
    assert fake.post(PLAIN, {"prompt": [1] * 500_000}).status_code == 400
    assert fake.post("/detokenize", {"tokens": [1] * 500_000}).status_code == 400


@pytest.mark.parametrize(
    "content",
    [
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,  # a TLS hello
        b"GET / HTTP/9.9\r\n\r\n",
        b"G" * 100_000,
        b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        HEAD.encode() + b"content-length: 99999999999999999999\r\n\r\n{}",
        HEAD.encode() + b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
def test_what_is_not_http_is_dropped(fake, content):
    connection = raw(fake, content)
    with contextlib.suppress(OSError):  # it may have hung up already
        connection.shutdown(socket.SHUT_WR)
    answer = read_all(connection)
    assert not answer or 400 <= status_of(answer) < 500, answer[:200]


def test_half_closed_and_reset_connections_leave_nothing_behind(fake):
    body = json.dumps({"prompt": "SLOW ", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    head = f"{HEAD}content-length: {len(body)}\r\n\r\n".encode()
    half = raw(fake, head + body)
    fake.wait_for(lambda: fake.in_flight() == 1, 5)
    half.shutdown(socket.SHUT_WR)  # the client has sent all it will
    fake.wait_for(lambda: fake.in_flight() == 0, 10)
    half.close()
    reset = raw(fake, head + body)
    fake.wait_for(lambda: fake.in_flight() == 1, 5)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends RST
    reset.close()
    fake.wait_for(lambda: fake.in_flight() == 0, 10)
    partial = raw(fake, head + body[:10])
    partial.close()


def test_a_slow_reader_delays_nobody(fake):
    body = json.dumps({"prompt": "y" * 100, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 8}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", fake.port))
    connection.sendall(f"{HEAD}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    time.sleep(0.5)  # it reads nothing: the engine must be done long before it has all
    began = time.monotonic()
    assert fake.post(PLAIN, {"prompt": "quick", "max_tokens": 5}).status_code == 200
    assert time.monotonic() - began < 3
    answer = read_all(connection)  # now it reads, and gets everything
    assert answer.count(b'"finish_reason":"length"') == 8
    assert b"data: [DONE]" in answer
    connection.close()


def test_a_thousand_idle_connections_are_carried(fake):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    idle = [socket.create_connection(("127.0.0.1", fake.port), timeout=10) for _ in range(1000)]
    try:
        assert fake.post(PLAIN, {"prompt": "ok", "max_tokens": 2}).status_code == 200
        assert fake.health() == 200
    finally:
        for connection in idle:
            connection.close()


def test_pipelined_requests_are_each_answered(fake):
    one = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert read_all(raw(fake, one * 3 + last)).count(b"HTTP/1.1 200") == 4


def test_odd_methods_and_paths_are_4xx(fake):
    for method, path in [("PUT", PLAIN), ("DELETE", "/v1/models"), ("GET", "/../etc/passwd"), ("PATCH", "/health")]:
        assert 400 <= httpx.request(method, fake.url + path, timeout=5).status_code < 500
    assert fake.get("/v1/models/%00%ff").status_code == 404

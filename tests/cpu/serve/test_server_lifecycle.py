"""Starting, draining, and losing the engine process: nothing hangs, nothing is lost in silence."""

import asyncio
import os
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from server_process import FAKE_COMMAND

from truegate.config import EngineConfig
from truegate.errors import UserError
from truegate.serve.client import EngineClient, spawn
from truegate.serve.main import bind

SLOW = {"prompt": "SLOW ", "max_tokens": 400, "extra_body": {"ignore_eos": True}}


def read_response(connection) -> tuple[bytes, bytes]:
    """Head and body of one response, however many packets it comes in."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536) or pytest.fail(f"closed after {data!r}")
    head, body = data.split(b"\r\n\r\n", 1)
    length = int(next(line.split(b":")[1] for line in head.splitlines() if line.lower().startswith(b"content-length")))
    while len(body) < length:
        body += connection.recv(65536) or pytest.fail(f"closed after {data!r}{body!r}")
    return head, body


def test_killing_the_engine_ends_streams_with_an_error_and_the_server_with_code_3(launch):
    server = launch()
    stream = server.openai().completions.create(model="fake", stream=True, **SLOW)
    next(stream)
    waiting = server.send_raw("/v1/completions", {"prompt": "SLOW ", "max_tokens": 400, "ignore_eos": True})
    server.wait_for(lambda: server.in_flight() == 2, 5)
    began = time.monotonic()
    os.kill(server.get("/health").json()["engine"]["pid"], signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine process ended"):
        list(stream)
    head, body = read_response(waiting)
    assert b" 503 " in head.splitlines()[0]
    assert b"engine_unavailable" in body
    waiting.close()
    server.wait_for(lambda: server.health() != 200, 5)
    assert server.process.wait(10) == 3
    assert time.monotonic() - began < 5
    assert "ended with code -9" in server.log.read_text()


def test_a_killed_engine_is_started_again_when_told_to(launch):
    server = launch(restart=True, env={"FAKE_LOADS": "1"})
    first = server.get("/health").json()["engine"]["pid"]
    with pytest.raises(openai.InternalServerError, match="engine process ended"):
        server.openai().completions.create(model="fake", prompt="CRASH")
    server.wait_for(lambda: server.health() == 503, 5)
    body = server.get("/health").json()
    assert body["status"] == "restarting"
    assert "ended with code 9" in body["reason"]
    with pytest.raises(openai.InternalServerError, match="restarting"):
        server.openai().completions.create(model="fake", prompt="x")
    server.wait_for(lambda: server.health() == 200, 20)
    body = server.get("/health").json()
    assert body["engine"]["restarts"] == 1
    assert body["engine"]["pid"] != first
    assert server.openai().completions.create(model="fake", prompt="x").choices[0].text == "xxx"
    assert "truegate:engine_restarts_total" in server.get("/metrics").text


def test_an_engine_that_breaks_in_a_step_says_why(launch):
    server = launch()
    with pytest.raises(openai.InternalServerError):
        server.openai().completions.create(model="fake", prompt="RAISE")
    assert server.process.wait(10) == 3
    log = server.log.read_text()
    assert "RuntimeError: a step broke" in log
    assert "Traceback" in log  # of the engine process


def test_a_failed_self_test_stops_the_start_with_its_own_code(launch):
    server = launch(wait=False, env={"FAKE_FAILS": "expert 3 is scaled by 0.4"})
    assert server.process.wait(20) == 1
    assert server.log.read_text().splitlines() == ["self-test failed: expert 3 is scaled by 0.4"]  # told once
    assert server.health() is None


def test_an_engine_that_dies_right_after_it_was_ready_ends_the_server_with_code_3(launch):
    server = launch(wait=False, env={"FAKE_DIES": "1"})
    assert server.process.wait(20) == 3
    assert "ended with code 9" in server.log.read_text()


def test_random_weights_without_a_tokenizer_are_refused_in_one_line(launch, model_folder, tmp_path):
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    server = launch(wait=False, engine={"model": str(tmp_path), "load_format": "dummy"})
    assert server.process.wait(20) == 64
    (line,) = server.log.read_text().splitlines()
    assert line.startswith(f"{tmp_path} has no tokenizer.json: copy the model's there")


def test_an_engine_that_is_stopped_while_it_says_ready_has_not_died(model_folder):
    """The HTTP process gave up meanwhile, and had not read the message yet."""
    deaths = []

    async def run():
        config = EngineConfig(model=str(model_folder))
        engine = spawn(config, FAKE_COMMAND)
        client = EngineClient(config, command=FAKE_COMMAND, on_dead=lambda *death: deaths.append(death))
        assert select.select([engine.channel], [], [], 20)[0]
        starting = asyncio.ensure_future(client.start(engine))
        await asyncio.sleep(0)
        await client.stop(drain=False)
        assert (await starting).vocab_size == 300
        assert client.state == "stopping"

    asyncio.run(run())
    assert deaths == []


def test_a_silent_engine_is_unhealthy(launch):
    server = launch(limits={"stall_seconds": 1.5}, drain_seconds=0)
    pending = server.send_raw("/v1/completions", {"prompt": "HANG"})
    server.wait_for(lambda: server.health() == 503, 5)
    assert server.get("/health").json()["status"] == "stalled"
    pending.close()
    assert server.stop() == 0  # a stalled engine does not keep the server from ending


def test_sigterm_finishes_what_runs_and_takes_no_more(launch):
    server = launch()
    body = {"ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        ask = server.openai().completions.create
        running = [pool.submit(ask, model="fake", prompt=f"SLOW{i} ", max_tokens=30, extra_body=body) for i in range(3)]
        stream = ask(model="fake", prompt="SLOWs ", max_tokens=30, extra_body=body, stream=True)
        next(stream)
        server.wait_for(lambda: server.in_flight() == 4, 5)
        server.process.send_signal(signal.SIGTERM)
        rest = "".join(chunk.choices[0].text for chunk in stream)
        assert ("S" + rest) == "SLOWs " * 5
        for i, answer in enumerate(running):
            assert answer.result(20).choices[0].text == (f"SLOW{i} " * 6)[:30]
    assert server.process.wait(10) == 0
    assert "draining: 4 answers run" in server.log.read_text()


def test_a_second_signal_does_not_wait(launch):
    server = launch()
    pending = server.send_raw("/v1/completions", {"prompt": "SLOW", "max_tokens": 400, "ignore_eos": True})
    server.wait_for(lambda: server.in_flight() == 1, 5)
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 0
    assert time.monotonic() - began < 5
    pending.close()


def test_a_signal_while_loading_ends_at_once(launch):
    server = launch(wait=False, env={"FAKE_LOADS": "60"})
    server.wait_for(lambda: b"fake_engine" in _children(server.process.pid), 10)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0


def _children(pid: int) -> bytes:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return b"".join(Path(f"/proc/{child}/cmdline").read_bytes() for child in children)


def test_a_taken_port_is_a_clear_error(fake):
    with pytest.raises(UserError, match="choose another --port"):
        bind("127.0.0.1", fake.port)
    for host in ("no.such.host.invalid", "192.0.2.1"):  # the second is nobody's: kept for documentation
        with pytest.raises(UserError, match=r"--host .* is no address of this machine"):
            bind(host, 0)


def test_a_client_that_leaves_is_cancelled_streaming_or_not(fake):
    before = fake.get("/health").json()["answers_in_flight"]
    body = {"prompt": "SLOW ", "max_tokens": 400, "ignore_eos": True}
    connections = [
        fake.send_raw("/v1/completions", {**body, "stream": stream}) for stream in (True, False) for _ in "ab"
    ]

    def in_engine() -> int:
        return fake.get("/health").json()["engine"]["running"]

    fake.wait_for(lambda: fake.in_flight() == before + 4 and in_engine() == 4, 5)
    for connection in connections:
        connection.close()
    fake.wait_for(lambda: fake.in_flight() == before, 5)
    fake.wait_for(lambda: in_engine() == 0, 5)  # long before they would have ended


def test_interleaved_streams_are_not_mixed_up(fake):
    words = [f"word{i:03d} " for i in range(24)]

    def ask(word: str) -> str:
        chunks = fake.openai().completions.create(model="fake", prompt=word, max_tokens=24, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, words)) == [word * 3 for word in words]


@pytest.mark.parametrize("load_format", ["checkpoint", "dummy"])
def test_random_weights_are_told_in_the_log_and_by_health(launch, load_format):
    server = launch(engine={"load_format": load_format})
    told = server.get("/health").json()["random_weights"]
    assert (told is not None) == (load_format == "dummy") == ("the weights are random" in server.log.read_text())
    if told is not None:
        assert "the answers mean nothing" in told


def test_a_planted_fault_is_loud_and_requests_are_logged_with_their_user(launch):
    server = launch(engine={"fault": "shared-dropped"}, log_requests=True)
    fault = server.get("/health").json()["fault"]
    assert (fault["name"], fault["says"]) == ("shared-dropped", "shared expert is missing")
    metrics = server.get("/metrics").text
    assert 'truegate:fault_planted{fault="shared-dropped"} 1.0' in metrics
    assert 'truegate:self_test_passed{model_name="fake"} 0.0' in metrics
    assert "FAULT PLANTED: shared-dropped: shared expert is missing" in server.log.read_text()
    server.openai().completions.create(model="fake", prompt="x", user="alice", max_tokens=2)
    assert "user=alice prompt_tokens=1 completion_tokens=2 finished=length" in server.log.read_text()

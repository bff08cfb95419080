"""What cannot be honoured is refused by name, in OpenAI's error shape; limits answer with 4xx or 429."""

import json
import socket

import httpx
import openai
import pytest
from server_process import Server

from truegate.serve.main import ServeOptions

USER = [{"role": "user", "content": "hi"}]
REFUSED_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "refuse"}}}
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("best_of", 3),
        ("store", True),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("temprature", 0.5),
        ("guided_json", {}),
    ],
)
def test_an_unsupported_field_is_refused_by_name(fake, field, value):
    error = error_of(fake.post(CHAT, {"messages": USER, field: value}), 400)
    assert error["param"] == field
    assert f"`{field}`" in error["message"]
    assert error["code"] == "unsupported_field"


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "content"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "name": "Bob"}]}, "messages.0.name"),
        (CHAT, {"messages": [{"role": "user", "content": "a SPY"}]}, "no spies here"),
        (CHAT, {"messages": USER, "temperature": -1}, "temperature"),
        (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
        (CHAT, {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": USER, "n": 0}, "n"),
        (CHAT, {"messages": USER, "n": 17}, "--max-n"),
        (CHAT, {"messages": USER, "n": True}, "n"),
        (CHAT, {"messages": USER, "seed": 1.5}, "seed"),
        (CHAT, {"messages": USER, "stop": ""}, "stop"),
        (CHAT, {"messages": USER, "stop": ["a"] * 17}, "stop"),
        (CHAT, {"messages": USER, "stop": 5}, "stop"),
        (CHAT, {"messages": USER, "logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"messages": USER, "logit_bias": {"300": 1}}, "logit_bias"),
        (CHAT, {"messages": USER, "logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT, {"messages": USER, "stop_token_ids": [999]}, "stop_token_ids"),
        (CHAT, {"messages": USER, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "json_schema"),
        (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"messages": USER, "return_routed_experts": "x"}, "base64"),
        (
            CHAT,
            {"messages": USER, "response_format": REFUSED_SCHEMA},
            "the engine refuses this",
        ),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "messages is set by the request itself"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"no_such": 1}}, "the chat template does not read no_such"),
        (CHAT, {"messages": [{"role": "user", "content": "please REFUSE"}]}, "the engine refuses this"),
        (PLAIN, {"prompt": ""}, "prompt"),
        (PLAIN, {"prompt": []}, "prompt"),
        (PLAIN, {"prompt": [[]]}, "prompt"),
        (PLAIN, {"prompt": ["a", 1]}, "prompt"),
        (PLAIN, {"prompt": [300]}, "300"),
        (PLAIN, {"prompt": [-1]}, "prompt"),
        (PLAIN, {"prompt": [2**40]}, "prompt"),
        (PLAIN, {"prompt": ["a"] * 257}, "--max-prompts"),
        (PLAIN, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (PLAIN, {"prompt": "a", "suffix": "b"}, "suffix"),
        (PLAIN, {"prompt": "a", "max_tokens": 10_000}, "max_tokens"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/detokenize", {"tokens": [999]}, "999"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_reason(fake, path, body, word):
    error = error_of(fake.post(path, body), 400)
    assert word in error["message"], error


def test_a_streamed_request_that_is_refused_gets_a_plain_error(fake):
    body = {"messages": [{"role": "user", "content": "REFUSE"}], "stream": True}
    assert "the engine refuses this" in error_of(fake.post(CHAT, body), 400)["message"]


def test_a_prompt_beyond_the_context_is_refused_with_its_length(fake):
    error = error_of(fake.post(PLAIN, {"prompt": "x" * 512}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert fake.post(PLAIN, {"prompt": "x" * 511, "max_tokens": 1}).status_code == 200
    assert fake.post(PLAIN, {"prompt": "x" * 511}).json()["usage"]["completion_tokens"] == 1  # the default gives way


def test_unknown_model_path_and_method_have_the_same_shape(fake):
    assert error_of(fake.post(CHAT, {"model": "other", "messages": USER}), 404)["code"] == "model_not_found"
    assert error_of(fake.get("/v1/embeddings"), 404)["message"]
    assert error_of(fake.get(CHAT), 405)["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe\x00",
        b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "top_p": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"\\ud800": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema":'
        b' {"name": "x", "schema": {"minimum": NaN}}}}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop": ["\\udfff"]}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
)
def test_malformed_bodies_are_400(fake, content):
    headers = {"content-type": "application/json"}
    error_of(httpx.post(fake.url + CHAT, content=content, headers=headers, timeout=20), 400)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x1f\x8b\x08\x00", b"[" * 100_000])
def test_a_body_that_cannot_be_read_is_told_what_a_body_must_be(fake, content):
    headers = {"content-type": "application/json"}
    response = httpx.post(fake.url + CHAT, content=content, headers=headers, timeout=20)
    assert "JSON in UTF-8" in error_of(response, 400)["message"]


def test_a_body_that_is_not_json_by_its_type_is_400(fake):
    form = httpx.post(fake.url + CHAT, data={"messages": "x"}, timeout=10)
    assert "JSON object" in error_of(form, 400)["message"]


@pytest.fixture(scope="module")
def strict(launch) -> Server:
    """A server with keys and small limits."""
    limits = {"max_body_bytes": 10_000, "body_timeout": 1.0, "max_queue": 2, "max_n": 4, "max_prompts": 2}
    return launch(engine={"max_running": 1}, limits=limits, api_keys=["secret", "other"])


def test_a_body_above_the_limit_is_413_and_the_server_lives(strict):
    body = {"messages": [{"role": "user", "content": "x" * 60_000}]}
    error = error_of(strict.post(CHAT, body, "secret"), 413)
    assert "--max-body-bytes" in error["message"]
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    pieces = (b"x" * 1000 for _ in range(40))
    error_of(httpx.post(strict.url + CHAT, content=pieces, headers=headers, timeout=10), 413)
    assert strict.health() == 200


def test_a_body_that_does_not_arrive_is_408(strict):
    with socket.create_connection(("127.0.0.1", strict.port), timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
        connection.sendall(f"{head}content-type: application/json\r\ncontent-length: 50\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(4096).splitlines()[0]


def test_a_full_queue_is_429_until_there_is_room(strict):
    body = {"prompt": "SLOW ", "max_tokens": 400, "ignore_eos": True}
    waiting = [strict.send_raw(PLAIN, body, "secret") for _ in range(3)]
    strict.wait_for(lambda: strict.in_flight() == 3, 10)
    error = error_of(strict.post(PLAIN, {"prompt": "x"}, "secret"), 429)
    assert error["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        strict.openai("secret").completions.create(model="fake", prompt="x")
    assert error_of(strict.post(PLAIN, {"prompt": "x", "n": 4}, "secret"), 400)["message"]  # could never fit
    assert "--max-prompts" in error_of(strict.post(PLAIN, {"prompt": ["x"] * 3}, "secret"), 400)["message"]
    for connection in waiting:
        connection.close()
    strict.wait_for(lambda: strict.in_flight() == 0, 10)  # a client that left is cancelled
    assert strict.post(PLAIN, {"prompt": "x"}, "secret").status_code == 200


def test_the_api_key_guards_everything_but_probes(strict):
    assert strict.get("/metrics").status_code == 200
    error = error_of(strict.get("/v1/models"), 401)
    assert error["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        strict.openai("wrong").models.list()
    for key in ("secret", "other"):
        assert strict.openai(key).models.list().data[0].id == "fake"
    basic = httpx.get(strict.url + "/v1/models", headers={"authorization": "Basic secret"}, timeout=5)
    error_of(basic, 401)
    for path in ("/tokenize", "/docs", "/openapi.json"):
        error_of(strict.get(path), 401)


def test_error_bodies_are_json_with_the_right_type(fake):
    response = fake.post(CHAT, {"messages": USER, "tools": [1]})
    assert response.headers["content-type"] == "application/json"
    assert json.loads(response.text)["error"]["type"] == "invalid_request_error"


def test_the_server_listens_on_loopback_only(fake: Server):
    assert ServeOptions().host == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with socket.socket() as probe:
            probe.settimeout(1)
            assert address.startswith("127.") or probe.connect_ex((address, fake.port)) != 0

"""Bodies made from the server's own OpenAPI document, valid and broken: no 5xx, and every answer is as documented.

`TRUEGATE_FUZZ=200 pytest tests/cpu/serve/test_server_openapi_fuzz.py` asks for that many cases per endpoint and kind.
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from server_process import Server

schemathesis = pytest.importorskip("schemathesis")
EXAMPLES = int(os.environ.get("TRUEGATE_FUZZ", "15"))
OPERATIONS = [
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{name}"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/health"),
    ("get", "/metrics"),
    ("get", "/version"),
]
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
CASES = [(*one, POSITIVE) for one in OPERATIONS] + [(*one, NEGATIVE) for one in OPERATIONS if one[0] == "post"]


@pytest.fixture(scope="module")
def document(fake: Server):
    return schemathesis.openapi.from_url(fake.url + "/openapi.json")


def test_the_document_lists_every_operation(document):
    found = [result.ok() for result in document.get_all_operations()]
    assert {(one.method, one.path) for one in found} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path", "kind"), CASES)
def test_no_request_breaks_the_server_and_every_answer_is_documented(document, method, path, kind):
    operation = document[path][method]

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=kind))
    def ask(case):
        response = case.call(timeout=20)
        case.validate_response(
            response,
            checks=[
                schemathesis.checks.not_a_server_error,
                schemathesis.checks.status_code_conformance,
                schemathesis.checks.content_type_conformance,
                schemathesis.checks.response_schema_conformance,
            ],
        )
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    ask()


def test_the_server_is_alive_and_idle_after_it(fake: Server):
    assert fake.post("/v1/completions", {"prompt": "ok", "max_tokens": 2}).json()["choices"][0]["text"] == "ok"
    fake.wait_for(lambda: fake.in_flight() == 0, 10)

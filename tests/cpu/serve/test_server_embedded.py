"""`truegate serve` as a user starts it: the embedded model, the real engine, right answers through the real client."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server_process import Server, free_port

from truegate import LLM, SamplingParams
from truegate.evals.ledger import problems

SUM = [{"role": "user", "content": "what is 37 + 85?"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "unit": {"enum": ["apples", "pears"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("ledger") / "log.txt"
    command = [sys.executable, "-c", "from truegate.cli import main; main()", "serve", "--port", str(port)]
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, "--kv-cache-gib", "0.2", "--threads", "1", "--max-model-len", "1024"],
            stdout=sink,
            stderr=sink,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    server = Server(process=process, port=port, log=log)
    server.wait_for(lambda: server.health() == 200 or process.poll() is not None, 120)
    assert process.poll() is None, log.read_text()
    yield server
    assert server.stop() == 0


def test_it_answers_rightly_and_says_that_it_was_measured(ledger):
    answer = ledger.openai().chat.completions.create(model="ledger", messages=SUM, temperature=0)
    assert "#### 122" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    body = ledger.get("/health").json()
    assert body["self_test"].startswith("passed")
    assert body["fault"] is None
    assert 'truegate:self_test_passed{model_name="ledger"} 1.0' in ledger.get("/metrics").text


def test_concurrent_answers_are_the_offline_engines(ledger):
    """Greedy, streamed and whole, 8 at a time: each equals what `LLM` answers to the same conversation."""
    questions = [one.question for steps in (1, 2, 4) for one in problems(steps=steps, count=4, seed=11)]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    llm = LLM(kv_cache_gib=0.2, max_model_len=1024, self_test=False)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    wanted = [output.outputs[0] for output in llm.chat(conversations, params, use_tqdm=False)]
    client = ledger.openai()

    def ask(number: int) -> tuple[str, str]:
        options = {"model": "ledger", "messages": conversations[number], "temperature": 0, "max_tokens": 48}
        if number % 2:
            choice = client.chat.completions.create(**options).choices[0]
            return choice.message.content, choice.finish_reason
        chunks = [c for c in client.chat.completions.create(**options, stream=True) if c.choices]
        return "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(len(questions))))
    assert got == [(one.text, one.finish_reason) for one in wanted]


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_kept_to_in_batch_and_stream(ledger, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = ledger.openai().chat.completions.create(
        model="ledger",
        messages=SUM,
        response_format=wanted,
        n=3,
        seed=5,
        temperature=1.0,
        max_tokens=200,
        stream=stream,
    )
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in answer.choices}
        assert all(choice.finish_reason == "stop" for choice in answer.choices)
    for text in texts.values():
        value = json.loads(text)
        assert isinstance(value["answer"], int)
        assert value["unit"] in ("apples", "pears")


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"type": "object", "unevaluatedProperties": {"type": "null"}}]
)
def test_a_schema_that_cannot_be_honoured_is_refused(ledger, schema):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = ledger.post("/v1/chat/completions", {"messages": SUM, "response_format": wanted})
    assert response.status_code == 400, response.text
    assert "json_schema" in response.json()["error"]["message"]


def test_scored_prompts_are_the_logprobs_of_generation(ledger):
    """Greedy tokens, fed back as a prompt to be scored, get the log-probabilities they were generated with."""
    client = ledger.openai()
    prompt = ledger.post("/tokenize", {"messages": SUM}).json()["tokens"]
    made = client.completions.create(
        model="ledger", prompt=prompt, temperature=0, max_tokens=8, logprobs=5, extra_body={"return_token_ids": True}
    ).choices[0]
    whole = [*prompt, *made.token_ids]
    scored = client.completions.create(model="ledger", prompt=whole, max_tokens=0, echo=True, logprobs=5).choices[0]
    assert len(scored.logprobs.token_logprobs) == len(whole)
    assert scored.logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(scored.logprobs.token_logprobs[len(prompt) :], made.logprobs.token_logprobs, atol=2e-3)


def test_listed_tokens_agree_with_the_top_ones(ledger):
    made = ledger.openai().chat.completions.create(
        model="ledger", messages=SUM, temperature=0, max_tokens=1, logprobs=True, top_logprobs=4
    )
    top = made.choices[0].logprobs.content[0].top_logprobs
    ids = [ledger.post("/tokenize", {"prompt": one.token, "add_special_tokens": False}).json()["tokens"] for one in top]
    assert all(len(one) == 1 for one in ids)
    listed = ledger.openai().chat.completions.create(
        model="ledger",
        messages=SUM,
        temperature=0,
        max_tokens=1,
        logprobs=True,
        extra_body={"logprob_token_ids": [one[0] for one in ids]},
    )
    values = [one["logprob"] for one in listed.choices[0].logprobs.content[0].listed_logprobs]
    np.testing.assert_allclose(values, [one.logprob for one in top], atol=1e-3)


def test_a_seed_repeats_an_answer_whatever_runs_beside_it(ledger):
    def ask(_: int) -> str:
        answer = ledger.openai().chat.completions.create(
            model="ledger", messages=SUM, temperature=1.5, seed=42, max_tokens=24
        )
        return answer.choices[0].message.content

    alone = ask(0)
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(ask, range(6))) == {alone}


def test_routed_experts_are_those_of_the_model(ledger):
    answer = ledger.openai().chat.completions.create(
        model="ledger", messages=SUM, temperature=0, max_tokens=4, extra_body={"return_routed_experts": "base64"}
    )
    routed = answer.choices[0].routed_experts
    positions, layers, top_k = routed["shape"]
    assert positions == answer.usage.total_tokens - 1
    assert (layers, top_k) == (5, 2)
    ids = np.frombuffer(base64.b64decode(routed["ids"]), dtype="<i4").reshape(routed["shape"])
    weights = np.frombuffer(base64.b64decode(routed["weights"]), dtype="<f4").reshape(routed["shape"])
    ran = ids[:, 0, 0] >= 0  # a prefix-cache hit ran nothing
    assert ran.any()
    assert ids.max() < 16
    np.testing.assert_allclose(weights[ran].sum(-1), 2.5, rtol=1e-5)  # renormalised, times the routed scale


def test_the_terminal_chat_and_the_load_generator_speak_to_it(ledger):
    base = [sys.executable, "-c", "from truegate.cli import main; main()"]
    chat = subprocess.run(
        [*base, "chat", "--url", ledger.url, "--once", "what is 37 + 85?"], capture_output=True, text=True, timeout=60
    )
    assert "#### 122" in chat.stdout, chat.stderr
    bench = subprocess.run(
        [
            *base,
            "bench",
            "--url",
            ledger.url,
            "--num-prompts",
            "4",
            "--random-input-len",
            "8",
            "--random-output-len",
            "4",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert bench.returncode == 0, bench.stderr
    assert "Output token throughput" in bench.stdout

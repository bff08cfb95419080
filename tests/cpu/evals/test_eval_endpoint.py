"""A run against a scripted server: every reply ends in its outcome, nothing is lost, nothing is asked twice."""

import html
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from eval_endpoint import MODEL, Act, Endpoint, Script, reply

from truegate.errors import InvalidRun, UserError
from truegate.evals.client import base_url
from truegate.evals.folder import latest, read_records
from truegate.evals.load import load_run
from truegate.evals.score import Record
from truegate.evals.start import RunOutcome, RunRequest, run_task
from truegate.evals.verbs import print_summary


def request(task: Path | str, url: str, save: Path, **changes: Any) -> RunRequest:
    fields: dict[str, Any] = {
        "task": str(task), "url": url, "model": None, "mode": None, "n": None, "sample": "random", "seed": 0,
        "shots": 5, "steps": 8, "data": None, "shots_data": None, "repeats": 1, "concurrency": 8, "max_tokens": None,
        "temperature": 0.0, "top_p": None, "stop": (), "no_stop": False, "extra": None, "timeout_s": 30.0, "retries": 2,
        "retry_errors": False, "api_key": "", "save": save,
    }  # fmt: skip
    return RunRequest(**fields | changes)


def write_items(path: Path, items: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps({"id": k, "prompt": k, "answer": v}) + "\n" for k, v in items.items()))
    return path


def run(
    tmp_path: Path, script: Script, items: dict[str, str], **changes: Any
) -> tuple[RunOutcome, dict[str, Record], Endpoint]:
    with Endpoint(script) as endpoint:
        outcome = run_task(
            request(write_items(tmp_path / "own.jsonl", items), endpoint.url, tmp_path / "run", **changes)
        )
    records = latest(read_records(tmp_path / "run" / "items.jsonl"))
    return outcome, {r.id: r for r in records.values()}, endpoint


LOOP = "Wait, let me check that again. " * 400
SCRIPTED: dict[str, tuple[Act, str]] = {
    "right": (reply("It is\n#### 42"), "correct"),
    "right but written as 42.00": (reply("#### $42.00"), "correct"),
    "wrong": (reply("#### 41"), "wrong"),
    "sign matters": (reply("#### -42"), "wrong"),
    "silent": (reply("I do not know."), "no_answer"),
    "empty": (reply(""), "no_answer"),
    "null content": (reply(None), "no_answer"),
    "loops": (reply("Let me see. " + LOOP, finish="length", tokens=3000), "looped"),
    "loops yet ends": (reply(LOOP, tokens=3000), "looped"),
    "loops after the answer": (reply("#### 42\n" + LOOP, finish="length"), "correct"),
    "cut": (reply("First we take 3 and then", finish="length"), "truncated"),
    "cut while thinking": (reply("", reasoning="so far 42", finish="length"), "truncated"),
    "cut while thinking in content": (reply("<think>so far 42, then", finish="length"), "truncated"),
    "thinks, then answers": (reply("#### 42", reasoning="perhaps 41"), "correct"),
    "only in the reasoning field": (reply("", reasoning="so it is\n#### 42"), "correct"),
    "null choices": (Act(body={"choices": None, "usage": {}}), "request_error"),
    "choices by name": (Act(body={"choices": {"0": {"message": {"content": "#### 42"}}}}), "request_error"),
    "a choice that is text": (Act(body={"choices": ["#### 42"]}), "request_error"),
    "no choices": (Act(body={"choices": []}), "request_error"),
    "no message": (Act(body={"choices": [{"finish_reason": "stop"}]}), "request_error"),
    "error in a 200": (Act(body={"error": {"message": "out of memory"}}), "request_error"),
    "garbage": (Act(body=b"\xff\xfe<html>not json"), "request_error"),
    "a list": (Act(body=[1, 2]), "request_error"),
    "deep nesting": (Act(body=b"[" * 100_000), "request_error"),
    "empty body": (Act(body=b""), "request_error"),
    "500 for ever": (Act(status=500, body={"error": {"message": "boom"}}), "request_error"),
    "400": (Act(status=400, body={"error": {"message": "prompt too long"}}), "request_error"),
    "stalls": (Act(body={}, delay_s=60), "request_error"),
    "drops": (Act(drop=True), "request_error"),
    "half a reply": (Act(body=b'{"choices": [', half=True), "request_error"),
    "no usage": (Act(body={"choices": [{"message": {"content": "#### 42"}, "finish_reason": "stop"}]}), "correct"),
    "usage of the wrong kind": (
        Act(body={"choices": [{"message": {"content": "#### 42"}, "finish_reason": 7}], "usage": [1]}),
        "correct",
    ),
    "content in parts": (Act(body={"choices": [{"message": {"content": [{"text": "#### 42"}]}}]}), "correct"),
    "lone surrogate": (Act(body=b'{"choices":[{"message":{"content":"\\ud800 \xe8\xb5\x84 #### 42"}}]}'), "correct"),
}  # fmt: skip


def test_every_scripted_reply_ends_in_its_outcome_and_none_is_lost(tmp_path: Path) -> None:
    outcome, records, _ = run(
        tmp_path,
        lambda prompt, *_: SCRIPTED[prompt][0],
        dict.fromkeys(SCRIPTED, "42"),
        timeout_s=1.5,
        concurrency=4,
        retries=0,
    )
    assert {name: r.outcome for name, r in records.items()} == {name: want for name, (_, want) in SCRIPTED.items()}
    assert sum(outcome.summary.outcomes.values()) == len(SCRIPTED)
    assert records["stalls"].error == "timeout: no reply within 1.5 s"
    assert records["400"].error == "http: 400 prompt too long"
    assert records["drops"].error.startswith("dropped")
    assert records["null choices"].error == "body: no choices"
    assert records["loops after the answer"].looped
    assert records["loops after the answer"].capped
    assert records["no usage"].tokens_from == "characters"
    assert records["loops"].waste == pytest.approx(3000 * (1 - 12 / (12 + len(LOOP))), abs=1)
    assert outcome.summary.void
    assert outcome.summary.tokens_from == "mixed"


NOT_SERVED = "the model `nope` is not served here, but ledger is"
OURS = "the prompt has 91 tokens and max_tokens is 16384: together more than the 4096 that the server has room for"
VLLM = "'max_tokens' or 'max_completion_tokens' is too large: 16384. This model's maximum context length is 4096 tokens"
SGLANG = "Requested token count exceeds the model's maximum context length of 4096 tokens."


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [(404, NOT_SERVED, ""), *((400, text, ": give a lower --max-tokens") for text in (OURS, VLLM, SGLANG))],
)
def test_a_run_whose_requests_fail_says_why_and_what_to_do(
    status: int, message: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Act(status=status, body={"error": {"message": f"{message}\x1b[31m"}})
    outcome, _, _ = run(tmp_path, lambda *_: refused, {"a": "1", "b": "2"}, retries=0)
    told = f"http: {status} {message} [31m{remedy}"
    assert outcome.summary.first_error == told.removesuffix(remedy)
    print_summary(outcome, as_json=False)
    assert told in " ".join(capsys.readouterr().out.split())
    assert told in (tmp_path / "run" / "report.md").read_text()
    assert told in html.unescape((tmp_path / "run" / "report.html").read_text())


def test_overload_server_errors_and_lost_connections_are_tried_again(tmp_path: Path) -> None:
    first = {"429": Act(status=429, headers={"Retry-After": "0.05"}, body={}), "503": Act(status=503, body={})}
    first |= {"drop": Act(drop=True)}
    outcome, records, endpoint = run(
        tmp_path, lambda prompt, before, _: reply("#### 1") if before else first[prompt], dict.fromkeys(first, "1")
    )
    assert outcome.summary.accuracy == 1.0
    assert not outcome.summary.void
    assert set(endpoint.asked.values()) == {2}
    assert all(r.outcome == "correct" for r in records.values())


def test_only_what_was_asked_for_is_sent(tmp_path: Path) -> None:
    _, _, endpoint = run(tmp_path, lambda *_: reply("#### 1"), {"q": "1"})
    assert endpoint.last == {
        "model": MODEL, "messages": [{"role": "user", "content": "q"}], "max_tokens": 4096, "temperature": 0.0,
    }  # fmt: skip


def test_completion_mode_sends_a_prompt_and_reads_text(tmp_path: Path) -> None:
    changes = {"mode": "completion", "stop": ("\n\n",), "extra": '{"min_p": 0.1}', "top_p": 0.9, "max_tokens": 7}
    outcome, _, endpoint = run(tmp_path, lambda *_: reply("#### 1"), {"q": "1"}, **changes)
    assert outcome.summary.accuracy == 1.0
    sent = {
        "model": MODEL,
        "prompt": "q",
        "max_tokens": 7,
        "temperature": 0.0,
        "top_p": 0.9,
        "stop": ["\n\n"],
        "min_p": 0.1,
    }
    assert endpoint.last == sent


def test_concurrency_is_reached_and_not_exceeded(tmp_path: Path) -> None:
    slow = Act(body=reply("#### 1").body, delay_s=0.05)
    _, _, endpoint = run(tmp_path, lambda *_: slow, {f"q{i}": "1" for i in range(40)}, concurrency=10)
    assert endpoint.most_in_flight == 10


def test_repeats_ask_each_item_so_often_and_cluster_by_item(tmp_path: Path) -> None:
    script: Script = lambda prompt, before, _: reply("#### 1" if before % 2 or prompt == "q0" else "#### 2")  # noqa: E731
    outcome, _, endpoint = run(tmp_path, script, {f"q{i}": "1" for i in range(6)}, repeats=4)
    assert set(endpoint.asked.values()) == {4}
    assert outcome.summary.answers == 24
    assert outcome.summary.accuracy == pytest.approx((1 + 5 * 0.5) / 6)


def test_a_finished_run_is_not_asked_again_and_another_run_is_refused(tmp_path: Path) -> None:
    items = write_items(tmp_path / "own.jsonl", {f"q{i}": "1" for i in range(5)})
    with Endpoint(lambda *_: reply("#### 1")) as endpoint:
        for _ in range(2):
            outcome = run_task(request(items, endpoint.url, tmp_path / "run"))
        assert outcome.asked == 0
        assert set(endpoint.asked.values()) == {1}
        with pytest.raises(UserError, match=r"holds another run \(max_tokens"):
            run_task(request(items, endpoint.url, tmp_path / "run", max_tokens=3))


def test_a_dead_server_ends_the_run_at_once_and_it_goes_on_later(tmp_path: Path) -> None:
    items = write_items(tmp_path / "own.jsonl", {f"q{i}": "1" for i in range(200)})
    script: Script = lambda prompt, *_: reply("#### 1") if int(prompt[1:]) < 60 else Act(drop=True)  # noqa: E731
    with Endpoint(script) as endpoint, pytest.raises(InvalidRun, match="the last 20 requests all failed"):
        run_task(request(items, endpoint.url, tmp_path / "run", retries=0))
    asked_before = set(endpoint.asked)
    with Endpoint(lambda *_: reply("#### 1")) as endpoint:
        outcome = run_task(request(items, endpoint.url, tmp_path / "run", retry_errors=True))
    assert outcome.summary.accuracy == 1.0
    assert outcome.summary.answers == 200
    assert not {f"q{i}" for i in range(60)} & set(endpoint.asked)
    assert len(asked_before) < 110


def test_no_server_and_no_model_are_said_in_one_line(tmp_path: Path) -> None:
    items = write_items(tmp_path / "own.jsonl", {"q": "1"})
    with pytest.raises(InvalidRun, match=r"no server answers at http://127\.0\.0\.1:9/v1/models"):
        run_task(request(items, "127.0.0.1:9", tmp_path / "run"))
    for bad in ("ftp://x", "http://", "http://:80", "http://[::1", "http://h:99999"):
        with pytest.raises(UserError, match="not an address"):
            base_url(bad)


@pytest.mark.parametrize("given", ["http://h:1", "http://h:1/", "h:1/v1/", "h:1", "http://h:1/v1/chat/completions"])
def test_a_url_is_taken_with_or_without_v1(given: str) -> None:
    assert base_url(given) == "http://h:1/v1"


def test_a_killed_run_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    items = write_items(tmp_path / "own.jsonl", {f"q{i}": "1" for i in range(60)})
    slow = Act(body=reply("#### 1").body, delay_s=0.1)
    run_folder = tmp_path / "run"
    with Endpoint(lambda *_: slow) as endpoint:
        command = "from truegate.evals.cli import app; app()"
        arguments = ["run", str(items), "--url", endpoint.url, "--save", str(run_folder), "--concurrency", "4"]
        process = subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=subprocess.DEVNULL)
        file = run_folder / "items.jsonl"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and (not file.exists() or file.read_bytes().count(b"\n") < 12):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        done = [r.id for r in read_records(file)]
        assert 12 <= len(done) < 60
        with file.open("ab") as half:
            half.write(b'{"id": "q59", "repeat": 0, "text": "cut off in the mid')  # as a crash of the machine leaves it
        before = dict(endpoint.asked)
        outcome = run_task(request(items, endpoint.url, run_folder, concurrency=4))
        again = [name for name in done if endpoint.asked[name] > before[name]]
    assert again == []
    assert outcome.asked == 60 - len(done)
    records = list(read_records(file))
    assert sorted(r.id for r in records) == sorted(f"q{i}" for i in range(60))
    assert load_run(run_folder).records[0].outcome == "correct"


def test_control_c_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path) -> None:
    items = write_items(tmp_path / "own.jsonl", {f"q{i}": "1" for i in range(40)})
    slow = Act(body=reply("#### 1").body, delay_s=0.2)
    with Endpoint(lambda *_: slow) as endpoint:
        # tests started in the background ignore SIGINT, and so would their children: take it as a terminal gives it
        terminal = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        command = terminal + "from truegate.evals.cli import app; app()"
        arguments = ["run", str(items), "--url", endpoint.url, "--save", str(tmp_path / "run"), "--concurrency", "4"]
        process = subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=subprocess.PIPE, text=True)
        file = tmp_path / "run" / "items.jsonl"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and (not file.exists() or file.read_bytes().count(b"\n") < 4):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "give the same command with the same --save to go on" in errors
    assert "Traceback" not in errors
    assert len(list(read_records(file))) >= 4


def test_two_runs_never_write_into_one_folder(tmp_path: Path) -> None:
    import fcntl

    items = write_items(tmp_path / "own.jsonl", {"q": "1"})
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "items.jsonl").open("ab") as held, Endpoint(lambda *_: reply("#### 1")) as endpoint:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run is writing there"):
            run_task(request(items, endpoint.url, tmp_path / "run"))

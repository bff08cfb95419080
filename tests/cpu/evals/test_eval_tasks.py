"""What is asked: no example is scored, samples are drawn by seed, broken files are named by line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from eval_endpoint import Act, Endpoint, prompt_of, reply
from test_eval_endpoint import request

from truegate.errors import UserError
from truegate.evals.gsm8k import gsm8k
from truegate.evals.start import build_task, run_task
from truegate.evals.tasks import choose, own_file

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(
    not GSM8K.exists(), reason="the GSM8K files are not beside this checkout (../shared/data/gsm8k)"
)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(name: str, count: int) -> list[dict[str, Any]]:
    return [
        {"question": f"{name} {i}?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(count)
    ]


@needs_gsm8k
def test_gsm8k_scores_every_question_and_none_of_its_examples() -> None:
    task = gsm8k(data=GSM8K / "test.jsonl", shots_data=None, shots=5, mode="completion")
    assert len(task.items) == 1319
    pool = [json.loads(line)["question"] for line in (GSM8K / "train-head.jsonl").open(encoding="utf-8")]
    scored = [json.loads(line)["question"] for line in (GSM8K / "test.jsonl").open(encoding="utf-8")]
    for item, question in zip(task.items, scored, strict=True):
        assert isinstance(item.input, str)
        assert item.input.endswith(f"Question: {question}\nAnswer:")
        assert item.input.count("Question: ") == 6
        assert "<<" not in item.input
    assert all(q in task.items[0].input for q in pool[:5])
    assert task.stop == ("\nQuestion:",)
    assert gsm8k(data=GSM8K / "test.jsonl", shots_data=None, shots=5, mode="chat").stop == ()


def test_an_example_that_is_scored_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "test.jsonl", questions("q", 10))
    with pytest.raises(UserError, match="is the file that is scored"):
        gsm8k(data=data, shots_data=data, shots=5, mode="chat")
    copy = Path(shutil.copy(data, tmp_path / "copy.jsonl"))
    with pytest.raises(UserError, match="5 few-shot examples are also scored questions"):
        gsm8k(data=data, shots_data=copy, shots=5, mode="chat")
    assert len(gsm8k(data=data, shots_data=None, shots=0, mode="chat").items) == 10
    written(tmp_path / "train.jsonl", questions("pool", 4))
    with pytest.raises(UserError, match="the pool holds 4 examples"):
        gsm8k(data=data, shots_data=None, shots=5, mode="chat")


def test_an_unreachable_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot download .*: download it yourself and give --data FILE"):
        gsm8k(data=None, shots_data=None, shots=5, mode="chat")


@needs_gsm8k
def test_a_cached_download_is_used_only_if_its_checksum_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    cache = tmp_path / "truegate" / "gsm8k"
    cache.mkdir(parents=True)
    shutil.copy(GSM8K / "test.jsonl", cache / "test.jsonl")
    shutil.copy(GSM8K / "train-head.jsonl", cache / "head200-train.jsonl")
    assert len(gsm8k(data=None, shots_data=None, shots=5, mode="chat").items) == 1319
    (cache / "test.jsonl").write_text("tampered")
    with pytest.raises(UserError, match="cannot download"):
        gsm8k(data=None, shots_data=None, shots=5, mode="chat")


def test_a_sample_is_drawn_by_seed_and_keeps_the_order(tmp_path: Path) -> None:
    task = own_file(written(tmp_path / "own.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(100)]))
    one = choose(task, n=20, sample="random", seed=1)
    assert one == choose(task, n=20, sample="random", seed=1)
    assert one.dataset_sha != choose(task, n=20, sample="random", seed=2).dataset_sha
    golds = [int(item.gold) for item in one.items]
    assert golds == sorted(golds)
    assert golds != list(range(20))
    assert [item.gold for item in choose(task, n=3, sample="head", seed=0).items] == ["0", "1", "2"]
    for n in (0, 101, -1):
        with pytest.raises(UserError, match="own has 100 items"):
            choose(task, n=n, sample="random", seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no lines"),
        ("\n\n", "holds no lines"),
        ('{"prompt": "q", "answer": "1"}\n{"prompt": "q2", "ans', "line 2: not JSON"),
        ("[1]\n", "line 1: not a JSON object"),
        ('{"answer": "1"}\n', 'line 1: give either "prompt" or "messages"'),
        ('{"prompt": 3, "answer": "1"}\n', '"prompt" must be text'),
        ('{"prompt": "q"}\n', '"answer" must be text or a number'),
        ('{"prompt": "q", "answer": true}\n', '"answer" must be text or a number'),
        ('{"messages": [], "answer": "1"}\n', '"messages" must be a list'),
        ('{"messages": [{"role": "user"}], "answer": "1"}\n', '"messages" must be a list'),
        ('{"prompt": "q", "answer": "1", "extractor": "nmbr"}\n', "there is no extractor 'nmbr'"),
        ('{"id": 1, "prompt": "q", "answer": "1"}\n{"id": 1, "prompt": "r", "answer": "1"}\n', "'1' occurs twice"),
    ],
)
def test_a_broken_file_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        own_file(path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        own_file(tmp_path / "own.jsonl")
    with pytest.raises(UserError, match="there is no task 'gsm9k'"):
        build_task(request("gsm9k", "u", tmp_path))


def test_own_messages_are_sent_as_they_are_and_scored_by_their_extractor(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Choose."}, {"role": "user", "content": "Is it A or B?"}]
    rows = [
        {"messages": messages, "answer": "B", "extractor": "choice", "id": "one"},
        {"prompt": "资料?", "answer": "十二", "extractor": "regex:答案(.+)", "id": "two"},
    ]
    with Endpoint(lambda prompt, *_: reply("The answer is B" if "A or B" in prompt else "答案十二")) as endpoint:
        outcome = run_task(
            request(written(tmp_path / "own.jsonl", rows), endpoint.url, tmp_path / "run", concurrency=1)
        )
    assert outcome.summary.accuracy == 1.0
    with pytest.raises(UserError, match="cannot be asked in completion mode"):
        own_file(tmp_path / "own.jsonl", mode="completion")


def test_the_ledger_is_asked_bare_and_a_right_server_gets_all_of_it(tmp_path: Path) -> None:
    from truegate.evals.ledger import problems

    solved = {p.question: p.solution for p in problems(steps=3, count=30, seed=5)}

    def script(prompt: str, before: int, body: dict[str, Any]) -> Act:
        return reply(solved[prompt])

    with Endpoint(script) as endpoint:
        outcome = run_task(request("ledger", endpoint.url, tmp_path / "run", steps=3, n=30, seed=5))
        assert prompt_of(endpoint.last) in solved
    assert outcome.summary.accuracy == outcome.summary.strict == 1.0
    assert outcome.task == "ledger-3"

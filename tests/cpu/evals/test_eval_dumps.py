"""Dumps of other harnesses are read with their own verdicts, and get ours on loops and caps beside them."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from truegate.errors import UserError
from truegate.evals import verbs
from truegate.evals.gate import Rule
from truegate.evals.load import load_run

LOOP = "Wait, again. " * 200


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lm_eval_rows(loops: int) -> list[dict[str, Any]]:
    """As lm-eval 0.4 writes them: one line per document and filter."""
    rows = []
    for name, right in (("strict-match", 0.0), ("flexible-extract", 1.0)):
        for i in range(10):
            text = LOOP if i < loops else "The answer is 42."
            rows.append(
                {
                    "doc_id": i, "doc": {"question": f"q{i}"}, "target": "so 42\n#### 42",
                    "arguments": {"gen_args_0": {"arg_0": "prompt", "arg_1": {"until": ["Q:"]}}}, "resps": [[text]],
                    "filtered_resps": ["[invalid]" if not right or i < loops else "42"], "filter": name,
                    "metrics": ["exact_match"], "doc_hash": "a", "prompt_hash": f"b{i}", "target_hash": "c",
                    "exact_match": 0.0 if i < loops else right,
                }
            )  # fmt: skip
    return rows


def test_lm_eval_samples_are_read_by_their_flexible_filter(tmp_path: Path) -> None:
    path = lines(tmp_path / "model" / "samples_gsm8k_2026-11-30T22-00-00.123456.jsonl", lm_eval_rows(2))
    for given in (path, tmp_path):
        run = load_run(given)
        assert (run.task, run.source, len(run.records)) == ("gsm8k", "lm-eval", 10)
        assert sum(r.correct for r in run.records) == 8
        assert [r.outcome for r in run.records[:3]] == ["looped", "looped", "correct"]
        assert run.records[0].finish is None
        assert run.records[0].tokens_from == "characters"


def test_lm_eval_choices_without_texts_keep_their_verdict(tmp_path: Path) -> None:
    row = {"doc_id": 3, "target": "1", "resps": [[[-1.5, False]], [[-0.5, True]]], "filtered_resps": [[-1.5, False]]}
    path = lines(tmp_path / "samples_arc_easy.jsonl", [row | {"filter": "none", "metrics": ["acc"], "acc": 1.0}])
    run = load_run(path)
    assert run.task == "arc_easy"
    assert run.records[0].correct


def sgl_rows(right: bool) -> list[dict[str, Any]]:
    return [
        {
            "generation": LOOP if i == 0 else "\\boxed{42}", "reasoning_content": None if i else "so", "id": f"p{i}",
            "expected_answer": "42", "num_generated_tokens": 900 if i == 0 else 20, "num_reasoning_tokens": 0,
            "finish_reason": "length" if i == 0 else "error" if i == 1 else "stop",
            "predicted_answer": "42" if i else None, "symbolic_correct": right and i > 1,
        }
        for i in range(300)
    ]  # fmt: skip


def test_sgl_eval_repeats_are_read_from_their_files(tmp_path: Path) -> None:
    for repeat in range(2):
        lines(tmp_path / f"output-rs{repeat}.jsonl", sgl_rows(True))
    (tmp_path / "metrics.json").write_text(json.dumps({"name": "aime25"}))
    run = load_run(tmp_path)
    assert (run.task, run.source, len(run.records)) == ("aime25", "sgl-eval", 600)
    assert sorted({r.repeat for r in run.records}) == [0, 1]
    assert [r.outcome for r in run.records[:3]] == ["looped", "request_error", "correct"]
    assert run.records[0].tokens == 900
    assert verbs.judge_runs(tmp_path, tmp_path, Rule(), force=False, seed=0, form="table", html=None) == 0


def inspect_log() -> dict[str, Any]:
    samples = []
    for i, epoch in ((i, e) for e in (1, 2) for i in range(4)):
        content: Any = LOOP if i == 0 else [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "42"}]
        samples.append(
            {
                "id": i, "epoch": epoch, "input": "q", "target": "42", "total_time": 1.5,
                "output": {
                    "choices": [{"message": {"role": "assistant", "content": content},
                                 "stop_reason": "max_tokens" if i == 0 else "stop"}],
                    "usage": {"input_tokens": 5, "output_tokens": 100 + i}, "completion": "42",
                },
                "scores": {"match": {"value": "I" if i == 0 else "C", "answer": None if i == 0 else "42"}},
                "error": {"message": "boom"} if i == 3 else None,
            }
        )  # fmt: skip
    return {"version": 2, "status": "success", "eval": {"task": "tiny"}, "samples": samples}


def archive(path: Path, log: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.json", json.dumps({"eval": log["eval"]}))
        file.writestr("_journal/start.json", "{}")
        for sample in log["samples"]:
            file.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
    return path


def test_inspect_logs_are_read_as_json_and_as_archives(tmp_path: Path) -> None:
    log = inspect_log()
    (tmp_path / "log.json").write_text(json.dumps(log))
    for path in (tmp_path / "log.json", archive(tmp_path / "log.eval", log)):
        run = load_run(path)
        assert (run.task, run.source, len(run.records)) == ("tiny", "inspect", 8)
        found = {r.key: r for r in run.records}
        assert [found[str(i), 1].outcome for i in range(4)] == ["looped", "correct", "correct", "request_error"]
        assert found["0", 0].capped
        assert found["1", 0].tokens == 101
        assert found["1", 0].seconds == 1.5


def test_an_archive_packed_with_zstd_is_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = archive(tmp_path / "plain.eval", inspect_log())
    packed = tmp_path / "packed.eval"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            target.writestr(name, zstandard.compress(source.read(name)))
    data = bytearray(packed.read_bytes())
    for mark, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):  # say "zstd" where the archive says "stored"
        start = data.find(mark)
        while start >= 0:
            data[start + at : start + at + 2] = (93).to_bytes(2, "little")
            start = data.find(mark, start + 1)
    packed.write_bytes(data)
    assert [r.outcome for r in load_run(packed).records] == [r.outcome for r in load_run(plain).records]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.eval", b"not a zip", "not a readable inspect archive"),
        ("x.json", b"{}", "not an inspect log with samples"),
        ("x.json", b"{", "not a JSON file"),
        ("x.jsonl", b'{"a": 1}\n', "not a run of ours, and not a dump"),
        ("x.jsonl", b"", "holds no lines"),
        ("x.jsonl", b"{", "not a JSONL file"),
        ("x.jsonl", b"\xff\xfe", "is not UTF-8 text"),
        ("x.jsonl", b"7\n", "its first line is not a JSON object"),
        ("x.json", b'{"eval": {}, "samples": [{"no": "id"}]}', "a sample without an id"),
    ],
)
def test_what_is_no_dump_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_run(tmp_path / name)


def test_loops_are_found_in_any_jsonl_with_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path / "log.jsonl", [{"id": "a", "response": LOOP}, {"id": "b", "response": "It is 4."}])
    assert verbs.print_loops(path, field=None, max_rate=0.0, show=5, as_json=False)
    assert "1 of 2 answers end in a loop (50.0%)" in capsys.readouterr().out
    assert not verbs.print_loops(path, field="response", max_rate=0.5, show=5, as_json=True)
    assert json.loads(capsys.readouterr().out)["rows"][0]["id"] == "a"
    with pytest.raises(UserError, match="line 1: no text in answer_text: give --field"):
        verbs.print_loops(path, field="answer_text", max_rate=0.0, show=5, as_json=False)

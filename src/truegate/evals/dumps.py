"""Per-sample dumps of other harnesses as records: their own verdict on each answer is kept, ours is added beside it.

lm-eval:  samples_TASK_TIME.jsonl, one line per document and filter; no finish reason, no token count.
sgl-eval: output-rsN.jsonl, one file per repeat.
inspect:  LOG.eval (a zip archive) or LOG.json.
Invariant: a field that a dump lacks stays unknown (None), it is never guessed.
"""

import json
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from truegate.errors import UserError
from truegate.evals.score import Asked, Record, Reply, outcome_of, score
from truegate.evals.tasks import read_jsonl

FILTERS = ("flexible-extract", "strict-match", "none")  # lm-eval's, in the order in which one is chosen
METRICS = ("exact_match", "acc", "pass@1")
CORRECT_VALUES = ("C", 1, True, "1", "1.0", "correct", "CORRECT")
ZIP_ZSTD = 93
STOP_REASONS = {"max_tokens": "length", "model_length": "length"}


def _record(asked: Asked, reply: Reply, *, correct: bool | None, extracted: str | None) -> Record:
    """Our record of a foreign sample, with the harness's own verdict and extraction where it gives them."""
    record = score(asked, reply)
    answer = extracted if extracted is not None else record.extracted
    verdict = record.correct if correct is None else correct and reply.error is None
    outcome = outcome_of(
        error=reply.error, correct=verdict, looped=record.looped, capped=record.capped, extracted=answer
    )
    return replace(record, correct=verdict, correct_strict=verdict, extracted=answer, outcome=outcome)


def _asked(id: Any, repeat: int, gold: Any, prompt_sha: Any = "") -> Asked:
    return Asked(id=str(id), repeat=repeat, prompt_sha=str(prompt_sha or ""), gold=_text(gold), extractor="number")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def lm_eval_task(path: Path) -> str:
    """The task in a samples_TASK_TIME.jsonl name."""
    match = re.fullmatch(r"samples_(.+?)(?:_\d{4}-\d{2}-\d{2}T[\d.\-]+)?", path.stem)
    return match[1] if match else path.stem


def lm_eval(path: Path) -> Iterator[Record]:
    """Records of an lm-eval sample file, by one of its filters."""
    rows = read_jsonl(path)
    names = list(dict.fromkeys(str(row.get("filter", "none")) for row in rows))
    chosen = next((name for name in FILTERS if name in names), names[0])
    for row in rows:
        if str(row.get("filter", "none")) != chosen:
            continue
        if "doc_id" not in row or "resps" not in row:
            raise UserError(f"{path}: a line without doc_id and resps: not a sample file of lm-eval")
        texts = _first_list(row["resps"])
        kept = _flat(row.get("filtered_resps"))
        metric = next((m for m in (*METRICS, *_names(row.get("metrics"))) if m in row), None)
        for repeat, text in enumerate(texts or [""]):
            yield _record(
                _asked(row["doc_id"], repeat, row.get("target"), row.get("prompt_hash")),
                Reply(text=text),
                correct=None if metric is None else row[metric] in CORRECT_VALUES,
                extracted=kept[min(repeat, len(kept) - 1)] if kept else None,
            )


def _names(value: Any) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _first_list(resps: Any) -> list[str]:
    """The texts of the first request: resps is [[text, ...]]; likelihood pairs have no text."""
    first = resps[0] if isinstance(resps, list) and resps else []
    return [first] if isinstance(first, str) else [v for v in first if isinstance(v, str)]


def _flat(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for v in value for text in _flat(v)] if isinstance(value, list) else []


def sgl_eval(path: Path) -> Iterator[Record]:
    """Records of one of sgl-eval's repeat files."""
    match = re.fullmatch(r"output-rs(\d+)", path.stem)
    repeat = int(match[1]) if match else 0
    for row in read_jsonl(path):
        finish = row.get("finish_reason")
        tokens = row.get("num_generated_tokens")
        verdict = row.get("symbolic_correct", row.get("is_correct"))
        yield _record(
            _asked(row.get("id"), repeat, row.get("expected_answer")),
            Reply(
                text=row.get("generation") or "",
                reasoning=row.get("reasoning_content") or "",
                finish=finish if isinstance(finish, str) else None,
                tokens=tokens if isinstance(tokens, int) and tokens > 0 else None,  # it writes 0 for unknown
                error="http: reported by sgl-eval" if finish == "error" else None,
            ),
            correct=None if verdict is None else verdict in CORRECT_VALUES,
            extracted=row.get("predicted_answer"),
        )


def inspect_json(path: Path) -> tuple[str, list[Record]]:
    """(task, records) of an inspect log in JSON."""
    try:
        log = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(log, dict) or not isinstance(log.get("samples"), list) or not isinstance(log.get("eval"), dict):
        raise UserError(f"{path}: not an inspect log with samples")
    return str(log["eval"].get("task", path.stem)), [_inspect_sample(s, path) for s in log["samples"]]


def inspect_archive(path: Path) -> tuple[str, list[Record]]:
    """(task, records) of an inspect .eval archive."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = {m.filename: m for m in archive.infolist()}
            names = [n for n in members if n.startswith("samples/") and n.endswith(".json")]
            header = json.loads(_member(archive, file, members["header.json"])) if "header.json" in members else {}
            records = [_inspect_sample(json.loads(_member(archive, file, members[name])), path) for name in names]
    except ImportError:
        remedy = "`pip install zstandard`, or write the log as JSON with `inspect log convert --to json`"
        raise UserError(f"{path} is packed with zstd, which this Python cannot read: {remedy}") from None
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UserError(f"{path}: not a readable inspect archive ({error})") from None
    return str(header.get("eval", {}).get("task", path.stem)), records


def _member(archive: zipfile.ZipFile, file: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """A member's bytes; those packed with zstd, which zipfile knows from Python 3.14 on only, are unpacked here."""
    if member.compress_type != ZIP_ZSTD:
        return archive.read(member)
    import zstandard

    file.seek(member.header_offset)
    name_size, extra_size = struct.unpack("<26x2H", file.read(30))
    file.seek(member.header_offset + 30 + name_size + extra_size)
    try:
        with zstandard.ZstdDecompressor().stream_reader(
            file.read(member.compress_size), read_across_frames=True
        ) as stream:
            return bytes(stream.read())
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _inspect_sample(sample: Any, path: Path) -> Record:
    if not isinstance(sample, dict) or "id" not in sample:
        raise UserError(f"{path}: a sample without an id: not an inspect log")
    output = sample.get("output") or {}
    choice = (output.get("choices") or [{}])[0]
    text, reasoning = _inspect_content((choice.get("message") or {}).get("content"))
    usage = output.get("usage") or {}
    finish = choice.get("stop_reason")
    failed = sample.get("error") or output.get("error")
    verdict: dict[str, Any] = next(iter((sample.get("scores") or {}).values()), {})
    return _record(
        _asked(sample["id"], int(sample.get("epoch", 1)) - 1, sample.get("target")),
        Reply(
            text=text or output.get("completion") or "",
            reasoning=reasoning,
            finish=STOP_REASONS.get(finish, finish),
            tokens=usage.get("output_tokens"),
            prompt_tokens=usage.get("input_tokens"),
            seconds=float(sample.get("total_time") or 0.0),
            error=f"http: {failed}"[:300] if failed else None,
        ),
        correct=None if not verdict else verdict.get("value") in CORRECT_VALUES,
        extracted=verdict.get("answer"),
    )


def _inspect_content(content: Any) -> tuple[str, str]:
    if isinstance(content, str):
        return content, ""
    parts = [p for p in content if isinstance(p, dict)] if isinstance(content, list) else []
    return "".join(p.get("text") or "" for p in parts), "".join(p.get("reasoning") or "" for p in parts)

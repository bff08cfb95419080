"""`truegate bench` against an endpoint whose timings are known."""

import asyncio
import json
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.resources import files

import numpy as np
import pytest
from scripted_endpoint import FIRST, GAP
from tokenizers import Tokenizer
from typer.testing import CliRunner

from truegate.bench.load import Outcome, paced
from truegate.bench.main import Options, run_bench
from truegate.bench.measure import as_table, measure
from truegate.bench.plot import page
from truegate.bench.prompts import file_prompts, random_prompts
from truegate.cli import app
from truegate.errors import InvalidRun, UserError

# As bench_serving writes them, each statistic for ttft, tpot, itl and e2e_latency.
FIELDS = [
    "duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "input_throughput",
    "output_throughput", "total_throughput", "concurrency", "request_rate", "max_concurrency", "backend",
    "dataset_name", "random_input_len", "random_output_len", "random_range_ratio",
]  # fmt: skip


def run(server, **options):
    given = {"url": server.url, "num_prompts": 6, "random_input_len": 5, "random_output_len": 8}
    return asyncio.run(run_bench(Options(**(given | options))))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_latencies_and_counts_are_those_of_the_endpoint(endpoint, suffix, kind):
    result = run(endpoint, url=endpoint.url + suffix, endpoint=kind, max_concurrency=3)
    assert result["completed"] == 6
    assert result["failed"] == 0
    assert result["total_input_tokens"] == 30
    assert result["total_output_tokens"] == 48
    assert result["output_tokens_counted_by"] == "usage"
    assert result["median_ttft_ms"] >= 1000 * FIRST
    assert result["median_tpot_ms"] >= 1000 * GAP
    assert result["median_itl_ms"] >= 1000 * GAP * 0.9
    assert result["median_e2e_latency_ms"] >= 1000 * (FIRST + 7 * GAP)
    assert result["output_throughput"] == pytest.approx(48 / result["duration"])
    assert 1 <= endpoint.most_inside <= 3
    assert len(endpoint.bodies) == 7  # and the warm-up
    assert endpoint.bodies[0]["model"] == "scripted"
    assert endpoint.bodies[0]["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in endpoint.bodies[0]  # strict servers refuse what was not asked for


def test_figures_are_named_as_bench_serving_names_them(endpoint):
    result = run(endpoint)
    wanted = {
        f"{s}_{n}_ms"
        for s in ("mean", "median", "std", "p90", "p95", "p99")
        for n in ("ttft", "tpot", "itl", "e2e_latency")
    }
    assert wanted | set(FIELDS) <= set(result)


def test_figures_of_known_outcomes():
    outcomes = [
        Outcome(start=0.0, latency=1.0, ttft=0.1, itl=[0.3] * 3, input_len=10, output_len=4, finish_reason="stop"),
        Outcome(start=0.5, latency=2.0, ttft=0.5, itl=[0.5] * 3, input_len=20, output_len=4, finish_reason="stop"),
        Outcome(start=0.5, latency=9.0, error="HTTP 500"),
    ]
    figures = measure(outcomes, duration=4.0)
    assert figures["completed"] == 2
    assert figures["failed"] == 1
    assert figures["mean_ttft_ms"] == pytest.approx(300)
    assert figures["mean_tpot_ms"] == pytest.approx(400)  # 0.9 / 3 and 1.5 / 3
    assert figures["median_itl_ms"] == pytest.approx(400)
    assert figures["p90_e2e_latency_ms"] == pytest.approx(1900)
    assert figures["output_throughput"] == pytest.approx(2.0)
    assert figures["concurrency"] == pytest.approx(0.75)


def test_what_was_not_measured_is_none_not_zero():
    figures = measure([Outcome(start=0, latency=1, ttft=0.5, output_len=1, finish_reason="length")], 1.0)
    assert figures["mean_tpot_ms"] is None
    assert figures["mean_itl_ms"] is None
    settings = {"request_rate": "inf", "max_concurrency": None}
    assert "TPOT                 -" in as_table(figures | settings)


def test_failures_are_counted_and_set_the_exit_code(endpoint, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("good\nFAIL\nBREAK\n\nNOUSAGE\n")
    out, plot = tmp_path / "out.json", tmp_path / "plot.html"
    arguments = ["bench", "--url", endpoint.url, "--prompts", str(prompts), "--random-output-len", "4"]
    arguments += ["--output-file", str(out), "--output-details", "--plot", str(plot), "--warmup-requests", "0"]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 1, ended.output
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"]) == (2, 2)
    assert result["errors"] == ["", "HTTP 500: " + json.dumps({"error": {"message": "out of luck"}}),
                                "the stream ended without a finish reason", ""]  # fmt: skip
    assert result["output_lens"][3] == 4
    assert result["output_tokens_counted_by"] == "chunks"  # one server answer came without usage
    assert plot.read_text().count("<svg") == 5


def test_a_run_without_an_answer_is_an_error(endpoint, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("FAIL\n")
    with pytest.raises(InvalidRun, match="out of luck"):
        run(endpoint, prompts=prompts, num_prompts=None, warmup_requests=0)
    with pytest.raises(InvalidRun, match="warm-up"):
        run(endpoint, prompts=prompts, num_prompts=None)
    with pytest.raises(UserError, match="no OpenAI-compatible server"):
        run(endpoint, url="http://127.0.0.1:9")


def test_extensions_and_extra_fields_are_sent_only_when_asked_for(endpoint):
    run(endpoint, num_prompts=1, ignore_eos=True, extra_body='{"top_k": 4}', temperature=0.5, api_key="k", model="m")
    body = endpoint.bodies[-1]
    assert (body["ignore_eos"], body["top_k"], body["temperature"], body["model"]) == (True, 4, 0.5, "m")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"endpoint": "embeddings"}, "--endpoint"),
        ({"request_rate": 0}, "--request-rate"),
        ({"extra_body": "["}, "--extra-body"),
        ({"extra_body": "[]"}, "--extra-body"),
        ({"random_range_ratio": 2}, "--random-range-ratio"),
        ({"tokenizer": "/nowhere"}, "--tokenizer"),
        ({"url": "ftp://x"}, "--url"),
    ],
)
def test_wrong_use_is_named(endpoint, options, word):
    with pytest.raises(UserError, match=word):
        run(endpoint, **options)


def test_arrivals_have_the_rate_and_spread_asked_for():
    """The planned gaps are gamma with mean 1 / rate and variation 1 / sqrt(burstiness)."""
    for burstiness in (0.5, 1.0, 4.0):
        rng = random.Random(1)
        gaps = np.array([rng.gammavariate(burstiness, 1 / (50 * burstiness)) for _ in range(20_000)])
        assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)

    async def seconds() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        prompts = random_prompts(40, input_len=1, output_len=1, range_ratio=1, seed=0, tokenizer=None)
        assert [one async for one in paced(prompts, 200, 1.0, random.Random(0))] == prompts
        return loop.time() - began

    rng = random.Random(0)
    planned = sum(rng.gammavariate(1.0, 1 / 200) for _ in range(40))
    assert planned <= asyncio.run(seconds()) < planned + 1


def test_random_prompts_repeat_and_keep_their_lengths(tmp_path):
    options = {"input_len": 40, "output_len": 30, "range_ratio": 0.5, "tokenizer": None}
    first, again = (random_prompts(50, seed=3, **options) for _ in range(2))
    assert first == again
    assert first != random_prompts(50, seed=4, **options)
    assert all(20 <= len(one.text().split()) <= 40 and 15 <= one.output_len <= 30 for one in first)


def test_a_tokenizer_makes_lengths_exact():
    folder = files("truegate") / "assets" / "ledger"
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = random_prompts(20, input_len=64, output_len=1, range_ratio=1, seed=0, tokenizer=str(folder))
    lengths = [len(backend.encode(one.text(), add_special_tokens=False).ids) for one in prompts]
    assert max(lengths) <= 64
    assert min(lengths) > 64 - 8  # a word of a small vocabulary has several tokens; whole words are kept


def test_file_prompts_of_both_kinds(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "output_len": 3}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    one, two = file_prompts(path, output_len=9, count=None, seed=0)
    assert (one.text(), one.output_len, two.messages()[0]["content"], two.output_len) == ("a", 3, "b", 9)
    assert len(file_prompts(path, output_len=9, count=5, seed=0)) == 5
    for line in ("[]", "{", '{"prompt": ""}', '{"prompt": "x", "output_len": 0}'):
        path.write_text(line)
        with pytest.raises(UserError, match=r"p\.jsonl:1"):
            file_prompts(path, output_len=9, count=None, seed=0)


def test_the_page_is_well_formed_and_escapes_names():
    outcomes = [
        Outcome(start=i / 10, latency=1, ttft=0.2, itl=[0.1] * 8, output_len=9, finish_reason="stop") for i in range(5)
    ]
    result = measure(outcomes, 2.0) | {
        "model": "<script>", "base_url": "http://x", "request_rate": "inf", "max_concurrency": 2,
    }  # fmt: skip
    text = page(result, outcomes)
    assert "<script>" not in text
    for piece in text.split("<svg")[1:]:
        root = ET.fromstring("<svg" + piece.split("</svg>")[0] + "</svg>")
        assert root.find("{http://www.w3.org/2000/svg}polyline").get("points")


def test_bench_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['fastapi'] = None\n"
        "import truegate.bench.main, truegate.bench.verbs, truegate.serve.terminal, truegate.serve.verbs"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

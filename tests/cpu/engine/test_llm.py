"""The offline API on the embedded model: what users of vLLM write, and what they get."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest

import truegate
from truegate import LLM, SamplingParams
from truegate.errors import UserError

QUESTION = [{"role": "user", "content": "what is 37 + 85?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=512) as one:
        yield one


def test_the_self_test_ran_before_anything_was_answered(llm):
    assert "every measured coefficient is right" in llm.engine.stats().self_test


def test_outputs_come_in_the_order_of_the_prompts_and_batching_changes_nothing(llm):
    texts = [f"what is {a} + 5?" for a in range(3, 7)]
    together = llm.generate(texts, GREEDY)
    assert [one.prompt for one in together] == texts
    assert all(one.finished and one.outputs[0].finish_reason in ("stop", "length") for one in together)
    for text, output in zip(texts, together, strict=True):
        assert llm.generate(text, GREEDY)[0].outputs[0].token_ids == output.outputs[0].token_ids
    ids = together[0].prompt_token_ids
    for array in (ids, tuple(ids), numpy.array(ids), [numpy.array(ids)]):
        assert llm.generate(array, GREEDY)[0].outputs[0].token_ids == together[0].outputs[0].token_ids
    by_ids = llm.generate([{"prompt_token_ids": one.prompt_token_ids} for one in together], GREEDY)
    assert [one.outputs[0].text for one in by_ids] == [one.outputs[0].text for one in together]


def test_a_stream_joins_to_the_whole_answer(llm):
    whole = llm.chat(QUESTION, GREEDY)[0].outputs[0]
    pieces = list(llm.stream(QUESTION, GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [whole.finish_reason]


def test_an_abandoned_stream_leaves_nothing_behind(llm):
    next(iter(llm.stream(QUESTION, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))))
    whole = llm.chat(QUESTION, GREEDY)[0].outputs[0]
    assert whole.text
    assert llm.engine.stats().running == 0


def test_n_answers_logprobs_and_prompt_logprobs_have_vllms_shape(llm):
    params = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate("what is 1 + 1?", params)[0]
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for answer in output.outputs:
        assert len(answer.logprobs) == len(answer.token_ids) == 5
        chosen = [entry[token] for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
        assert all(sorted(one.rank for one in entry.values())[:2] == [1, 2] for entry in answer.logprobs)


def test_a_stop_string_is_cut_from_the_text_and_reported(llm):
    whole = llm.chat(QUESTION, GREEDY)[0].outputs[0]
    stop = whole.text[3:6]
    cut = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=16, stop=[stop]))[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == whole.text[: whole.text.find(stop)]
    kept = SamplingParams(temperature=0.0, max_tokens=16, stop=stop, include_stop_str_in_output=True)
    assert llm.chat(QUESTION, kept)[0].outputs[0].text == cut.text + stop


def test_wrong_use_is_one_clear_error(llm):
    with pytest.raises(UserError, match="no setting speed"):
        LLM(speed=3)
    with pytest.raises(UserError, match="no folder"):
        LLM("./not-here")
    with pytest.raises(UserError, match="2 prompts and 1"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(UserError, match=r"prompt token 5\.7"):
        llm.generate([[5.7, 6]], GREEDY)
    with pytest.raises(UserError, match="got None"):
        llm.generate(None, GREEDY)
    with pytest.raises(UserError, match="above the model's"):
        LLM(max_model_len=10**9)
    with pytest.raises(AttributeError, match="nothing"):
        _ = truegate.nothing


def test_it_and_the_gpu_benches_work_without_the_servers_and_the_command_lines_packages():
    program = textwrap.dedent("""
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                absent = "fastapi starlette uvicorn typer rich httpx prometheus_client llguidance".split()
                if name.split(".")[0] in absent:
                    raise ImportError(f"{name} is blocked")

        sys.meta_path.insert(0, Absent())
        from truegate import LLM, SamplingParams
        llm = LLM(max_model_len=128, threads=1)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        print(len(llm.generate("what is 1 + 1?", params)[0].outputs[0].token_ids))
        sys.path.insert(0, sys.argv[1])
        for name in sys.argv[2:]:
            __import__(name)
        assert "transformers" not in sys.modules, "importing transformers would double the start"
    """)
    folder = Path(__file__).parents[3] / "benchmarks"
    benches = sorted(path.stem for path in folder.glob("gpu_*.py"))
    benches.remove("gpu_parity")  # it needs transformers, which needs some of them
    command = [sys.executable, "-c", program, str(folder), *benches, "canary_engine", "tune_experts"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4"


def test_run_prints_the_answer_and_nothing_else_on_standard_output(llm):
    main = "from truegate.cli import main; main()"
    command = [sys.executable, "-c", main, "run", "what is 37 + 85?", "--max-tokens", "16", "--stats"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == llm.chat(QUESTION, GREEDY)[0].outputs[0].text + "\n"
    assert "tokens/s" in done.stderr

"""The engine on a GPU: captured steps give the tokens of eager ones, and both those of the same model on a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import VOCAB, reference, save

from truegate.config import EngineConfig, fit, resolve
from truegate.engine.core import Engine
from truegate.engine.start import Parts, facts_of, measure
from truegate.errors import UserError
from truegate.models import load_model
from truegate.models.load import LoadOptions
from truegate.types import Request, SamplingParams

NAMES = ("Qwen3-MoE", "DeepSeek-V2-Lite")
ROOMY = {  # grouped kernels want rows of 16 bytes and tiles of 16
    "Qwen3-MoE": {"moe_intermediate_size": 64}, "DeepSeek-V2-Lite": {"moe_intermediate_size": 64},
}  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def folder(request, tmp_path_factory):
    where = tmp_path_factory.mktemp(request.param)
    save(reference(request.param, **ROOMY[request.param]), Path(where))
    return where


def answers(folder, requests, *, device="cuda", dtype="float32", experts="triton", **settings):
    """Tokens by request id, and the engine's expert load."""
    config = EngineConfig(device=device, dtype=dtype, self_test=False, max_running=21, kv_cache_gib=0.05, **settings)
    options = LoadOptions(experts="torch" if device == "cpu" else experts)
    model = load_model(folder, dtype=getattr(torch, dtype), device=device, options=options)
    config, num_pages = fit(resolve(config, cuda=device == "cuda"), facts_of(model))
    parts = Parts(config=config, model=model, tokenizer=None, eos_token_ids=(), num_pages=num_pages)
    engine = Engine(config, parts)
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens, engine.stats().expert_load_LE


def requests(count: int, seed: int = 0, **params) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        length = int(torch.randint(1, 90, (1,), generator=generator))
        prompt = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
        sampling = SamplingParams(**{"max_tokens": 9 + i, "temperature": 0, "ignore_eos": True, **params})
        made.append(Request(request_id=str(i), prompt_token_ids=tuple(prompt), params=sampling))
    return made


@pytest.mark.parametrize("count", [1, 3, 21])
def test_captured_steps_give_the_tokens_of_eager_ones(folder, count):
    captured, load = answers(folder, requests(count), cuda_graphs=True)
    eager, eager_load = answers(folder, requests(count), cuda_graphs=False)
    assert captured == eager
    assert (load == eager_load).all(), "padded rows must count for nothing"


def test_captured_chunks_give_the_tokens_of_eager_ones(folder):
    """Chunks that go on a cached prefix or an earlier chunk, beside decodes; two budgets below and above a graph."""
    made = requests(12)
    head = made[0].prompt_token_ids + made[1].prompt_token_ids
    made += [
        replace(one, request_id=f"{i} again", prompt_token_ids=head + one.prompt_token_ids)
        for i, one in enumerate(made)
    ]
    for budget in (60, 300):
        captured, load = answers(folder, made, cuda_graphs=True, chunked_prefill_tokens=budget)
        eager, eager_load = answers(folder, made, cuda_graphs=False, chunked_prefill_tokens=budget)
        assert captured == eager
        assert (load == eager_load).all()


def test_captured_steps_give_the_tokens_of_eager_ones_in_bf16(folder):
    made = requests(5)
    captured, _ = answers(folder, made, dtype="bfloat16", cuda_graphs=True, attention_splits=4)
    eager, _ = answers(folder, made, dtype="bfloat16", cuda_graphs=False, attention_splits=4)
    same = sum(a == b for i in captured for a, b in zip(captured[i], eager[i], strict=True))
    assert same >= 0.9 * sum(map(len, eager.values()))  # batches that pad may pick other tiles, and ties then differ


@pytest.mark.parametrize("count", [1, 2, 8])
def test_captured_steps_in_bf16_that_pad_nothing_give_the_very_tokens_of_eager_ones(folder, count):
    """Prompts of one token: every step has `count` rows, as a graph has."""
    made = [replace(one, prompt_token_ids=one.prompt_token_ids[:1], params=replace(one.params, max_tokens=40))
            for one in requests(count)]  # fmt: skip
    captured, load = answers(folder, made, dtype="bfloat16", cuda_graphs=True, attention_splits=4)
    eager, eager_load = answers(folder, made, dtype="bfloat16", cuda_graphs=False, attention_splits=4)
    assert captured == eager
    assert (load == eager_load).all()


def test_float32_gives_the_tokens_of_a_cpu(folder):
    on_gpu, load = answers(folder, requests(8))
    on_cpu, cpu_load = answers(folder, requests(8), device="cpu")
    assert on_gpu == on_cpu
    assert (load == cpu_load).all()


def test_torch_experts_run_eagerly(folder):
    assert answers(folder, requests(4), experts="torch")[0] == answers(folder, requests(4), cuda_graphs=False)[0]
    with pytest.raises(UserError, match="experts torch"):
        answers(folder, [], experts="torch", cuda_graphs=True)


def test_drawn_answers_are_those_of_eager_steps(folder):
    params = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5, "logprobs": 2}
    captured, _ = answers(folder, requests(6, **params), cuda_graphs=True)
    assert captured == answers(folder, requests(6, **params), cuda_graphs=False, overlap=False)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_runs_through_a_captured_layer(folder, dtype):
    said = []
    options = LoadOptions(experts="triton", before_fill=lambda model: said.append(measure(model)))
    load_model(folder, dtype=dtype, device="cuda", options=options)
    assert "passed" in said[0]
    assert "33 rows captured" in said[0]

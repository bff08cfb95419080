"""Routed experts on request are what transformers' routers choose, however the rows were batched.

T positions, L MoE layers, K routed top-k.
"""

import json
import shutil

import numpy as np
import pytest
import torch

from truegate import LLM, SamplingParams
from truegate.types import NOT_COMPUTED, Request

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GREEDY = {"temperature": 0.0, "ignore_eos": True, "return_routed_experts": True}
COMMON = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "eos_token_id": 1,
}  # fmt: skip


def _deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = DeepseekV3Config(
        **COMMON, **sizes, num_hidden_layers=3, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
        n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def _qwen():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **COMMON, num_hidden_layers=2, num_experts=6, num_experts_per_tok=2, head_dim=16, norm_topk_prob=True,
        mlp_only_layers=[], decoder_sparse_step=1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


@pytest.fixture(scope="module", params=[_deepseek, _qwen], ids=["deepseek_v3", "qwen3_moe"])
def reference(request, tmp_path_factory, tokenizer_folder):
    """(checkpoint folder, transformers model) of one seeded tiny architecture."""
    torch.manual_seed(1)
    model = request.param().float().eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder)
    return folder, model


def truth(model, tokens):
    """ids_TLK and weights_TLK that transformers' experts are called with, for every position but the last token's."""
    seen, hooks = [], []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            hooks.append(module.register_forward_pre_hook(lambda _, args: seen.append(args[1:3])))
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    for hook in hooks:
        hook.remove()
    ids = np.stack([ids.numpy() for ids, _ in seen], axis=1)
    return ids, np.stack([weights.numpy() for _, weights in seen], axis=1)


def assert_same(routed, right, first=0):
    """Equal sets of (id, weight) at every position from `first` on, and NOT_COMPUTED before."""
    ids, weights = right
    assert routed.ids_TLK.shape == ids.shape
    assert (routed.ids_TLK[:first] == NOT_COMPUTED).all()
    mine, theirs = np.argsort(routed.ids_TLK, axis=-1), np.argsort(ids, axis=-1)
    np.testing.assert_array_equal(
        np.take_along_axis(routed.ids_TLK, mine, -1)[first:], np.take_along_axis(ids, theirs, -1)[first:]
    )
    np.testing.assert_allclose(
        np.take_along_axis(routed.weights_TLK, mine, -1)[first:],
        np.take_along_axis(weights, theirs, -1)[first:],
        rtol=2e-4,
        atol=2e-5,
    )


def prompts(count):
    return [[5 + (7 * i + 11 * j) % 390 for j in range(3 + (i * 17) % 50)] for i in range(count)]


def check(reference, first=0, count=5, params=None, **settings):
    folder, model = reference
    with LLM(str(folder), max_model_len=128, overlap=settings.pop("overlap", False), **settings) as llm:
        outputs = llm.generate(prompts(count), SamplingParams(**{**GREEDY, "max_tokens": 12, **(params or {})}))
        for output in outputs:
            tokens = output.prompt_token_ids + output.outputs[0].token_ids
            assert_same(output.outputs[0].routed_experts, truth(model, tokens), first)
        return llm.engine.stats()


def test_alone_and_whole(reference):
    check(reference, count=1)


@pytest.mark.parametrize("overlap", [False, True])
def test_under_chunked_prefill_and_batching(reference, overlap):
    check(reference, chunked_prefill_tokens=11, page_size=4, overlap=overlap)


def test_under_preemption(reference):
    folder, _ = reference
    width = json.loads((folder / "config.json").read_text())
    per_token = (48 if "kv_lora_rank" in width else 2 * 4 * 16) * width["num_hidden_layers"] * 4
    room = 130 * per_token / (1 << 30)  # pages for one sequence of max_model_len and a little more
    stats = check(
        reference, page_size=2, kv_cache_gib=room, params={"max_tokens": 60}, prefix_cache=False, count=5
    )  # fmt: skip
    assert stats.preemptions > 0


def test_positions_from_the_prefix_cache_say_not_computed(reference):
    folder, model = reference
    prompt = prompts(3)[2]
    with LLM(str(folder), max_model_len=128, page_size=4) as llm:
        for hit in (0, (len(prompt) - 1) // 4 * 4):
            output = llm.generate(prompt, SamplingParams(**GREEDY, max_tokens=6))[0]
            assert output.num_cached_tokens == hit
            tokens = prompt + output.outputs[0].token_ids
            assert_same(output.outputs[0].routed_experts, truth(model, tokens), first=hit)


def test_a_cancelled_prefill_has_a_row_for_every_position(reference):
    folder, _ = reference
    prompt = tuple(range(5, 305))
    with LLM(str(folder), chunked_prefill_tokens=40, overlap=False, page_size=4) as llm:
        llm.engine.add(Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(**GREEDY)))
        llm.engine.step()
        llm.engine.cancel("r")
        (output,) = llm.engine.step()
    ran = output.routed.ids_TLK[:, 0, 0] != NOT_COMPUTED
    assert (ran.shape, int(ran.sum()), bool(ran[:40].all())) == ((299,), 40, True)


def test_expert_load_counts_every_computed_row_once(reference):
    folder, _ = reference
    with LLM(str(folder), max_model_len=128) as llm:
        output = llm.generate(prompts(3)[2], SamplingParams(**GREEDY, max_tokens=9))[0]
        ids = output.outputs[0].routed_experts.ids_TLK
        load = llm.engine.stats().expert_load_LE
        for layer in range(ids.shape[1]):
            np.testing.assert_array_equal(np.bincount(ids[:, layer].ravel(), minlength=load.shape[1]), load[layer])

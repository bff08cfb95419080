"""Rotary frequencies are transformers' own; the orders of products inside attention agree; the pool has a sink."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from truegate.cache.pools import MHAPool
from truegate.errors import UserError
from truegate.layers.layout import cut, step_layout
from truegate.layers.mla import MLA
from truegate.layers.norm import RMSNorm
from truegate.layers.rope import interleave_rows, rope_spec, rope_table, rotate_
from truegate.models import load_model
from truegate.types import Batch

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    YARN,
    {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 16, "beta_slow": 2},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    {**YARN, "mscale": 1.0},
    {**YARN, "attention_factor": 1.25},
    {**YARN, "truncate": False, "factor": 2.5},
    {**YARN, "factor": 1.0, "mscale_all_dim": 1.0},
]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("rope_dim", [16, 64])
def test_rope_frequencies_and_scales_are_those_of_transformers(rope, rope_dim):
    config = DeepseekV3Config(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, qk_rope_head_dim=rope_dim, q_lora_rank=8,
        kv_lora_rank=8, max_position_embeddings=163840, rope_parameters=dict(rope))  # fmt: skip
    theirs = DeepseekV3RotaryEmbedding(config)
    ours = rope_spec({"rope_parameters": rope, "max_position_embeddings": 163840}, head_dim=rope_dim)
    assert torch.allclose(ours.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    scaling = DeepseekV3Attention(config, 0).scaling
    assert config.qk_head_dim**-0.5 * ours.softmax_factor == pytest.approx(scaling, rel=1e-12)


def test_old_spelling_of_rope_keys_means_the_same():
    scaling = {k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta")}
    old = {"rope_scaling": {"type": "yarn", **scaling}, "rope_theta": 10000.0, "max_position_embeddings": 163840}
    new = {"rope_parameters": YARN, "max_position_embeddings": 163840}
    a, b = rope_spec(old, head_dim=64), rope_spec(new, head_dim=64)
    assert a.inv_freq.equal(b.inv_freq)
    assert a.attention_factor == b.attention_factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotating_pairs_gives_the_scores_of_rotating_halves(dtype):
    config = Qwen3MoeConfig(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    positions = torch.tensor([0, 1, 5, 300])
    cos, sin = Qwen3MoeRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions[None])
    q, k = torch.randn(2, 4, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype).unbind(0)

    def halves(x):
        return x.float() * cos[0][:, None] + torch.cat((-x[..., 16:], x[..., :16]), -1).float() * sin[0][:, None]

    expected = halves(q) @ halves(k).transpose(-1, -2)
    rotations = rope_table(rope_spec({}, head_dim=32), 512)[positions][:, None]
    q, k = q[..., interleave_rows(32)].clone(), k[..., interleave_rows(32)].clone()
    rotate_(q, rotations)
    rotate_(k, rotations)
    found = q.float() @ k.float().transpose(-1, -2)
    assert torch.allclose(found, expected, atol=40 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("shape", [(48,), (3, 48)])
def test_rms_norm_is_its_equation_in_place_and_out_of_place(shape):
    norm = RMSNorm(shape, 1e-3, dtype=torch.float32, device=torch.device("cpu"))
    norm.weight.uniform_(0.5, 2)
    norm.finish_loading()
    x = torch.randn(5, 3, 48, dtype=torch.float64) * torch.tensor([1e-6, 1e-2, 1, 1e3, 0.0])[:, None, None]
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    assert torch.allclose(norm(x.float()).double(), expected, rtol=1e-5, atol=1e-9)
    wide = torch.full((5, 3, 50), 7.0)  # in place on a view that is part of a wider row
    wide[..., 1:49] = x
    norm.apply_(wide[..., 1:49])
    assert torch.allclose(wide[..., 1:49].double(), expected, rtol=1e-5, atol=1e-9)
    assert (wide[..., 0] == 7).all()
    assert (wide[..., 49] == 7).all()


def test_latent_attention_takes_the_cheaper_order_of_its_products(checkpoint):
    """And the parity table's modes go both ways: whole prompts expanded, small chunks over a context absorbed."""
    attention = load_model(checkpoint("DeepSeek-V3")[1]).blocks[0].attention
    assert not attention.prefers_absorbed(300, 300)
    assert attention.prefers_absorbed(9, 18)
    sizes = {"layer": 0, "hidden": 8, "num_heads": 2, "q_rank": None, "scale": 1.0, "bias": False, "norm_eps": 1e-6}
    published = MLA(
        **sizes, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, dtype=torch.float32, device=torch.device("cpu")
    )
    assert not published.prefers_absorbed(4096, 4096)
    assert published.prefers_absorbed(64, 4096)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 4000), st.integers(1, 600))
def test_decode_groups_cover_all_contexts_and_waste_no_more_than_a_group_costs(lengths, most, cost):
    ends, total = cut(lengths, most, cost)
    assert ends == sorted(set(ends))
    assert ends[-1] == len(lengths)
    groups = [lengths[a:b] for a, b in itertools.pairwise([0, *ends])]
    assert total == sum(max(group) * len(group) + cost for group in groups)
    for group in groups:
        assert len(group) == 1 or max(group) * len(group) <= most
        assert max(group) * len(group) - sum(group) <= cost * (len(group) - 1)


@pytest.mark.parametrize(("pages", "in_place"), [([3, 4, 5], True), ([3, 5, 4], False), ([6], True)])
def test_a_lone_context_in_neighbouring_pages_is_read_where_it_lies(pages, in_place):
    pool = MHAPool(num_layers=1, num_pages=9, page_size=4, width=2, dtype=torch.float32, device="cpu")
    pool.rows(0).copy_(torch.arange(72.0).view(36, 2))
    context = 4 * len(pages) - 2
    slots = [page * 4 + i for page in pages for i in range(4)][:context]
    batch = Batch(
        token_ids_T=torch.tensor([1]), positions_T=torch.tensor([context - 1]), valid_T=torch.tensor([True]),
        slots_T=torch.tensor(slots[-1:]), page_table_NP=torch.tensor([[*pages, 0]]), query_lens=[1],
        context_lens=[context], logit_rows_M=torch.tensor([0]),
    )  # fmt: skip
    (group,) = step_layout(batch, pool, torch.ones(16, 1, dtype=torch.complex64)).decodes.groups
    rows = pool.borrow(0, group.slots_S)
    assert torch.equal(rows, pool.rows(0)[slots])
    assert (rows.untyped_storage().data_ptr() == pool.data.untyped_storage().data_ptr()) is in_place


def test_a_pool_needs_a_page_beside_the_sink():
    sizes = {"num_layers": 1, "page_size": 4, "width": 2, "dtype": torch.float32, "device": "cpu"}
    with pytest.raises(UserError, match="page 0"):
        MHAPool(num_pages=1, **sizes)
    pool = MHAPool(num_pages=3, **sizes)
    pool.write(0, torch.tensor([0, 0, 4, 11]), torch.arange(8.0).view(4, 2))
    assert pool.read(0, torch.tensor([4, 11])).tolist() == [[4, 5], [6, 7]]
    assert pool.num_bytes == 3 * 4 * 2 * 4


@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.5"])
def test_bytes_per_token_is_what_the_pool_takes(name, checkpoint):
    model = load_model(checkpoint(name)[1])
    pool = model.make_pool(5, 8)
    assert pool.num_bytes == 5 * 8 * model.bytes_per_token


@pytest.mark.parametrize(
    ("name", "fused", "num_rows", "seen"), [("qwen3", False, 8192, 0.35), ("v2lite", True, 8320, 0.41)]
)
def test_the_estimate_of_a_steps_memory_covers_what_a_gpu_was_seen_to_hold(name, fused, num_rows, seen, tmp_path):
    """GiB in use by a step on an H200, as gpu_decode.py prints it."""
    pytest.importorskip("triton", reason="the experts of a GPU need Triton: pip install triton")
    from gpu_decode import CONFIGS

    from truegate.law.plan import Choices
    from truegate.models.load import LoadOptions, _build, _Recorded, read_config

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    options = LoadOptions(experts="triton", choices=Choices(fuse_shared=fused))
    nowhere = torch.device("meta")
    with nowhere:
        model, _ = _build(_Recorded(read_config(tmp_path)), torch.bfloat16, nowhere, options)
    assert seen <= model.step_bytes(num_rows, 1 << 15) / 2**30 <= 1.2 * seen
    assert model.step_bytes(num_rows, 1 << 20) >= model.step_bytes(num_rows, 1 << 15)

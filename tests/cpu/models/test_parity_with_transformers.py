"""Every architecture computes transformers' float32 logits, whatever way its prompts are cut into batches."""

import pytest
import torch
from parity import (
    GREEDY_MODES,
    LIMIT,
    MODES,
    Paged,
    answers,
    greedy_prompts,
    make_prompts,
    num_differing,
    reference_logits,
    run_mode,
    worst,
)
from tiny_checkpoints import ARCHITECTURES, reference, save

from truegate.models import load_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_transformers_in_every_mode(name, checkpoint):
    theirs, folder = checkpoint(name)
    ours, prompts = load_model(folder), make_prompts()
    expected = reference_logits(theirs, prompts)
    for mode in MODES:
        error = worst(run_mode(mode, ours, prompts), expected)
        assert error <= LIMIT, (mode, error)


@pytest.mark.parametrize("name", ["DeepSeek-V3-YaRN", "Qwen2-MoE-mixed"])
def test_greedy_tokens_equal_transformers_through_the_scheduler(name, checkpoint):
    theirs, folder = checkpoint(name)
    ours, prompts = load_model(folder), greedy_prompts()[:6]
    for mode in ("16 rows", "cached"):
        got = answers(ours, prompts, num_tokens=10, **GREEDY_MODES[mode])
        assert num_differing(theirs, prompts, got["tokens"]) == 0, mode
        assert (got["cached"] > 0) == (mode == "cached")
    got["tokens"][3][4] = (got["tokens"][3][4] + 1) % 200
    assert num_differing(theirs, prompts, got["tokens"]) > 0  # the count can rise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.5"])
def test_half_precision_stays_near_transformers_in_half_precision(name, dtype, tmp_path):
    theirs = reference(name)
    save(theirs, tmp_path, dtype=dtype)
    exact = load_model(tmp_path)  # the rounded weights, computed in fp32
    ours = load_model(tmp_path, dtype=dtype)
    prompts = make_prompts()[:3]
    expected = run_mode("prefill", exact, prompts)
    rounding = torch.finfo(dtype).eps
    for mode in ("prefill", "decode"):
        got = torch.cat(run_mode(mode, ours, prompts))
        difference = (got - torch.cat(expected)).abs().amax(-1) / torch.cat(expected).abs().amax(-1)
        # a router near a tie may choose otherwise in few bits: the median row is what rounding alone does
        assert difference.median() < 6 * rounding, mode


def test_a_wrong_weight_is_seen(checkpoint):
    """The comparison can fail: one expert's scale, one norm weight, one rotary frequency."""
    theirs, folder = checkpoint("DeepSeek-V3")
    prompts = make_prompts()
    expected = reference_logits(theirs, prompts)
    for spoil in (
        lambda model: model.moe_layers[0].w_down[3].mul_(1.01),
        lambda model: model.blocks[1].attention.kv_norm._scaled[3].mul_(1.01),
        lambda model: model.rotations_XR[250:].mul_(1.01),
    ):
        model = load_model(folder)
        spoil(model)
        assert worst(run_mode("prefill", model, prompts), expected) > LIMIT


def test_padded_rows_change_no_bit_of_valid_rows(checkpoint):
    _, folder = checkpoint("DeepSeek-V3")
    model, prompts = load_model(folder), make_prompts()[:3]
    found = []
    for poison in (0.0, float("nan"), 1e30):
        paged = Paged(model, prompts)
        paged.pool.data[:, 0] = poison  # the sink page, which padded rows write to
        for parts in ([(0, 0, 1), (1, 0, 3), (2, 0, 40)], [(1, 3, 4), (2, 40, 41)], [(1, 4, 7), (2, 41, 64)]):
            paged.step(parts, pads=5)
        found.append(torch.cat(paged.logits))
    assert found[0].isfinite().all()
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


def test_long_and_short_contexts_decode_together_as_they_do_alone(checkpoint):
    """Decode sequences are grouped by length; the groups are only a matter of speed."""
    _, folder = checkpoint("Qwen3-MoE")
    model = load_model(folder)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 200, (n,), generator=generator) for n in (420, 3, 400, 30, 5, 410, 2, 1)]
    together, alone = Paged(model, prompts), Paged(model, prompts)
    for paged in (together, alone):
        paged.step([(n, 0, len(p) - 1) for n, p in enumerate(prompts) if len(p) > 1])
    last = [(n, len(p) - 1, len(p)) for n, p in enumerate(prompts)]
    together.step(last)
    for part in last:
        alone.step([part])
    for a, b in zip(together.logits, alone.logits, strict=True):
        assert torch.allclose(a[-1], b[-1], rtol=0, atol=1e-4 * b[-1].abs().max().item())

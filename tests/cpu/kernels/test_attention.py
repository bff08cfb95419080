"""Attention kernels, interpreted on a CPU, against their twins: small shapes of every kind."""

import attention_cases as cases
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
DECODES = [(1, 1), (1, 16), (1, 17), (1, 100), (1, 63)]
CHUNKS = [(5, 5), (3, 40), (1, 33), (66, 70), (2, 2)]


def run(parts, width, dtype, **settings):
    return cases.Case(parts, width=width, dtype=dtype, device="cpu", **settings)


@pytest.mark.parametrize("num_splits", [1, 4, None])
@pytest.mark.parametrize(("num_heads", "num_keys", "size"), [(4, 2, 32), (3, 3, 24), (32, 1, 16)])
def test_decode_is_its_twin(num_heads, num_keys, size, num_splits):
    case = run(DECODES, 2 * num_keys * size, torch.float32)
    cases.check_decode(*cases.gqa(case, num_heads, num_keys, size), case.step(num_splits=num_splits))


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(("num_heads", "latent", "rotary"), [(4, 32, 8), (20, 48, 16)])
def test_latent_decode_is_its_twin(num_heads, latent, rotary, num_splits):
    case = run(DECODES, latent + rotary, torch.float32)
    cases.check_decode(*cases.latent(case, num_heads, latent, rotary), case.step(num_splits=num_splits))


def test_a_context_of_zero_gives_zeros():
    from truegate.kernels import attention

    for num_splits in (1, 4):
        case = run(DECODES[:2], 64, torch.float32)
        q, keys, scale = cases.gqa(case, 2, 1, 32)
        step = case.step(num_splits=num_splits)
        step.decodes.contexts_D[0] = 0
        y_DHV = attention.decode(q, keys, step.decodes, scale=scale)
        assert torch.equal(y_DHV[0], torch.zeros_like(y_DHV[0]))
        assert bool(y_DHV[1].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cannot multiply bf16
@pytest.mark.parametrize(("num_heads", "num_keys", "size"), [(4, 2, 32), (2, 2, 24), (16, 1, 16), (12, 2, 16)])
def test_prefill_is_its_twin(num_heads, num_keys, size, dtype):
    case = run(CHUNKS, 2 * num_keys * size, dtype)
    q, keys, scale = cases.gqa(case, num_heads, num_keys, size)
    cases.check_prefill(q, keys, scale, case.step().chunks, size)


def test_prefill_over_expanded_latents_is_its_twin():
    from truegate.cache.pools import MLAPool

    case = run(CHUNKS, 40, torch.float32, pool=MLAPool)
    step = case.step()
    q, keys, scale = cases.expanded(case, 3, 16, 8, 24)
    cases.check_prefill(q, keys, scale, step.expanded[0].chunks, 24)
    gathered = case.pool.rows(0)[step.expanded[0].slots_S]
    assert bool(gathered.isfinite().all()), "a slot outside the contexts was listed"
    assert len(gathered) == sum(context for rows, context in CHUNKS if rows > 1)


def test_prefill_takes_decodes_and_a_list_of_fixed_length():
    case = run([(1, 17), (5, 5), (1, 1), (130, 140)], 128, torch.float32)
    q, keys, scale = cases.gqa(case, 4, 2, 32)
    cases.check_prefill(q, keys, scale, case.all_chunks(spare=0), 32)
    padded = torch.cat((q[0], torch.full_like(q[0], float("nan"))))[: len(q[0]) + 7]
    cases.check_prefill((padded, None), keys, scale, case.all_chunks(spare=7), 32)


def test_the_work_list_names_every_row_once_and_the_longest_first():
    from truegate.layers.paged import BLOCK_ROWS, NO_BLOCK, chunk_blocks, most_blocks

    lens, contexts = [1, 300, 0, 128, 257], [900, 300, 0, 1000, 257]
    blocks_B2 = chunk_blocks(lens, contexts)
    assert blocks_B2.tolist() == [[3, 0], [0, 0], [1, 2], [4, 2], [1, 1], [4, 1], [1, 0], [4, 0]]
    length = most_blocks(sum(lens), len(lens))
    assert len(blocks_B2) <= length
    filled = chunk_blocks(lens, contexts, length)
    assert (filled[: len(blocks_B2)] == blocks_B2).all()
    assert (filled[len(blocks_B2) :] == NO_BLOCK).all()
    assert most_blocks(5, 5) == most_blocks(5, 8) == 5
    assert most_blocks(8 * BLOCK_ROWS, 1) == 8
    assert len(chunk_blocks([BLOCK_ROWS + 1] * 3, [BLOCK_ROWS + 1] * 3)) == most_blocks(3 * BLOCK_ROWS + 3, 3)
    assert len(chunk_blocks([], [])) == 0


def test_fixed_splits_do_not_see_the_batch():
    case = run(DECODES, 128, torch.float32)
    cases.check_alone(*cases.gqa(case, 4, 2, 32), case.step(num_splits=4).decodes)


def test_fixed_splits_of_16_bit_values_do_not_see_a_large_batch():
    from truegate.kernels import attention

    case = run([(1, 100)] * 17, 128, torch.float16)
    q, keys, scale = cases.gqa(case, 4, 2, 32)
    decodes = case.step(num_splits=2).decodes
    together = attention.decode(q, keys, decodes, scale=scale)
    assert torch.equal(cases.alone(q, keys, scale, decodes, 3), together[3])


@pytest.mark.parametrize("num_heads", [4, 20])
def test_splits_of_fixed_size_begin_at_its_multiples(num_heads):
    case = run([(1, n) for n in (1, 33, 64, 65, 100, 127, 128)], 40, torch.float32)
    two, four, sixteen = cases.check_fixed_splits(*cases.latent(case, num_heads, 32, 8), case.step().decodes, 64)
    assert torch.equal(two, four)
    assert torch.equal(two, sixteen)


def test_contexts_are_expanded_a_few_at_a_time(monkeypatch):
    """A long context alone, short ones together: every chunk's rows see what they see with all contexts at once."""
    from truegate.cache.pools import MLAPool
    from truegate.kernels import attention
    from truegate.layers import paged

    case = run([(5, 40), (3, 20), (1, 7), (9, 90), (2, 30)], 24, torch.float32, pool=MLAPool)
    q = case.random(case.batch.token_ids_T.shape[0], 2, 16), None
    found = []
    for most, sizes in ((1 << 15, [180]), (64, [60, 90, 30])):
        monkeypatch.setattr(paged, "EXPANDED", most)
        step = case.step()
        assert [len(part.slots_S) for part in step.expanded] == sizes
        y_THV = torch.full((20, 2, 8), float("nan"))
        for part in step.expanded:
            rows_S1W = case.pool.rows(0)[part.slots_S][:, None].expand(-1, 2, -1)
            attention.prefill(q, (rows_S1W[..., :16], None, rows_S1W[..., 16:]), part.chunks, y_THV, scale=0.25)
        found.append(y_THV)
    assert found[0][1:].isfinite().all()
    assert torch.equal(found[0][1:], found[1][1:])
    assert found[0][0].isnan().all(), "the decode's row is nobody's chunk"

"""Attention kernels on the device against their twins, at the sizes of real models."""

import attention_cases as cases
import pytest
import torch

from truegate.cache.pools import MLAPool

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DECODES = [(1, n) for n in (1, 15, 16, 17, 31, 64, 65, 129, 500, 1023, 1)]
CHUNKS = [(70, 70), (1, 33), (129, 300), (2, 600), (64, 64), (17, 257)]


def case(parts, width, dtype, **settings):
    return cases.Case(parts, width=width, dtype=dtype, device="cuda", **settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 2, 16, 64, None])
@pytest.mark.parametrize(("num_heads", "num_keys", "size"), [(32, 4, 128), (16, 16, 64), (96, 8, 128)])
def test_decode_is_its_twin(num_heads, num_keys, size, num_splits, dtype):
    one = case(DECODES, 2 * num_keys * size, dtype)
    cases.check_decode(*cases.gqa(one, num_heads, num_keys, size), one.step(num_splits=num_splits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 16, None])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_latent_decode_is_its_twin(num_heads, num_splits, dtype):
    one = case(DECODES, 576, dtype)
    cases.check_decode(*cases.latent(one, num_heads, 512, 64), one.step(num_splits=num_splits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 16])
@pytest.mark.parametrize("num_keys", [2, 4])
def test_fixed_splits_do_not_see_the_batch(num_keys, num_splits, dtype):
    one = case(DECODES, 2 * num_keys * 128, dtype)
    cases.check_alone(*cases.gqa(one, 32, num_keys, 128), one.step(num_splits=num_splits).decodes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 16])
def test_fixed_splits_of_latents_do_not_see_the_batch(num_splits, dtype):
    one = case(DECODES, 576, dtype)
    cases.check_alone(*cases.latent(one, 16, 512, 64), one.step(num_splits=num_splits).decodes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_of_fixed_size_begin_at_its_multiples(dtype):
    one = case([(1, n) for n in (1, 33, 128, 129, 200, 255, 256)], 2 * 2 * 128, dtype)
    cases.check_fixed_splits(*cases.gqa(one, 32, 2, 128), one.step().decodes, 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_keys", "size"), [(32, 4, 128), (6, 6, 64), (24, 2, 128), (8, 1, 256)])
def test_prefill_is_its_twin(num_heads, num_keys, size, dtype):
    one = case(CHUNKS, 2 * num_keys * size, dtype)
    q, keys, scale = cases.gqa(one, num_heads, num_keys, size)
    cases.check_prefill(q, keys, scale, one.step().chunks, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_takes_decodes_and_a_list_of_fixed_length(dtype):
    one = case([*CHUNKS, (1, 1), (1, 400)], 2 * 4 * 128, dtype)
    (q, _), keys, scale = cases.gqa(one, 32, 4, 128)
    for spare in (0, 7):
        padded = torch.cat((q, torch.full_like(q, float("nan"))))[: len(q) + spare]
        cases.check_prefill((padded, None), keys, scale, one.all_chunks(spare=spare), 128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_over_expanded_latents_is_its_twin(dtype):
    one = case(CHUNKS, 576, dtype, pool=MLAPool)
    q, keys, scale = cases.expanded(one, 16, 128, 64, 128)
    cases.check_prefill(q, keys, scale, one.step().expanded[0].chunks, 128)

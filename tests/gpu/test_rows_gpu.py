"""Norm, rotation, router-logit and one-row kernels on the device against their twins, at the sizes of real models."""

import norm_cases as cases
import pytest
import torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_their_twins(dtype):
    place = {"dtype": dtype, "device": "cuda"}
    for width in (2048, 7168, 1536, 24):
        cases.check_rms_norm(33, width, add=False, **place)
        cases.check_rms_norm(33, width, add=True, **place)
    cases.check_silu_mul(33, 10944, **place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 33, 127, 128, 130, 1001])
def test_rotation_is_its_twin(num_rows, dtype):
    place = {"dtype": dtype, "device": "cuda"}
    for heads in ((32, 4), (96, 8), (12, 1)):
        cases.check_rotate_and_store(num_rows, heads, 128, 128, normed=True, **place)
        cases.check_rotate_and_store(num_rows, heads, 64, 32, normed=False, **place)
    cases.check_rotate_and_store(num_rows, (6, 2), 96, 48, normed=True, **place)
    cases.check_store_latent(num_rows, 16, 512, 64, **place)
    cases.check_store_latent(num_rows, 128, 512, 64, **place)
    cases.check_store_latent(num_rows, 5, 96, 24, **place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 129, 257, 1000, 4097])
def test_router_logits_are_float32s(num_rows, dtype):
    for num_out, width in ((128, 2048), (60, 2048), (256, 7168), (20, 300)):
        cases.check_gate(num_rows, num_out, width, biased=num_out == 60, dtype=dtype, device="cuda")


@pytest.mark.parametrize("num_rows", [3, 32, 200, 1000])
def test_weights_keep_their_bits(num_rows):
    cases.check_gate_keeps_bits(num_rows, 128, 2048, dtype=torch.bfloat16, device="cuda")
    cases.check_gate_keeps_bits(num_rows, 20, 7168, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_times_a_matrix_is_its_twin(dtype):
    for num_out, width in ((5120, 2048), (2112, 7168), (37, 1536)):
        cases.check_row(num_out, width, biased=True, add=True, dtype=dtype, device="cuda")
    cases.check_row(128, 2048, biased=False, add=False, dtype=dtype, device="cuda", weight_dtype=torch.float32)

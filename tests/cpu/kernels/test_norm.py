"""Norm, rotary and SiLU kernels, interpreted on a CPU, against their twins."""

import norm_cases as cases
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
norm = pytest.importorskip("truegate.kernels.norm")
FEW = pytest.importorskip("truegate.kernels.gate").FEW
PLACE = {"dtype": torch.float32, "device": "cpu"}


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("width", [24, 64, 192])
def test_rms_norm_is_its_twin(width, add):
    cases.check_rms_norm(3, width, add=add, **PLACE)


def test_the_residual_is_rounded_before_it_is_normed():
    cases.check_rms_norm(3, 64, add=True, dtype=torch.float16, device="cpu")


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "size", "rotary"), [((4, 2), 32, 32), ((3, 1), 24, 12), ((8, 4), 16, 4)])
def test_rotate_and_store_is_its_twin(heads, size, rotary, normed):
    cases.check_rotate_and_store(5, heads, size, rotary, normed=normed, **PLACE)


@pytest.mark.parametrize(("num_heads", "latent", "rotary"), [(4, 32, 8), (20, 24, 12)])
def test_store_latent_is_its_twin(num_heads, latent, rotary):
    cases.check_store_latent(5, num_heads, latent, rotary, **PLACE)


def test_tiles_of_several_rows_are_their_twin():
    num_rows = norm.MANY + 3
    cases.check_rotate_and_store(num_rows, (4, 2), 32, 16, normed=True, **PLACE)
    cases.check_rotate_and_store(num_rows, (3, 1), 24, 24, normed=False, **PLACE)
    cases.check_store_latent(num_rows, 20, 24, 12, **PLACE)


@pytest.mark.parametrize("width", [48, 1500])
def test_silu_mul_is_its_twin(width):
    cases.check_silu_mul(3, width, **PLACE)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_rows", "num_out", "width"), [(1, 8, 64), (5, 20, 300), (FEW + 5, 70, 300)])
def test_router_logits_are_float32s(num_rows, num_out, width, biased):
    for dtype in (torch.float32, torch.float16):
        cases.check_gate(num_rows, num_out, width, biased=biased, dtype=dtype, device="cpu")


@pytest.mark.parametrize("num_rows", [3, FEW + 5])
def test_weights_keep_their_bits(num_rows):
    cases.check_gate_keeps_bits(num_rows, 20, 320, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(("biased", "add"), [(False, True), (True, False)])
@pytest.mark.parametrize(("num_out", "width"), [(7, 24), (600, 64)])
def test_a_row_times_a_matrix_is_its_twin(num_out, width, biased, add):
    cases.check_row(num_out, width, biased=biased, add=add, **PLACE)

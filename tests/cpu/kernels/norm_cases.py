"""The norm kernels against their twins, wherever they run; what no row owns is NaN or stays as it was."""

from types import SimpleNamespace

import torch

from truegate.kernels.ref import norm as ref

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the largest value


class Tensors:
    """Random tensors of one dtype on one device, and a step of scattered slots and positions."""

    def __init__(self, num_rows: int, *, dtype: torch.dtype, device: str, rotary: int = 0, slots: int = 64):
        self.generator = torch.Generator().manual_seed(num_rows)
        self.dtype, self.device, self.num_rows = dtype, device, num_rows
        angles = torch.rand(200, rotary // 2, generator=self.generator) * 6.3
        self.rotations_XR = torch.stack((angles.cos(), angles.sin()), -1).flatten(1).to(device)
        pick = torch.randperm(slots + num_rows, generator=self.generator)[:num_rows]
        positions = torch.randint(0, 200, (num_rows,), generator=self.generator)
        self.step = SimpleNamespace(slots_T=pick.to(device), positions_T=positions.to(device))
        self.num_slots = slots + num_rows

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def spare(self, num_rows: int, width: int) -> torch.Tensor:
        """What nobody may read: NaN."""
        return torch.full((num_rows, width), float("nan"), dtype=self.dtype, device=self.device)

    def pool(self, width: int) -> torch.Tensor:
        return self.spare(self.num_slots, width)


def same(mine: torch.Tensor, right: torch.Tensor) -> None:
    """Equal up to the dtype's rounding, NaN exactly where NaN belongs."""
    assert torch.equal(mine.isnan(), right.isnan())
    tolerance = TOLERANCE[right.dtype]
    mine, right = mine.float().nan_to_num(0), right.float().nan_to_num(0)
    assert float((mine - right).abs().max() / right.abs().max()) < tolerance


def check_rms_norm(num_rows: int, width: int, *, add: bool, dtype: torch.dtype, device: str) -> None:
    from truegate.kernels import norm

    tensors = Tensors(num_rows, dtype=dtype, device=device)
    x_TD = torch.cat((tensors(num_rows, width), tensors.spare(num_rows, 5)), 1)[:, :width]
    weight_D = tensors(width)
    residual = tensors(num_rows, width) if add else None
    mine = None if residual is None else residual.clone()
    right = None if residual is None else residual.clone()
    want, beside = ref.rms_norm(x_TD, weight_D, 1e-5, right), x_TD.clone()
    got = norm.rms_norm(x_TD, weight_D, 1e-5, mine)
    same(got, want)
    if add:
        assert torch.equal(mine, right), "the residual sum is rounded once"
        assert got.data_ptr() == x_TD.data_ptr(), "the norm takes x's place"
    else:
        same(x_TD, beside)


def check_rotate_and_store(num_rows, heads, size, rotary, *, normed: bool, dtype, device) -> None:
    from truegate.kernels import norm

    tensors = Tensors(num_rows, dtype=dtype, device=device, rotary=rotary)
    width = (heads[0] + 2 * heads[1]) * size
    qkv_TX = tensors(num_rows, width)
    weights = (tensors(heads[0] + heads[1], size), 1e-6) if normed else None
    mine, right = (
        (qkv_TX.clone(), tensors.pool(2 * heads[1] * size)),
        (qkv_TX.clone(), tensors.pool(2 * heads[1] * size)),
    )
    for kernel, (qkv, pool) in ((norm, mine), (ref, right)):
        kernel.rotate_and_store(qkv, heads, weights, tensors.rotations_XR, tensors.step, pool)
    same(mine[0][:, : heads[0] * size], right[0][:, : heads[0] * size])
    same(mine[1], right[1])


def check_store_latent(num_rows, num_heads, latent, rotary, *, dtype, device) -> None:
    from truegate.kernels import norm

    tensors = Tensors(num_rows, dtype=dtype, device=device, rotary=rotary)
    latents, queries = tensors(num_rows, latent + rotary), tensors(num_rows, num_heads * rotary)
    before, between, after = (tensors.spare(num_rows, width) for width in (7, 3, 5))
    wide = torch.cat((before, latents, between, queries, after), 1)
    weight_C = tensors(latent)
    found = []
    for kernel in (norm, ref):
        own, pool = wide.clone(), tensors.pool(latent + rotary)
        q_rope = own[:, 10 + latent + rotary : -5].view(num_rows, num_heads, rotary)
        kernel.store_latent(
            own[:, 7 : 7 + latent + rotary], q_rope, (weight_C, 1e-6), tensors.rotations_XR, tensors.step, pool
        )
        found.append((own, pool))
    same(found[0][0], found[1][0])
    same(found[0][1], found[1][1])


def check_silu_mul(num_rows: int, width: int, *, dtype, device) -> None:
    from truegate.kernels import norm

    tensors = Tensors(num_rows, dtype=dtype, device=device)
    x = torch.cat((tensors(num_rows, 2 * width), tensors.spare(num_rows, 6)), 1)[:, : 2 * width]
    same(norm.silu_mul(x), ref.silu_mul(x))


def check_gate(num_rows: int, num_out: int, width: int, *, biased: bool, dtype, device) -> None:
    from truegate.kernels.gate import FEW, gate
    from truegate.kernels.ref.gate import gate as twin

    tensors = Tensors(num_rows, dtype=dtype, device=device)
    x_TD = torch.full((num_rows + 3, width + 8), float("nan"), dtype=dtype, device=device)[:num_rows, :width]
    x_TD.copy_(tensors(num_rows, width))
    weight_ED = torch.full((num_out + 3, width), float("nan"), device=device)[:num_out]
    weight_ED.copy_(tensors(num_out, width).float() * 1.0009765625)
    bias_E = tensors(num_out).float() if biased else None
    y_TE = gate(x_TD, weight_ED, bias_E)
    exact = twin(x_TD, weight_ED, bias_E)
    assert y_TE.dtype == torch.float32
    # the matrix units round their sums towards zero, and many rows make the chains long
    assert float((y_TE - exact).abs().max() / exact.abs().max()) < (2e-6 if num_rows <= FEW else 4e-6)


def check_gate_keeps_bits(num_rows: int, num_out: int, width: int, *, dtype, device) -> None:
    """A row with a one in it and zeros gives back a column of the weights, to the last bit."""
    from truegate.kernels.gate import gate

    weight_ED = Tensors(num_rows, dtype=torch.float32, device=device)(num_out, width)
    column_T = torch.arange(num_rows, device=device) * 7 % width
    x_TD = torch.nn.functional.one_hot(column_T, width).to(dtype)
    assert torch.equal(gate(x_TD, weight_ED), weight_ED.T[column_T])


def check_row(num_out: int, width: int, *, biased: bool, add: bool, dtype, device, weight_dtype=None) -> None:
    from truegate.kernels import linear
    from truegate.kernels.ref import linear as twin

    tensors = Tensors(1, dtype=dtype, device=device)
    x_1K, residual_1K, weight_K = tensors(1, width), tensors(1, width), tensors(width)
    weight_OK = tensors(num_out, width)
    bias_O = tensors(num_out) if biased else None
    same(linear.row(x_1K, weight_OK, bias_O), twin.row(x_1K, weight_OK, bias_O))
    weight_OK = weight_OK.to(weight_dtype or dtype)
    before = residual_1K.clone()
    arguments = (x_1K if add else None, residual_1K, (weight_K, 1e-6), weight_OK, bias_O)
    mine, right = linear.norm_row(*arguments, keep=True), twin.norm_row(*arguments)
    assert torch.equal(residual_1K, before), "the residual is not written"
    assert mine.y_1O.dtype == weight_OK.dtype
    for one, two in zip(mine, right, strict=True):
        same(one, two)
    assert linear.norm_row(*arguments).h_1K is None

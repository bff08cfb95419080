"""Compile every kernel for an AMD GPU that is not here; prints a line a kernel.

A script of its own: Triton decides at its first import whether it compiles or interprets. Nothing runs: launches go to
tensors without memory.
"""

from types import SimpleNamespace

import torch
from route_cases import plans, scene
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from truegate.kernels import attention, gate, linear, norm
from truegate.kernels.experts import experts
from truegate.kernels.route import Route
from truegate.kernels.sizes import Sizes
from truegate.kernels.tuning import Config, Product
from truegate.law.spec import Activation
from truegate.layers.paged import PagedChunks, PagedDecodes


class Amd:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self):
        return GPUTarget("hip", "gfx942", 64)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    print(self.__name__, "hsaco" if kernel.asm.get("hsaco") else "not compiled", flush=True)
    return kernel


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def run_experts(path: str, num_rows: int) -> None:
    slots, hidden, width = 8, 256, 128
    product = Product(block_n=64, block_k=64, stages=2, warps=4)
    sizes = Sizes(num_slots=slots, hidden=hidden, width=width, activation=Activation.SILU, clamp=None, at_input=False)
    experts(
        meta(num_rows, hidden), meta(slots, 2 * width, hidden), meta(slots, hidden, width), (None, None),
        numbers(num_rows, 2), meta(num_rows, 2, dtype=torch.float32), sizes,
        Config(path=path, block_m=32, gate_up=product, down=product))  # fmt: skip


def run_attention() -> None:
    q, rows = meta(40, 8, 64), meta(64, 2, 2, 64)
    keys = rows[:, 0], None, rows[:, 1]
    table = numbers(4, 16)
    decodes = PagedDecodes(seqs_D=numbers(40), contexts_D=numbers(40), table_NP=table, page_size=16, num_splits=4)
    attention.decode((q, None), keys, decodes, scale=0.1)
    chunks = PagedChunks(chunks_C4=numbers(2, 4), blocks_B2=numbers(3, 2), table_NP=table, page_size=16)
    attention.prefill((q, None), keys, chunks, meta(40, 8, 64), scale=0.1)


def run_rows() -> None:
    """Norms, rotation, router logits, one row's products."""
    x, weight = meta(40, 256), meta(256)
    norm.rms_norm(x, weight, 1e-6, meta(40, 256))
    norm.silu_mul(meta(40, 256))
    for num_rows in (5, 200):
        gate.gate(meta(num_rows, 256), meta(64, 256, dtype=torch.float32))
        step = SimpleNamespace(positions_T=meta(num_rows, dtype=torch.int64), slots_T=meta(num_rows, dtype=torch.int64))
        rotations = meta(99, 64, dtype=torch.float32)
        heads = (meta(num_rows, 12 * 64), (8, 2), (meta(10, 64), 1e-6), rotations, step, meta(64, 256))
        norm.rotate_and_store(*heads)
        latent, q = meta(num_rows, 576), meta(num_rows, 8, 64)
        norm.store_latent(latent, q, (meta(512), 1e-6), rotations, step, meta(64, 576))
    linear.norm_row(meta(1, 256), meta(1, 256), (weight, 1e-6), meta(512, 256))


def run_router() -> None:
    for plan in list(plans().values())[::6]:
        Route(plan)(**scene(plan, 9, device="meta", coarse=True, invalid=True))


if __name__ == "__main__":
    torch.version.hip = "none here"  # the kernels' forms for AMD
    driver.set_active(Amd())
    launch, JITFunction.run = JITFunction.run, compile_only
    run_router()
    run_rows()
    run_attention()
    for way, count in (("rows", 1), ("inline", 4), ("ordered", 40), ("ordered", 3000)):
        run_experts(way, count)

"""The kernels that work row by row (norms, rotation and the pool, router logits, one row's products) on the GPU here.

    python benchmarks/gpu_rows.py [--shapes qwen3 v2_lite v3] [--rows 1 8 32 128 8192] [--json FILE]

Each line: ours as the engine calls it, torch's own operations for the same, and the floor: the larger of the bytes over
the copy bandwidth and the operations over the bf16 matmul rate, both measured first. share = floor / ours. bf16, random
data, median of CUDA graph replays. Weights are rotated beyond the L2 cache at every size, rows where they exceed it
too: those of a decode step were written a moment ago. Below about 2 us a launch itself is what is measured.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_kernels import BF16, ceilings, graph_us
from machine import need_gpu, versions
from torch.nn import functional as F

from truegate.kernels import gate, linear, norm
from truegate.kernels.ref import norm as twin

ROWS = (1, 8, 32, 128, 8192)
CACHE = 200 << 20  # bytes that push each other out of the L2 cache
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's sizes: `heads` (query, key) of `size`, or `latents`: query heads and the query's rank (0: none)."""

    name: str
    hidden: int
    experts: int
    dense: int  # width of its dense MLP, 0: none
    normed: tuple[int, ...]  # outputs of one row's products that follow a norm
    plain: tuple[tuple[int, int], ...]  # (outputs, inputs) of the others
    heads: tuple[int, int] | None = None
    size: int = 128
    latents: tuple[int, int] | None = None


SHAPES = (
    Shape(name="qwen3", hidden=2048, experts=128, dense=0, normed=(5120,), plain=((2048, 4096),), heads=(32, 4)),
    Shape(name="v2_lite", hidden=2048, experts=64, dense=10944, normed=(3648, 21888),
          plain=((2048, 2048), (2048, 10944)), latents=(16, 0)),
    Shape(name="v3", hidden=7168, experts=256, dense=18432, normed=(2112, 36864),
          plain=((24576, 1536), (7168, 16384), (7168, 18432)), latents=(128, 1536)),
)  # fmt: skip
C, R, NOPE = 512, 64, 128  # of every DeepSeek model


@dataclass(frozen=True)
class Case:
    """A kernel at one size: its two callables, their rotated inputs, and what the floor counts."""

    kernel: str
    sizes: str
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    inputs: list[tuple]
    num_bytes: int
    operations: int = 0


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def copies(num_bytes: int, most: int = 64) -> range:
    return range(max(2, min(most, -(-CACHE // num_bytes))))


def norm_case(num_rows: int, width: int) -> Case:
    def theirs(x, residual, weight):
        return F.rms_norm(residual.add_(x), (width,), weight, EPS)

    num_bytes = num_rows * width * 2 * 4
    inputs = [(random(num_rows, width), random(num_rows, width), random(width)) for _ in copies(num_bytes)]
    return Case("add and rms_norm", f"{width}", lambda x, r, w: norm.rms_norm(x, w, EPS, r), theirs, inputs, num_bytes)


def gate_case(num_rows: int, experts: int, width: int) -> Case:
    rows, weights = num_rows * width * 2, experts * width * 4
    x = [random(num_rows, width) for _ in copies(rows, 8)]
    inputs = [
        (x[n % len(x)], random(experts, width, dtype=torch.float32)) for n in copies(weights + rows // len(x), 256)
    ]
    return Case(
        "gate", f"{width} -> {experts}", gate.gate, lambda x, w: F.linear(x.float(), w), inputs,
        rows + weights + num_rows * experts * 4, 3 * 2 * num_rows * experts * width,
    )  # fmt: skip


def step_of(num_rows: int, rotary: int) -> tuple[SimpleNamespace, torch.Tensor]:
    """Scattered slots, prompts of 1,024 positions, and the cosines and sines of `rotary` columns."""
    angles = torch.rand(1024, rotary // 2, device="cuda") * 6.3
    rotations_XR = torch.stack((angles.cos(), angles.sin()), -1).flatten(1)
    slots = torch.randperm(num_rows, device="cuda")
    return SimpleNamespace(slots_T=slots, positions_T=torch.arange(num_rows, device="cuda") % 1024), rotations_XR


def rotate_case(num_rows: int, heads: tuple[int, int], size: int) -> Case:
    width, pool = (heads[0] + 2 * heads[1]) * size, 2 * heads[1] * size
    step, rotations = step_of(num_rows, size)
    weight = random(sum(heads), size), EPS
    num_bytes = num_rows * 2 * 2 * width  # read; queries written back, keys and values to the pool
    inputs = [(random(num_rows, width), random(num_rows, pool)) for _ in copies(num_bytes)]

    def run(kernel: Any, qkv: torch.Tensor, rows: torch.Tensor) -> None:
        kernel.rotate_and_store(qkv, heads, weight, rotations, step, rows)

    sizes = f"{heads[0]} and {heads[1]} heads of {size}"
    return Case("rotate_and_store", sizes, partial(run, norm), partial(run, twin), inputs, num_bytes)


def latent_case(num_rows: int, num_heads: int, q_rank: int) -> Case:
    step, rotations = step_of(num_rows, R)
    weight = random(C), EPS
    num_bytes = num_rows * 2 * 2 * (C + R + num_heads * R)
    inputs = []
    for _ in copies(num_bytes):
        nope, rope = num_heads * NOPE, num_heads * R
        if q_rank:
            latent, q = random(num_rows, q_rank + C + R)[:, q_rank:], random(num_rows, nope + rope)[:, nope:]
        else:
            _, latent, q = random(num_rows, nope + C + R + rope).split((nope, C + R, rope), 1)
        inputs.append((latent, q.unflatten(1, (num_heads, R)), random(num_rows, C + R)))

    def run(kernel: Any, latent: torch.Tensor, q: torch.Tensor, pool: torch.Tensor) -> None:
        kernel.store_latent(latent, q, weight, rotations, step, pool)

    return Case("store_latent", f"{num_heads} heads", partial(run, norm), partial(run, twin), inputs, num_bytes)


def silu_case(num_rows: int, width: int) -> Case:
    def theirs(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    num_bytes = num_rows * width * 2 * 3
    inputs = [(random(num_rows, 2 * width),) for _ in copies(num_bytes)]
    return Case("silu_mul", f"{width}", norm.silu_mul, theirs, inputs, num_bytes)


def row_case(num_out: int, width: int) -> Case:
    num_bytes, x = num_out * width * 2, random(1, width)
    inputs = [(random(num_out, width),) for _ in copies(num_bytes)]
    return Case("row", f"{width} -> {num_out}", partial(linear.row, x), partial(F.linear, x), inputs, num_bytes)


def norm_row_case(num_out: int, width: int, dtype: torch.dtype = BF16) -> Case:
    """The residual sum, its norm and a product; float32: router logits and the row they are of."""
    x, residual, weight = random(1, width), random(1, width), random(width)
    num_bytes, keep = num_out * width * dtype.itemsize, dtype == torch.float32
    inputs = [(random(num_out, width, dtype=dtype),) for _ in copies(num_bytes, 256)]

    def ours(matrix):
        return linear.norm_row(x, residual, (weight, EPS), matrix, keep=keep)

    def theirs(matrix):
        return F.linear(F.rms_norm(residual + x, (width,), weight, EPS).to(dtype), matrix)

    return Case("norm_row", f"{width} -> {num_out}{' float32' if keep else ''}", ours, theirs, inputs, num_bytes)


def cases(shape: Shape, num_rows: int) -> Iterator[Case]:
    yield norm_case(num_rows, shape.hidden)
    yield gate_case(num_rows, shape.experts, shape.hidden)
    if shape.heads is not None:
        yield rotate_case(num_rows, shape.heads, shape.size)
    if shape.latents is not None:
        yield latent_case(num_rows, *shape.latents)
    if shape.dense:
        yield silu_case(num_rows, shape.dense)
    if num_rows == 1:
        yield norm_row_case(shape.experts, shape.hidden, torch.float32)
        for num_out in shape.normed:
            yield norm_row_case(num_out, shape.hidden)
        for product in shape.plain:
            yield row_case(*product)


def measure(case: Case, bandwidth: float, rate: float) -> dict[str, float]:
    """Microseconds a call; a graph of at least 12 calls, so that its own start does not show."""
    many = case.inputs * -(-12 // len(case.inputs))
    us = graph_us(case.ours, many, repeats=9)
    floor = 1e6 * max(case.num_bytes / bandwidth, case.operations / rate)
    return {"us": us, "torch_us": graph_us(case.torch, case.inputs[:4], repeats=5), "floor_us": floor}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[s.name for s in SHAPES], choices=[s.name for s in SHAPES])
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    need_gpu()
    bandwidth, rate = ceilings()
    print(versions())
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s")
    print("shape       T  kernel            sizes                        us   torch   floor  share", flush=True)
    found = []
    for shape in (s for s in SHAPES if s.name in options.shapes):
        for num_rows in options.rows:
            for case in cases(shape, num_rows):
                took = measure(case, bandwidth, rate)
                found.append({"shape": shape.name, "T": num_rows, "kernel": case.kernel, "sizes": case.sizes, **took})
                print(f"{shape.name:8s} {num_rows:5d}  {case.kernel:17s} {case.sizes:24s} {took['us']:7.2f} "
                      f"{took['torch_us']:7.1f} {took['floor_us']:7.2f}  {took['floor_us'] / took['us']:5.0%}",
                      flush=True)  # fmt: skip
                del case
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

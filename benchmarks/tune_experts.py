"""Searches tilings of the expert kernels on the GPU that is here and writes src/truegate/kernels/tuned.json.

    python benchmarks/tune_experts.py [--shapes ...] [--rows ...] [--workers 12] [--seconds 300]

The two products are timed apart for every path and tile height, then the fastest pair with what stands around it is
taken. Kernels are compiled by worker processes first. T rows, BM tile height.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import SHAPES, Layer, Shape, batch, graph_us, layer_of, ours, route_plans, sizes_of
from machine import need_gpu, versions
from triton import OutOfResources

from truegate.kernels.grouped import grouped_gemm, padded
from truegate.kernels.permute import permute
from truegate.kernels.route import Route
from truegate.kernels.tuning import TABLE, Config, Product, as_text, shape_key, to_json
from truegate.law.plan import Plan

ROUTER_ROWS = (64, 512, 4096, 16384)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)


def products(*tiles: tuple[int, int, int, int], **more: Any) -> list[Product]:
    return [Product(block_n=n, block_k=k, stages=stages, warps=warps, **more) for n, k, stages, warps in tiles]


# (first products, second products); for one row, the first of each stands beside the others while those are timed
UNITS = (
    products((2, 512, 0, 4), (4, 512, 0, 4), (4, 1024, 0, 4), (4, 512, 1, 4), (2, 512, 1, 4), (2, 1024, 1, 4)),
    products((4, 256, 0, 4), (2, 256, 0, 2), (2, 512, 0, 4), (4, 512, 0, 4), (2, 2048, 0, 4), (4, 2048, 0, 8)),
)
TILES = {  # by tile height
    16: (
        products((32, 128, 3, 4), (32, 128, 5, 4), (64, 128, 3, 4), (32, 256, 3, 4))
        + products((32, 128, 4, 4), (64, 128, 3, 4), tma=True),
        products((64, 128, 3, 4), (64, 128, 5, 4), (128, 128, 3, 4), (64, 256, 3, 4))
        + products((64, 128, 4, 4), (128, 128, 3, 4), tma=True),
    ),
    32: (
        products((64, 128, 3, 4), (64, 64, 5, 4)) + products((64, 128, 3, 4), tma=True),
        products((128, 128, 3, 4), (64, 128, 4, 4)) + products((128, 128, 3, 4), tma=True),
    ),
    64: (
        products((64, 64, 3, 4), (64, 128, 3, 4)) + products((64, 64, 3, 4), (64, 64, 4, 4), tma=True),
        products((128, 64, 3, 4)) + products((128, 64, 4, 4), (128, 64, 3, 4), (128, 128, 3, 4), tma=True),
    ),
    128: (
        products((128, 64, 3, 8), (64, 64, 3, 8), halve=True)
        + products((128, 64, 3, 8), (128, 64, 4, 8), (64, 64, 3, 8), (64, 64, 3, 4), tma=True, halve=True)
        + products((128, 64, 3, 8), tma=True, halve=True, persistent=1)
        + products((128, 64, 4, 8), tma=True, halve=True, split=True),
        products((256, 64, 3, 8), (256, 64, 4, 8), (128, 64, 3, 8), (128, 64, 3, 4), tma=True, halve=True)
        + products((256, 64, 3, 8), tma=True, halve=True, persistent=1)
        + products((128, 64, 3, 8), tma=True, halve=True, persistent=2)
        + products((256, 64, 4, 8), tma=True, halve=True, split=True),
    ),
}


def choices(num_rows: int, shape: Shape) -> Iterator[tuple[str, int, list[Product], list[Product]]]:
    """(path, tile height, gated candidates, second candidates) worth trying at a row count."""
    if num_rows == 1:
        yield "rows", 1, *UNITS
        return
    each = num_rows * shape.slots * shape.share / shape.local
    if num_rows * shape.slots <= 256:
        yield "inline", 16, *TILES[16]
    for height, tried in TILES.items():
        if height / 8 <= each <= height * 6 or (height == 16 and 0.5 <= each < 2) or (height == 128 and each > 128):
            yield "ordered", height, *tried


def alone(shape: Shape, layer: Layer, height: int, one: Product, first: bool, x, ids, weights, order, h):
    """One product of a layer, in the order found before."""
    a, w = (x, layer.gate_up) if first else (h, layer.down)
    return grouped_gemm(a, w, None, weights, ids, order, sizes_of(shape), height, one, first=first, gated=first)


def ordered(shape: Shape, inputs: list[tuple], path: str, height: int) -> list[tuple]:
    """Inputs of `alone`: with an order where the path has one, and something to put through the second product."""
    found = []
    for x, ids, weights in inputs:
        order = permute(ids, shape.local, height) if path == "ordered" else None
        found.append((x, ids, weights, order, torch.randn((ids.numel(), shape.width), device="cuda").to(x.dtype)))
    return found


def jobs(shapes: list[Shape], rows: list[int]) -> Iterator[tuple[str, int, str, int, Product, bool]]:
    """What has to be compiled, the same kernel once. A row count decides only how many ids a program looks at."""
    seen = set()
    for shape in shapes:
        for num_rows in rows:
            for path, height, firsts, seconds in choices(num_rows, shape):
                looks_at = padded(num_rows * shape.slots) if path == "inline" else 0
                for first, tried in ((True, firsts), (False, seconds)):
                    for one in tried:
                        key = (shape.name, path, height, one, first, looks_at)
                        if key not in seen:
                            seen.add(key)
                            yield shape.name, num_rows, path, height, one, first


_layer: dict[str, Any] = {}


def compile_one(job: tuple[str, int, str, int, Product, bool]) -> str | None:
    """In a worker: launch once, so that the kernel stands in the compilation cache. The error, if any."""
    name, num_rows, path, height, one, first = job
    shape = next(s for s in SHAPES if s.name == name)
    if _layer.get("name") != name:
        _layer.clear()
        P, D, F = shape.local, shape.hidden, shape.width
        made = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in ((P, 2 * F, D), (P, D, F))]
        _layer.update(name=name, layer=Layer(*made))
    try:
        inputs = [batch(shape, min(num_rows, 512) if path != "inline" else num_rows, 0)]
        if path == "rows":
            gate_up, down = (one, UNITS[1][0]) if first else (UNITS[0][0], one)
            ours(shape, _layer["layer"], Config(path=path, block_m=1, gate_up=gate_up, down=down), *inputs[0])
        else:
            alone(shape, _layer["layer"], height, one, first, *ordered(shape, inputs, path, height)[0])
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, for one: such a tiling is no candidate
        return f"{type(error).__name__}: {str(error)[:100]}"
    return None


def tune(shape: Shape, layer: Layer, num_rows: int, failed: set) -> tuple[Config, float]:
    """The fastest configuration found and its time over the whole layer, in us."""
    inputs = [batch(shape, num_rows, seed) for seed in range(6 if num_rows <= 512 else 2)]
    best: tuple[Config, float] | None = None
    for path, height, firsts, seconds in choices(num_rows, shape):
        fastest: list[tuple[float, Product]] = []
        given = inputs if path == "rows" else ordered(shape, inputs, path, height)
        for first, tried in ((True, firsts), (False, seconds)):
            timed = []
            for one in tried:
                if (shape.name, path, height, one, first) in failed:
                    continue
                call = partial(alone, shape, layer, height, one, first)
                if path == "rows":  # timed as whole layers: the other product stands still
                    gate_up, down = (one, UNITS[1][0]) if first else (UNITS[0][0], one)
                    whole = Config(path=path, block_m=1, gate_up=gate_up, down=down)
                    call = partial(ours, shape, layer, whole)
                try:
                    timed.append((graph_us(call, given, repeats=5), one))
                except OutOfResources as error:  # more shared memory or registers than there are: no candidate
                    print(f"  {path} {height} {one}: {error}", flush=True)
            fastest += sorted(timed, key=lambda pair: pair[0])[:1]
        if len(fastest) < 2:
            continue
        (first_us, gate_up), (second_us, down) = fastest
        config = Config(path=path, block_m=height, gate_up=gate_up, down=down)
        us = graph_us(partial(ours, shape, layer, config), inputs, repeats=9)
        print(f"  {path} {height}: {us:.1f} us ({first_us:.1f} + {second_us:.1f})", flush=True)
        if best is None or us < best[1]:
            best = config, us
    assert best is not None
    return best


def tune_router(plan: Plan) -> dict[str, int]:
    """Rows a program that is fastest at each row count, and clearly: one is simplest."""
    bias = torch.randn(plan.spec.num_experts, device="cuda") if plan.spec.has_selection_bias else None
    best = {}
    for num_rows in ROUTER_ROWS:
        inputs = [(torch.randn((num_rows, plan.spec.num_choices), device="cuda"),) for _ in range(32)]
        times = {rows: graph_us(partial(Route(plan, rows_a_program=rows), bias_E=bias), inputs) for rows in (1, 2, 4)}
        fastest = min(times, key=times.__getitem__)
        best[str(num_rows)] = fastest if times[fastest] < 0.97 * times[1] else 1
        print(f"router {plan.spec.family} T {num_rows}: {times}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[s.name for s in SHAPES], choices=[s.name for s in SHAPES])
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--workers", type=int, default=12, help="0: compile while timing")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache, time nothing")
    parser.add_argument(
        "--seconds", type=float, default=300, help="stop compiling after this long, tune with what is there"
    )
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    need_gpu()
    print(versions(), flush=True)
    shapes = [s for s in SHAPES if s.name in args.shapes]
    todo, started = list(jobs(shapes, args.rows)), time.perf_counter()
    failed = compile_all(todo, args.workers, args.seconds) if args.workers else set()
    print(f"{len(todo)} kernels, {len(failed)} not usable, {time.perf_counter() - started:.0f} s", flush=True)
    if args.compile_only:
        return
    table = json.loads(args.out.read_text()) if args.out.exists() else {}
    of_device = table.setdefault(torch.cuda.get_device_name(), {"router": {}, "experts": {}})
    with torch.inference_mode():
        for plan in route_plans().values():
            of_device["router"][str(plan.spec.num_choices)] = tune_router(plan)
        for shape in shapes:
            layer = layer_of(shape)
            key = shape_key(width=shape.slots, num_slots=shape.local, hidden=shape.hidden, expert_width=shape.width,
                            share=shape.share)  # fmt: skip
            for num_rows in args.rows:
                config, us = tune(shape, layer, num_rows, failed)
                of_device["experts"].setdefault(key, {})[str(num_rows)] = to_json(config)
                print(f"{shape.name} T {num_rows}: {us:.1f} us, {config}", flush=True)
                args.out.write_text(as_text(table))
            del layer
            torch.cuda.empty_cache()


def compile_all(todo: list, workers: int, seconds: float) -> set:
    """Compile in worker processes; what failed or was not reached in time."""
    deadline, failed = time.perf_counter() + seconds, set()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = [(job, pool.apply_async(compile_one, (job,))) for job in todo]
        for job, result in results:
            name, _, path, height, one, first = job
            try:
                error = result.get(timeout=max(0.0, deadline - time.perf_counter()))
            except multiprocessing.TimeoutError:
                error = "not reached"
            if error is not None:
                failed.add((name, path, height, one, first))
                print(f"  {name} {path} {height} {one}: {error}", flush=True)
        pool.terminate()
    return failed


if __name__ == "__main__":
    main()

"""Attention kernels on one GPU, beside their floors: bytes (decode) or operations (prefill) at rates measured first.

    python benchmarks/gpu_attention.py [--sweep] [--context 1152]

Decode: a captured pass over as many layers as keep the pool out of the L2 cache, per layer, at each batch size; with
--sweep for several tiles and splits, to choose `_decode_tile` and `num_splits` by. Prefill: microseconds of a layer,
the floor of its operations at the measured matrix rate, and the share of that rate, of prompts and of rows behind some.
"""

import argparse
import itertools

import torch
from gpu_kernels import ceilings
from machine import need_gpu, versions

from truegate.cache.pools import MHAPool, MLAPool
from truegate.kernels import attention
from truegate.layers.paged import paged_step
from truegate.types import Batch

PAGE = 16
TILES = {  # slots, stages, warps
    "gqa": ((64, 5, 4), (32, 5, 4), (64, 7, 4), (128, 5, 8)), "mla": ((32, 5, 8), (32, 5, 4), (64, 3, 8)),
}  # fmt: skip

PREFILLS = (1, 1024, 1024), (8, 1024, 1024), (1, 8192, 8192), (8, 256, 1280)  # prompts, rows, context after them


def timed(run, repeats: int = 20) -> float:
    """Median microseconds of a captured `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))[repeats // 2] * 1e3


def batch_of(parts, pool) -> Batch:
    pages = -(-max(context for _, context in parts) // PAGE)
    table_NP = torch.randperm(len(parts) * pages, device="cuda").view(len(parts), pages) + 1
    num_rows = sum(rows for rows, _ in parts)
    rows_T = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
    return Batch(
        token_ids_T=rows_T, positions_T=rows_T, valid_T=rows_T == 0, slots_T=rows_T, page_table_NP=table_NP.int(),
        query_lens=[rows for rows, _ in parts], context_lens=[context for _, context in parts], logit_rows_M=rows_T,
    )  # fmt: skip


def make(kind: str, parts, layers: int):
    pages = 1 + sum(-(-context // PAGE) for _, context in parts)
    width, cls = (1024, MHAPool) if kind == "gqa" else (576, MLAPool)
    pool = cls(
        num_layers=layers, num_pages=pages, page_size=PAGE, width=width, dtype=torch.bfloat16, device="cuda"
    )  # fmt: skip
    pool.data.normal_()
    return pool, batch_of(parts, pool)


def decode(kind: str, size: int, context: int, splits: int | None) -> tuple[float, int]:
    """(microseconds, bytes read) of one layer."""
    num_bytes = size * context * (1024 if kind == "gqa" else 576) * 2
    layers = max(2, min(32, -(-(200 << 20) // num_bytes)))
    pool, batch = make(kind, [(1, context)] * size, layers)
    step = paged_step(batch, pool, torch.zeros(1, 2, device="cuda"), num_splits=splits)
    if kind == "gqa":
        q, scale = (torch.randn(size, 32, 128, device="cuda", dtype=torch.bfloat16), None), 128**-0.5
    else:
        q, scale = tuple(torch.randn(size, 16, n, device="cuda", dtype=torch.bfloat16) for n in (512, 64)), 192**-0.5

    def run() -> None:
        for layer in range(layers):
            rows = pool.rows(layer)
            if kind == "gqa":
                kv = rows.view(-1, 2, 4, 128)
                keys = kv[:, 0], None, kv[:, 1]
            else:
                latent, rest = rows[:, None].split((512, 64), -1)
                keys = latent, rest, latent
            attention.decode(q, keys, step.decodes, scale=scale)

    return timed(run) / layers, num_bytes


def prefill(kind: str, count: int, length: int, context: int) -> tuple[float, float]:
    """(microseconds, operations) of one layer."""
    pool, batch = make(kind, [(length, context)] * count, 1)
    step = paged_step(batch, pool, torch.zeros(1, 2, device="cuda"))
    num_rows, num_keys = count * length, count * context

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    if kind == "gqa":
        kv = pool.rows(0).view(-1, 2, 4, 128)
        q, keys, chunks = (random(num_rows, 32, 128), None), (kv[:, 0], None, kv[:, 1]), step.chunks
        heads, width = 32, 256
    else:
        kv = random(num_keys, 16, 256)
        rest = random(num_keys, 1, 64).expand(-1, 16, -1)
        q = random(num_rows, 16, 128), random(num_rows, 16, 64)
        keys, chunks = (kv[..., :128], rest, kv[..., 128:]), step.expanded[0].chunks
        heads, width = 16, 320
    y = random(num_rows, heads, 128)
    operations = 2 * heads * width * count * length * (context - (length - 1) / 2)
    return timed(lambda: attention.prefill(q, keys, chunks, y, scale=0.08)), operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=("gqa", "mla"), nargs="*", default=[])
    parser.add_argument("--context", type=int, default=1152)
    options = parser.parse_args()
    need_gpu()
    print(versions())
    bandwidth, rate = ceilings()
    torch.cuda.empty_cache()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
    for kind, size in itertools.product(("gqa", "mla"), (1, 8, 32, 128)):
        us, num_bytes = decode(kind, size, options.context, None)
        floor = num_bytes / bandwidth * 1e6
        print(f"{kind} decode B={size:<4} {us:7.1f} us  floor {floor:6.1f} ({floor / us:4.0%})", flush=True)
        if kind in options.sweep:
            found = []
            usual = attention._decode_tile
            tiles = TILES[kind]
            for tile, splits in itertools.product(tiles, (1, 2, 4, 8, 16, 32, 64)):
                if not 64 <= size * splits * (4 if kind == "gqa" else 1) <= 4096:
                    continue
                attention._decode_tile = lambda *_, tile=tile: tile
                try:
                    found.append((decode(kind, size, options.context, splits)[0], splits, tile))
                except Exception as error:
                    print("   ", splits, tile, type(error).__name__)
            attention._decode_tile = usual
            print("   " + "; ".join(f"{us:.1f} us splits {s} tile {t}" for us, s, t in sorted(found)[:5]), flush=True)
    for kind, shape in itertools.product(("gqa", "mla"), PREFILLS):
        us, operations = prefill(kind, *shape)
        floor = operations / rate * 1e6
        what = "{} x {:<4} to {:<4}".format(*shape)
        print(f"{kind} prefill {what} {us:7.1f} us  floor {floor:6.1f} ({floor / us:4.0%})", flush=True)


if __name__ == "__main__":
    main()

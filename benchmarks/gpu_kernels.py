"""Router and expert kernels against torch and against the floor, on the GPU that is here.

    python benchmarks/gpu_kernels.py [--shapes qwen3 v2_lite v3_slice] [--rows 1 8 32 ...] [--parts] [--json FILE]

Every figure is the median of CUDA graph replays, random data. Experts: bf16, rotated inputs, weights not in the cache;
floor = max(bytes of the experts hit / measured copy bandwidth, operations / measured matmul rate). Routers: with their
logits in the L2 cache, as in the engine, which wrote them a moment ago; and with nothing of theirs in it: calls that
share no logits and no biases, after a sweep through the cache. T rows.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import need_gpu, versions

from truegate.kernels.combine import combine
from truegate.kernels.experts import experts
from truegate.kernels.grouped import grouped_gemm
from truegate.kernels.permute import permute
from truegate.kernels.ref.route import route as twin
from truegate.kernels.route import Route
from truegate.kernels.sizes import Sizes, columns_at_once
from truegate.kernels.tuning import Config, config_of
from truegate.law.order import Tables
from truegate.law.placement import place
from truegate.law.plan import Choices, Plan
from truegate.law.spec import Activation, Denominator, Groups, GroupScore, RoutingSpec, Score, Shared
from truegate.moe.backends import choose, compile_layer

ROWS = (1, 8, 32, 128, 512, 4096, 16384)
BF16 = torch.bfloat16
SWEEP = 192 << 20  # bytes read to have nothing else in the L2 cache
COPIES = 16  # counters of an expert
WARM = 16 << 20  # bytes of inputs that stay in it


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer's experts: P local ones of `total`, J slots a row, D hidden, F expert width."""

    name: str
    total: int
    local: int
    slots: int
    hidden: int
    width: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.width * 2

    @property
    def share(self) -> float:
        return self.local / self.total

    def config(self, num_rows: int) -> Config:
        """The tuned tiling, as the layer looks it up."""
        return config_of(
            torch.cuda.get_device_name(), num_rows=num_rows, width=self.slots, num_slots=self.local,
            hidden=self.hidden, expert_width=self.width, share=self.share, element_size=2,
        )  # fmt: skip


SHAPES = (
    Shape(name="qwen3", total=128, local=128, slots=8, hidden=2048, width=768),
    Shape(name="v2_lite", total=64, local=64, slots=6, hidden=2048, width=1408),
    Shape(name="v3_slice", total=256, local=32, slots=8, hidden=7168, width=2048),
)


def graph_us(call: Callable[..., Any], inputs: list[tuple], *, repeats: int = 15) -> float:
    """Median time of one call in a captured graph of one call an input, in us."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(*inputs[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call(*one) for one in inputs]
        times = [elapsed_s(graph.replay) * 1e6 / len(inputs) for _ in range(repeats + 2)]
    del kept
    return median(times[2:])


def cold_us(calls: list[Callable[[], Any]], *, repeats: int = 15) -> float:
    """Median time of a call in a captured graph of calls that share no data, none of it in the L2 cache, in us."""
    sweep = torch.zeros(SWEEP // 4, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call() for call in calls]
        times = []
        for _ in range(repeats + 2):
            sweep.sum()  # reads: what it pushes out need not be written back while the clock runs
            times.append(elapsed_s(graph.replay))
    del kept
    return median(times[2:]) * 1e6 / len(calls)


def elapsed_s(call: Callable[[], Any]) -> float:
    """Device seconds of one call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def ceilings() -> tuple[float, float]:
    """(copy bandwidth in bytes/s, read plus written; bf16 matmul rate in operations/s)."""
    a, b = torch.empty((2, 1 << 31), dtype=torch.uint8, device="cuda").unbind()
    left, right = torch.randn((2, 8192, 8192), device="cuda").to(BF16).unbind()

    copy = median([elapsed_s(lambda: b.copy_(a)) for _ in range(12)][2:])
    product = median([elapsed_s(lambda: left @ right) for _ in range(12)][2:])
    return 2 * a.numel() / copy, 2 * 8192**3 / product


@dataclass(frozen=True)
class Layer:
    """Random weights of one layer."""

    gate_up: torch.Tensor
    down: torch.Tensor


def layer_of(shape: Shape) -> Layer:
    def draw(*size: int) -> torch.Tensor:
        made = torch.empty(size, dtype=BF16, device="cuda")
        for one in made:
            one.normal_(std=size[-1] ** -0.5)
        return made

    P, D, F = shape.local, shape.hidden, shape.width
    return Layer(draw(P, 2 * F, D), draw(P, D, F))


def batch(shape: Shape, num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x_TD, ids_TJ int32, weights_TJ): uniform choices, remote experts -1; one row of a slice has one local expert."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    ids = torch.rand((num_rows, shape.total), device="cuda", generator=g).argsort(1)[:, : shape.slots].int()
    ids = torch.where(ids < shape.local, ids, -1)
    if shape.share < 1 and num_rows == 1:
        ids.fill_(-1)
        ids[0, seed % shape.slots] = seed * 5 % shape.local
    weights = torch.rand((num_rows, shape.slots), device="cuda", generator=g)
    return torch.randn((num_rows, shape.hidden), device="cuda", generator=g).to(BF16), ids, weights


def sizes_of(shape: Shape) -> Sizes:
    return Sizes(num_slots=shape.local, hidden=shape.hidden, width=shape.width, activation=Activation.SILU,
                 clamp=None, at_input=False, sparse=shape.share < 1)  # fmt: skip


def ours(shape: Shape, layer: Layer, config: Config, x: Any, ids: Any, weights: Any) -> torch.Tensor:
    return experts(x, layer.gate_up, layer.down, (None, None), ids, weights, sizes_of(shape), config)


def grouped(shape: Shape, layer: Layer, x: Any, ids: Any, weights: Any) -> torch.Tensor:
    """torch's grouped matmul as transformers uses it: sort, gather, two products, weigh, put back, sum."""
    flat = torch.where(ids < 0, shape.local, ids).flatten()
    found, order = flat.sort()
    counts = torch.histc(found, bins=shape.local, min=0, max=shape.local - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[order // shape.slots], layer.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, layer.down.transpose(1, 2), offs=ends)
    out = (out * weights.flatten()[order][:, None]).masked_fill((found >= shape.local)[:, None], 0.0)
    back = torch.empty_like(out)
    back[order] = out
    return back.view(*ids.shape, -1).sum(1).to(x.dtype)


def floor_us(shape: Shape, ids: torch.Tensor, bandwidth: float, rate: float) -> float:
    found = ids[ids >= 0]
    hit, rows = found.unique().numel(), found.numel()
    return 1e6 * max(hit * shape.expert_bytes / bandwidth, rows * shape.expert_bytes / rate)


def waste(ids: torch.Tensor, config: Config) -> float:
    """Rows computed over rows routed, of the first product."""
    counts, high = ids[ids >= 0].bincount(), config.block_m
    low = high // 2 if config.gate_up.halve else high  # what an expert's last tile is a multiple of
    return float(((counts + low - 1) // low * low).sum() / counts.sum())


def launches(call: Callable[..., Any], one: tuple) -> int:
    """Kernels and copies of one call, counted by the profiler."""
    call(*one)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(*one)
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())


def measure_experts(
    shape: Shape, rows: list[int], bandwidth: float, rate: float, *, parts: bool = False
) -> list[dict[str, Any]]:
    layer, lines = layer_of(shape), []
    for num_rows in rows:
        config = shape.config(num_rows)
        inputs = [batch(shape, num_rows, seed) for seed in range(8 if num_rows <= 512 else 2)]
        floor = sum(floor_us(shape, ids, bandwidth, rate) for _, ids, _ in inputs) / len(inputs)
        this, that = partial(ours, shape, layer, config), partial(grouped, shape, layer)
        got, want = this(*inputs[0]), that(*inputs[0])
        error = float((got.float() - want.float()).norm() / want.float().norm())
        us = graph_us(this, inputs)
        lines.append({
            "shape": shape.name, "T": num_rows, "us": us, "torch_us": graph_us(that, inputs, repeats=5),
            "floor_us": floor, "of_floor": us / floor, "launches": launches(this, inputs[0]),
            "torch_launches": launches(that, inputs[0]), "tile_waste": waste(inputs[0][1], config),
            "path": config.path, "error": error,
        })  # fmt: skip
        print(experts_line(lines[-1]), flush=True)
        if parts and num_rows >= 512 and config.path == "ordered":
            lines[-1]["parts"] = measure_parts(shape, layer, config, inputs)
            for name, took in lines[-1]["parts"].items():
                print(f"{shape.name:9s} {num_rows:5d} {took:8.1f}  {name}", flush=True)
    return lines


def measure_parts(shape: Shape, layer: Layer, config: Config, inputs: list[tuple]) -> dict[str, float]:
    """Microseconds of each launch of `experts` on path "ordered"; the second product, and the sum, over all columns."""
    sizes, block_m = sizes_of(shape), max(16, config.block_m)
    parts = columns_at_once(inputs[0][1].numel(), shape.hidden, layer.down.element_size())

    def find(ids, *_):
        permute(ids, shape.local, block_m)

    def first(ids, x, weights, order, *_):
        return grouped_gemm(x, layer.gate_up, None, weights, ids, order, sizes, block_m, config.gate_up, first=True,
                            gated=True)  # fmt: skip

    def second(ids, x, weights, order, h, *_):
        for some in parts:
            one = grouped_gemm(h, layer.down[:, some], None, weights, ids, order, sizes, block_m, config.down,
                               first=False, gated=False)  # fmt: skip
            yield some, one
            del one

    def add_up(ids, x, weights, order, h, found):
        y = torch.empty_like(x)
        for some, one in found:
            combine(one, ids, shape.local, y[:, some])

    given: list[tuple] = []
    for x, ids, weights in inputs:
        one = ids, x, weights, permute(ids, shape.local, block_m)
        h = first(*one)
        given.append((*one, h, list(second(*one, h))))
    many = given * -(-12 // len(given))  # so that the graph's own start does not show

    def gate_up(*one):  # keeps nothing, so that a graph of many needs the memory of one
        first(*one)

    def down(*one):
        for _ in second(*one):
            pass

    calls = {"permute": find, "gate and up": gate_up, "down": down, "sum": add_up}
    return {name: graph_us(call, many, repeats=7) for name, call in calls.items()}


EXPERTS_HEAD = "shape      T       us   torch   floor  of floor  launches (torch)  tile waste  path     error vs torch"


def experts_line(e: dict[str, Any]) -> str:
    return (
        f"{e['shape']:9s} {e['T']:5d} {e['us']:8.1f} {e['torch_us']:7.1f} {e['floor_us']:7.1f} {e['of_floor']:9.2f} "
        f"{e['launches']:9d} ({e['torch_launches']:2d})     {e['tile_waste']:8.2f}    {e['path']:8s} {e['error']:.1e}"
    )


def route_plans() -> dict[str, Plan]:
    """DeepSeek-V3 (256/8 of 8 groups), DeepSeek-V2 (160/6, softmax groups) and Qwen3 (128/8)."""
    v3 = RoutingSpec(
        family="deepseek_v3", num_experts=256, top_k=8, score=Score.SIGMOID, has_selection_bias=True,
        groups=Groups(count=8, kept=4, score=GroupScore.TOP2_SUM, fill=float("-inf")), denominator=Denominator.SUM,
        eps=1e-20, routed_scale=2.5, hidden=64, expert_intermediate=64,
    )  # fmt: skip
    v2 = replace(
        v3, family="deepseek_v2", num_experts=160, top_k=6, score=Score.SOFTMAX, has_selection_bias=False, eps=0.0,
        groups=Groups(count=8, kept=3, score=GroupScore.MAX, fill=0.0), denominator=Denominator.NONE, routed_scale=16.0,
    )  # fmt: skip
    qwen3 = replace(v2, family="qwen3_moe", num_experts=128, top_k=8, groups=None, denominator=Denominator.SUM,
                    routed_scale=1.0)  # fmt: skip
    backends = choose(experts="triton")
    return {s.family: compile_layer(s, backends, place(num_experts=s.num_experts), Choices()) for s in (v3, v2, qwen3)}


def whole_plan(spec: RoutingSpec) -> Plan:
    """All that the order law can add on one rank: a shared slot a row, and replicas of every eighth expert."""
    placement = place(num_experts=spec.num_experts, num_redundant=spec.num_experts // 8)
    spec = replace(spec, shared=Shared(intermediate=spec.expert_intermediate))
    return compile_layer(spec, choose(experts="triton"), placement, Choices(fuse_shared=True))


def biases(plan: Plan, *, device: str = "cuda") -> dict[str, Any]:
    spec = plan.spec
    return {"bias_E": torch.randn(spec.num_experts, device=device) if spec.has_selection_bias else None}


def routers(plan: Plan, num_rows: int, *, device: str = "cuda") -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(kernel, twin) of logits_TE; with replicas both count the rows of every expert and slot, the kernel in copies."""
    spec, placement = plan.spec, plan.placement
    given = {"valid_T": torch.ones(num_rows, dtype=torch.bool, device=device), **biases(plan, device=device)}
    if placement.is_identity:
        return partial(Route(plan), **given), partial(twin, plan, **given)
    given["tables"] = Tables(*(torch.from_numpy(t).to(device) for t in (placement.replicas_EX, placement.count_E)))
    sizes = placement.num_experts, placement.num_slots
    loads = [torch.zeros((COPIES, n), dtype=torch.int64, device=device) for n in sizes]
    theirs = [torch.zeros(n, dtype=torch.int64, device=device) for n in sizes]
    ones = torch.ones(num_rows * spec.top_k, dtype=torch.int64, device=device)

    def counting(logits: torch.Tensor) -> Any:
        routed = twin(plan, logits, **given)  # its own count brings a number to the host, which no graph can hold
        for load, ids in zip(theirs, (routed.logical_TK, routed.ids_TJ[:, : spec.top_k]), strict=True):
            load.scatter_add_(0, ids.flatten().long(), ones)
        return replace(routed, load_E=theirs[0], load_P=theirs[1])

    return partial(Route(plan), **given, load_E=loads[0], load_P=loads[1]), counting


def measure_route(rows: list[int]) -> list[dict[str, Any]]:
    lines = []
    plans = route_plans()
    plans["deepseek_v3, all"] = whole_plan(plans["deepseek_v3"].spec)
    for name, plan in plans.items():
        counts: tuple[int, ...] = ()
        for num_rows in rows:
            size = num_rows, plan.spec.num_experts
            different = max(2, min(32, WARM // (4 * size[0] * size[1])))
            inputs = [(torch.randn(size, device="cuda"),) for _ in range(different)]
            this, that = routers(plan, num_rows)
            counts = counts or (launches(this, inputs[0]), launches(that, inputs[0]))
            cold = [partial(this, torch.randn(size, device="cuda"), **biases(plan)) for _ in range(128)]
            lines.append({
                "router": name, "T": num_rows, "us": graph_us(this, inputs * -(-128 // different)),
                "cold_us": cold_us(cold), "torch_us": graph_us(that, (inputs * 2)[:4], repeats=5),
                "launches": counts[0], "torch_launches": counts[1],
            })  # fmt: skip
            print(route_line(lines[-1]), flush=True)
    print("all: a fused shared slot, replicas of every eighth expert, rows counted by expert and by slot "
          f"(in {COPIES} copies)")  # fmt: skip
    return lines


ROUTE_HEAD = "router                T  us, logits just written  us, cold L2   torch  launches (torch)"


def route_line(e: dict[str, Any]) -> str:
    return (
        f"{e['router']:17s} {e['T']:5d} {e['us']:24.2f} {e['cold_us']:12.2f} {e['torch_us']:7.1f} {e['launches']:9d} "
        f"({e['torch_launches']})"
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[s.name for s in SHAPES], choices=[s.name for s in SHAPES])
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--route-rows", nargs="*", type=int, default=[1, 64, 4096])
    parser.add_argument("--parts", action="store_true", help="from 512 rows also every launch of a layer alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpu()
    bandwidth, rate = ceilings()
    device = torch.cuda.get_device_name()
    print(versions())
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s")
    print(ROUTE_HEAD)
    found: dict[str, Any] = {"device": device, "bandwidth": bandwidth, "rate": rate}
    found["route"] = measure_route(args.route_rows)
    print(EXPERTS_HEAD)
    found["experts"] = []
    for shape in (s for s in SHAPES if s.name in args.shapes):
        found["experts"] += measure_experts(shape, args.rows, bandwidth, rate, parts=args.parts)
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

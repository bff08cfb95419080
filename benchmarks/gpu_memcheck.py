"""Run every kernel under compute-sanitizer: memcheck and racecheck, at small sizes off every block; a line a kernel.

    python benchmarks/gpu_memcheck.py [--tools memcheck racecheck ...] [--only GROUP ...] [--jobs 16]

Which kernels there are is read from src/truegate/kernels: one that is launched there and not here fails the run, as
does a flag of one (a constexpr bool, a tensor that may be None) seen in one state only. Expert tilings are those of
tuned.json. torch's caching allocator is off, so that each tensor ends where its memory ends. Two planted kernels, one
out of bounds and one with a race, must be found. Without a GPU the groups run interpreted, without the sanitizer.
racecheck misreads how warp groups hand over: it finds races in a small kernel that has none ("control"). Its findings
in the one kernel that has warp groups are not counted where the control has the like: as grave, between the same kinds
of accesses, both of them where groups start and end or one number is handed over. Any other finding there counts; that
these two are in order is for the eye, and for the tests that compare values.
"""

import argparse
import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import torch
from machine import versions

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "src" / "truegate" / "kernels"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
OF_THE_DEVICE = {"EARLY", "PRECISE"} | (set() if CUDA else {"SPLIT"})  # flags that say where a kernel runs
HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter cannot multiply bf16
PARTS = 8  # processes that share the longer groups: they mostly wait for the compiler


def launched_kernels() -> dict[str, str]:
    """Module by kernel: the functions under triton.jit that their own module launches as `name[grid](...)`.

    On a GPU gluon.jit's too, which cannot be interpreted.
    """
    found, jit = {}, re.compile(r"(triton|gluon)\.jit\b" if CUDA else r"triton\.jit\b")
    for path in sorted(KERNELS.glob("*.py")):
        tree = ast.parse(path.read_text())
        jitted = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef)
            and any(jit.match(ast.unparse(one)) for one in node.decorator_list)
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                if name in jitted:
                    found[f"{path.stem}.{name}"] = path.stem
    return found


class Seen:
    """How often each kernel was launched, in how many forms, and the states of its flags."""

    def __init__(self) -> None:
        self.kernels: dict[str, dict[str, Any]] = {}
        for name, module in launched_kernels().items():
            kernel = getattr(importlib.import_module(f"truegate.kernels.{module}"), name.split(".")[1])
            self.kernels[name] = {"launches": 0, "forms": set(), "flags": {}}
            kernel.add_pre_run_hook(self._hook(self.kernels[name], kernel.arg_names))

    @staticmethod
    def _hook(mine: dict[str, Any], arg_names: list[str]) -> Callable[..., None]:
        def hook(*args: Any, **kwargs: Any) -> None:
            values = dict(zip(arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in arg_names}
            mine["launches"] += 1
            mine["forms"].add(
                repr([getattr(v, "dtype", v if isinstance(v, bool | str) else type(v)) for v in values.values()])
            )
            for key, value in values.items():
                if isinstance(value, bool):
                    mine["flags"].setdefault(key, set()).add(value)
                elif value is None or isinstance(value, torch.Tensor) or "Descriptor" in type(value).__name__:
                    mine["flags"].setdefault(f"{key} given", set()).add(value is not None)

        return hook

    def as_json(self) -> dict[str, Any]:
        return {
            name: {**one, "forms": sorted(one["forms"]), "flags": {k: sorted(v) for k, v in one["flags"].items()}}
            for name, one in self.kernels.items()
        }


def attention_decode() -> None:
    import attention_cases as cases

    from truegate.kernels import attention

    for dtype, num_splits in product((HALF, torch.float32), (1, 4)):
        for heads, keys, size in ((6, 2, 40), (5, 1, 64)):
            case = cases.Case([(1, n) for n in (1, 16, 17, 75)], width=2 * keys * size, dtype=dtype, device=DEVICE)
            q, kv, scale = cases.gqa(case, heads, keys, size)
            step = case.step(num_splits=num_splits)
            finite(attention.decode(q, kv, step.decodes, scale=scale))
            step.decodes.contexts_D[0] = 0  # a padded row
            finite(attention.decode(q, kv, step.decodes, scale=scale))
        for heads, latent, rotary in ((3, 512, 64), (20, 48, 12)):
            case = cases.Case([(1, n) for n in (1, 33, 70)], width=latent + rotary, dtype=dtype, device=DEVICE)
            q, kv, scale = cases.latent(case, heads, latent, rotary)
            finite(attention.decode(q, kv, case.step(num_splits=num_splits).decodes, scale=scale))


def attention_prefill() -> None:
    import attention_cases as cases

    from truegate.cache.pools import MLAPool
    from truegate.kernels import attention

    for dtype, parts in product((HALF, torch.float32), ([(5, 5), (3, 40)], [(3, 20), (70, 75), (66, 150)])):
        for heads, keys, size in ((6, 2, 40), (2, 2, 64), *(((3, 1, 160),) if dtype == HALF else ())):
            case = cases.Case(parts, width=2 * keys * size, dtype=dtype, device=DEVICE)
            q, kv, scale = cases.gqa(case, heads, keys, size)
            y_THV = torch.empty(q[0].shape, dtype=dtype, device=DEVICE)
            attention.prefill(q, kv, case.step().chunks, y_THV, scale=scale)
            finite(y_THV)
            if size == 40:  # a work list with spare entries, as a captured step has it
                spare = torch.full((7, *q[0].shape[1:]), float("nan"), dtype=dtype, device=DEVICE)
                y_THV = torch.zeros((len(y_THV) + 7, heads, size), dtype=dtype, device=DEVICE)
                longer = torch.cat((q[0], spare)), None
                attention.prefill(longer, kv, case.all_chunks(spare=7), y_THV, scale=scale)
                finite(y_THV)
        case = cases.Case(parts, width=40, dtype=dtype, device=DEVICE, pool=MLAPool)
        q, (keys, rest, values), scale = cases.expanded(case, 3, 16, 8, 24)
        for v in (values, values.contiguous()):
            y_THV = torch.empty((q[0].shape[0], 3, 24), dtype=dtype, device=DEVICE)
            attention.prefill(q, (keys, rest, v), case.step().expanded[0].chunks, y_THV, scale=scale)
            finite(y_THV)


def rows() -> None:
    """Norms, rotations, stores, gated SiLU, router logits, a row times a matrix: with their twins, which are short."""
    import norm_cases as cases

    from truegate.kernels.norm import MANY

    for dtype in (HALF, torch.float32):
        place = {"dtype": dtype, "device": DEVICE}
        for add, width in product((False, True), (24, 1100)):
            cases.check_rms_norm(3, width, add=add, **place)
        for normed, (heads, size, rotary) in product((False, True), (((4, 2), 32, 32), ((3, 1), 24, 12))):
            for num_rows in (5, MANY + 3):  # one at a time; in tiles
                cases.check_rotate_and_store(num_rows, heads, size, rotary, normed=normed, **place)
        for num_rows in (5, MANY + 3):
            cases.check_store_latent(num_rows, 20, 24, 12, **place)
        cases.check_silu_mul(3, 1500, **place)
        for num_rows, biased in product((1, 50, 261), (False, True)):
            cases.check_gate(num_rows, 70, 200, biased=biased, **place)
        for biased, add in ((False, True), (True, False)):
            cases.check_row(601, 72, biased=biased, add=add, **place)


def experts(part: int) -> None:
    """Activations, biases and both sides of the weight; slots that are mostly elsewhere, plain products, fp32."""
    import experts_cases as cases

    from truegate.kernels.experts import experts as run
    from truegate.kernels.tuning import default
    from truegate.law.spec import Activation

    tilings = [
        cases.tiling("rows", 1, 4, 128, stages=1), cases.tiling("rows", 1, 4, 128, stages=0),
        cases.tiling("inline", 16, 32, 32), cases.tiling("ordered", 16, 32, 32),
        cases.tiling("ordered", 64, 64, 64, tma=True, halve=True, persistent=1),
        cases.tiling("ordered", 32, 64, 64, halve=True),
    ]  # fmt: skip
    plain = cases.layer(5, 72, 40, dtype=HALF, device=DEVICE)
    exact = cases.layer(5, 72, 40, device=DEVICE)
    if part < len(tilings):
        config, activation = tilings[part], list(Activation)[part % len(Activation)]
        for at_input in (False, True):
            one = cases.layer(5, 72, 40, dtype=HALF, device=DEVICE, activation=activation, at_input=at_input,
                              bias=at_input, unused=(1,))  # fmt: skip
            finite(cases.run(one, config, *cases.rows(one, 2 if config.path == "rows" else 40, 3)))
    elif part == len(tilings):
        for sparse, bias in product((False, True), (False, True)):
            one = cases.layer(5, 72, 40, dtype=HALF, device=DEVICE, bias=bias)
            one = replace(one, sizes=replace(one.sizes, sparse=sparse))
            finite(cases.run(one, tilings[1], *cases.rows(one, 2, 3, drop=0.6)))
    else:
        for num_rows in (1, 3, 70):
            finite(cases.run(exact, default(num_rows, 3, 5, 1.0, 4), *cases.rows(exact, num_rows, 3)))
        x, ids, weights = cases.rows(plain, 9, 3)
        sides = (plain.gate_up, plain.down, plain.biases)
        finite(run(x, *sides, ids, weights, plain.sizes, tilings[3], activate=lambda gate, up: gate * up))


def split() -> None:
    """Warps that copy and warps that multiply: NVIDIA sm_90 alone; elsewhere the same products, not split."""
    import experts_cases as cases

    from truegate.kernels import sizes

    config = cases.tiling("ordered", 128, 128, 64, stages=4, warps=8, split=True)
    one = cases.layer(5, 512, 128, dtype=HALF, device=DEVICE, unused=(1,))
    for num_rows, crowd in ((40, False), (151, False), (151, True)):
        finite(cases.run(one, config, *cases.rows(one, num_rows, 3, crowd=crowd)))
    whole, sizes.OUT_BYTES = sizes.OUT_BYTES, 1  # the columns in two parts
    finite(cases.run(one, config, *cases.rows(one, 40, 3)))
    sizes.OUT_BYTES = whole


def permute() -> None:
    from truegate.kernels.permute import permute as run

    for num_rows, slots, num_slots in ((1, 8, 7), (45, 3, 64), (700, 3, 9), (3000, 2, 300)):
        ids = torch.randint(-3, num_slots + 3, (num_rows, slots)).to(torch.int32)
        run(ids.to(DEVICE), num_slots, 32)


def tuned(part: int) -> None:
    """Every tiling of the tuned table, on rows and matrices that are no multiple of it."""
    import experts_cases as cases

    from truegate.kernels.tuning import TABLE, from_json

    table = json.loads(TABLE.read_text())
    entries = [rows.values() for device in table.values() for rows in device["experts"].values()]
    tilings = sorted({json.dumps(entry) for entry in chain.from_iterable(entries)})
    one = cases.layer(5, 200, 136, dtype=HALF, device=DEVICE, unused=(1,))
    for config in (from_json(json.loads(tiling)) for tiling in tilings[part::PARTS]):
        for crowd in (False, True) if config.path == "ordered" else (False,):
            num_rows = 1 if config.path == "rows" else 20 if config.path == "inline" else 151
            finite(cases.run(one, config, *cases.rows(one, num_rows, 3, crowd=crowd)))


def route(part: int) -> None:
    """Every routing function and rule of the order law."""
    import route_cases as cases

    from truegate.kernels.route import Route

    plans = cases.plans()
    for number, (_, plan) in enumerate(list(plans.items())[part::PARTS]):
        for num_rows, invalid in ((1, False), (38, True)):
            inputs = cases.scene(plan, num_rows, device=DEVICE, coarse=True, invalid=invalid)
            counts = (plan.spec.num_experts, plan.placement.num_slots)
            loads = [torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in counts] if invalid else (None, None)
            kernel = Route(plan, rows_a_program=1 + (number + num_rows) % 2 if num_rows > 1 else None)
            kernel(**inputs, load_E=loads[0], load_P=loads[1])


GROUPS: dict[str, Callable[[], None]] = {
    "decode": attention_decode, "prefill": attention_prefill, "rows": rows, "permute": permute, "split": split,
    **{f"{run.__name__} {part}": partial(run, part) for run in (experts, tuned, route) for part in range(PARTS)},
}  # fmt: skip


def finite(y: torch.Tensor) -> None:
    assert bool(y.isfinite().all()), "a number that must not be read was read"


def planted_memcheck() -> None:
    """Writes one number behind a tensor."""
    import triton
    import triton.language as tl

    @triton.jit
    def out_of_bounds(x, N):
        at = tl.arange(0, 128)
        tl.store(x + at, at.to(tl.float32), mask=at < N + 1)

    out_of_bounds[(1,)](torch.zeros(100, device="cuda"), 100)
    torch.cuda.synchronize()


def planted_racecheck() -> None:
    """Reads shared memory that another warp writes, without a barrier."""
    code = """extern "C" __global__ void race(int* out) {
        __shared__ int seen[64]; seen[threadIdx.x] = threadIdx.x; out[threadIdx.x] = seen[63 - threadIdx.x]; }"""
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    torch.cuda._compile_kernel(code, "race")((1, 1, 1), (64, 1, 1), (out,))
    torch.cuda.synchronize()


def control() -> None:
    """One warp group hands single numbers to two, through four buffers and mbarriers, as is usual: no race is here."""
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier

    @gluon.jit
    def give(x, buffer, full, empty, total):
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        i = 0
        while i < total:
            value = gl.load(x + i)
            mbarrier.wait(empty.index(i % 4), ((i // 4) & 1) ^ 1)
            buffer.index(i % 4).store(gl.full([1], value, gl.int32, one))
            mbarrier.arrive(full.index(i % 4))
            i += 1

    @gluon.jit
    def take(out, buffer, full, empty, HALF: gl.constexpr):
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        at = gl.arange(0, 128, one)
        i = 0
        mbarrier.wait(full.index(0), 0)
        value = gl.max(buffer.index(0).load(one), 0)
        while value > 0:
            mbarrier.arrive(empty.index(i % 4))
            gl.store(out + 256 * i + 128 * HALF + at, value + at)
            i += 1
            mbarrier.wait(full.index(i % 4), (i // 4) & 1)
            value = gl.max(buffer.index(i % 4).load(one), 0)

    @gluon.jit
    def hand_over(x, out, state):
        buffer = gl.allocate_shared_memory(gl.int32, [4, 1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(4):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        total = gl.load(state)
        gl.warp_specialize(
            [(take, (out, buffer, full, empty, 0)), (give, (x, buffer, full, empty, total)),
             (take, (out, buffer, full, empty, 1))], [4, 4], [72, 216],
        )  # fmt: skip

    x = torch.randperm(20, device="cuda").to(torch.int32) + 1
    x[-1] = 0  # the end
    total, out = torch.full((1,), 20, dtype=torch.int32, device="cuda"), x.new_zeros((19, 2, 128))
    for _ in range(8):
        hand_over[(32,)](x, out, total, num_warps=4)
    assert torch.equal(out, x[:-1, None, None] + torch.arange(128, dtype=torch.int32, device="cuda").expand(19, 2, 128))


def has_warp_groups() -> bool:
    """Whether group "split" runs warps that copy and warps that multiply here."""
    from truegate.kernels.grouped import GLUON_IS_KNOWN

    return CUDA and GLUON_IS_KNOWN and torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9


def sanitizer() -> str:
    """The tool, from the PATH or from where CUDA installs it."""
    places = (None, "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
    found = [tool for tool in (shutil.which("compute-sanitizer", path=place) for place in places) if tool]
    if not found:
        sys.exit("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    return found[0]


PLANTED = {"memcheck": planted_memcheck, "racecheck": planted_racecheck}


def apart(group: str, tool: str | None) -> dict[str, Any]:
    """Run a group in a process of its own; what it launched, the sanitizer's findings and its summary's number."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"ORDINARY_LAUNCHES": "1"} if tool == "racecheck" else {}
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "seen.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--group", group, "--report", str(report)]
        if tool is not None:
            command = [sanitizer(), "--tool", tool, "--target-processes", "application-only", "--log-file",
                       str(log), *(["--report-api-errors", "no"] if tool == "memcheck" else []), *command]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        found = log.read_text() if log.exists() else ""
        counts = [int(n) for n in SUMMARY.findall(found)]
        return {
            "ok": done.returncode == 0 and report.exists(),
            "seen": json.loads(report.read_text()) if report.exists() else {},
            "count": counts[-1] if counts else None,
            "log": found,
            "output": (done.stdout + done.stderr)[-3000:],
        }


def hands_over(line: int, source: str) -> bool:
    """Whether a line starts or ends warp groups or hands one number over, which racecheck misreads.

    The compiler gives its own start of groups, and loads that it merged, the kernel's first line or a wait's before it.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.lineno == line and "gl.warp_specialize(" in ast.unparse(node):
            return True
        body = getattr(node, "body", None)
        for statement, following in pairwise((*body, None)) if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr | ast.Assign) and statement.lineno <= line <= (statement.end_lineno or 0):
                text = ast.unparse(statement)
                if text.startswith("mbarrier.wait(") and following:
                    text = ast.unparse(following)
                number = re.search(r"\.store\(gl\.full\(\[1\],|\.load\(one\)", text)
                return bool(number) or text.startswith("gl.warp_specialize(")
    return False


def findings(log: str, path: Path) -> list[set[frozenset[tuple[str, str, bool]]]]:
    """Of every finding in a log of racecheck its pairs of accesses: how grave, read or write, whether it hands over.

    An access without a line of the file at `path` hands nothing over, nor does any of a finding in another form.
    """
    source, found = path.read_text(), []
    for one in re.split(r"^=+\s*(?=\w+\s*:)", log, flags=re.MULTILINE)[1:]:
        grave, accesses = one.split(":")[0], [line for line in one.splitlines() if re.search(r"\baccess\b", line)]
        known = [re.search(rf"\b(Read|Write) access at \S+ in {re.escape(path.name)}:(\d+)( \[|$)", line)
                 for line in accesses]  # fmt: skip
        first, *others = [
            (grave, line[1], hands_over(int(line[2]), source)) if line else (grave, one, False) for line in known
        ] or [(grave, one, False)]
        found.append({frozenset((first, other)) for other in others or [first]})
    return found


def excused(found: dict[str, Any], control: dict[str, Any]) -> bool:
    """Whether all findings are where something is handed over and of kinds that the control has; all must be read."""
    mine = findings(found["log"], KERNELS / "grouped_hopper.py")
    pairs = set().union(*findings(control["log"], Path(__file__)))
    known = {pair for pair in pairs if all(there for *_, there in pair)}
    return 0 < len(mine) == found["count"] and set().union(*mine) <= known


def uncovered(seen: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Kernels and flags that the groups leave out."""
    for name, one in seen.items():
        if not one["launches"]:
            yield f"{name} is launched by no group"
        for flag, states in one["flags"].items():
            if len(states) == 1 and flag not in OF_THE_DEVICE and (True not in states or "given" not in flag):
                yield f"{name}: {flag} was always {next(iter(states))}"


def merged(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    total = {name: {"launches": 0, "forms": set(), "flags": {}} for name in launched_kernels()}
    for name, one in chain.from_iterable(result["seen"].items() for result in results):
        total[name]["launches"] += one["launches"]
        total[name]["forms"] |= set(one["forms"])
        for flag, states in one["flags"].items():
            total[name]["flags"].setdefault(flag, set()).update(states)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="*", default=["memcheck", "racecheck"],
                        choices=("memcheck", "racecheck", "synccheck", "initcheck"))  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=list(GROUPS))
    parser.add_argument("--jobs", type=int, default=16 if CUDA else 2)
    parser.add_argument("--logs", type=Path, help="also write the sanitizer's logs into this folder")
    parser.add_argument(
        "--group", choices=[*GROUPS, "control", *(f"planted {tool}" for tool in PLANTED)], help=argparse.SUPPRESS
    )
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        return run_group(options.group, options.report)
    groups = options.only or list(GROUPS)
    tools = options.tools if CUDA else [None]
    jobs = [(group, tool) for tool in tools for group in [*groups, *([f"planted {tool}"] if tool in PLANTED else [])]]
    jobs += [("control", "racecheck")] if "racecheck" in tools and has_warp_groups() else []
    with ThreadPoolExecutor(options.jobs) as pool:  # the first tool's runs compile what the others' load
        results = dict(zip(jobs, pool.map(lambda job: apart(*job), jobs), strict=True))
    seen = merged([results[group, tools[0]] for group in groups])
    failed = [] if options.only else list(uncovered(seen))
    print(versions(), "" if CUDA else "(interpreted)", flush=True)
    what = "findings of compute-sanitizer" if CUDA else "launches, without a GPU and its sanitizer,"
    print(f"{what} by kernel, {len(groups)} groups")
    print(f"{'kernel':32}{'launches':>9}{'forms':>7}" + "".join(f"{tool or '':>11}" for tool in tools))
    for name, one in seen.items():
        function = re.compile(rf"\b{name.split('.')[1]}\b")
        mine = {job: r["log"] for job, r in results.items() if r["seen"].get(name, {}).get("launches")}
        hits = [sum(len(function.findall(log)) for (_, t), log in mine.items() if t == tool) for tool in tools]
        told = "".join(f"{count or ('clean' if one['launches'] else 'not run'):>11}" for count in hits)
        print(f"{name:32}{one['launches']:>9}{len(one['forms']):>7}{told if CUDA else ''}")
    blind = (results.get(("control", "racecheck")) or {}).get("count")
    in_split = results.get(("split", "racecheck"))
    excuse = bool(blind) and in_split is not None and excused(in_split, results["control", "racecheck"])
    if blind and in_split is not None:
        print(f"racecheck: {blind} findings in the control, which has no race; its {in_split['count']} in group split "
              f"are {'all like those and not counted' if excuse else 'not all like those'}")  # fmt: skip
    for (group, tool), result in results.items():
        told = result["log"][:3000] + result["output"]
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{tool}-{group.replace(' ', '-')}.log").write_text(result["log"] + result["output"])
        if group.startswith("planted"):
            print(f"planted fault under {tool}: {'found' if result['count'] else 'NOT FOUND'}")
            failed += [] if result["count"] else [f"{tool} missed the planted fault:\n{told}"]
        elif group == "control" or ((group, tool) == ("split", "racecheck") and excuse):
            failed += [] if result["ok"] else [f"{tool}, group {group} did not run:\n{told}"]
        elif not result["ok"] or (tool and result["count"] != 0):
            failed.append(f"{tool or 'interpreter'}, group {group}: {result['count']} findings\n{told}")
    print("\n".join(failed) or f"{'clean' if CUDA else 'no number read that must not be'}: {len(seen)} kernels, "
          f"{len(jobs)} runs")  # fmt: skip
    return int(bool(failed))


def run_group(group: str, report: Path) -> int:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cpu" / "kernels")]
    if group.startswith("planted") or group == "control":
        (control if group == "control" else PLANTED[group.split()[1]])()
        report.write_text("{}")
        return 0
    if not CUDA:
        import conftest  # noqa: F401  the interpreter's repairs; they import Triton
    seen = Seen()
    if os.environ.get("ORDINARY_LAUNCHES"):  # one launch after the other: what warps of a block share is the same
        for module in {one for name, one in sys.modules.items() if name.startswith("truegate.kernels.")}:
            if hasattr(module, "early"):
                module.early = lambda device: {"EARLY": False}
    GROUPS[group]()
    if CUDA:
        torch.cuda.synchronize()
    report.write_text(json.dumps(seen.as_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

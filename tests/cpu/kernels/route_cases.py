"""Plans and logits that the route kernel is swept over, and the comparison with its twin; for CPU and GPU alike."""

from dataclasses import replace

import numpy as np
import torch

from truegate.kernels.ref.route import route as twin
from truegate.kernels.route import Route
from truegate.law.contract import Drop, Experts, Router, Sentinel, SharedLayout, ZeroWeight
from truegate.law.order import Tables
from truegate.law.placement import from_slots
from truegate.law.plan import Choices, Plan, Ranks, compile_plan
from truegate.law.spec import (
    Activation,
    Denominator,
    Groups,
    GroupScore,
    RoutingSpec,
    Score,
    SelectOn,
    Shared,
    SharedGate,
    WeightAt,
)
from truegate.moe.backends import load

INF = float("inf")
F = 8
ROUTER = Router(name="any", status="interface", source="test", id_dtype="int32")
TOP2 = Groups(count=8, kept=4, score=GroupScore.TOP2_SUM, fill=-INF)
BASE = RoutingSpec(
    family="v3", num_experts=256, top_k=8, score=Score.SIGMOID, has_selection_bias=True, groups=TOP2,
    denominator=Denominator.SUM, eps=1e-20, routed_scale=2.5, shared=Shared(intermediate=F), hidden=16,
    expert_intermediate=F,
)  # fmt: skip
V2 = replace(
    BASE, family="v2", num_experts=160, top_k=6, score=Score.SOFTMAX, has_selection_bias=False, eps=0.0,
    groups=Groups(count=8, kept=3, score=GroupScore.MAX, fill=0.0), denominator=Denominator.NONE, routed_scale=16.0,
    shared=Shared(intermediate=2 * F),
)  # fmt: skip
QWEN3 = replace(BASE, family="qwen3", num_experts=128, score=Score.SOFTMAX, has_selection_bias=False, groups=None,
                eps=0.0, routed_scale=1.0, shared=None)  # fmt: skip
QWEN2 = replace(QWEN3, family="qwen2", num_experts=60, top_k=4, denominator=Denominator.NONE,
                shared=Shared(intermediate=4 * F, gate=SharedGate.SIGMOID))  # fmt: skip
KIMI = replace(BASE, family="kimi", num_experts=384, groups=replace(TOP2, count=1, kept=1))
ERNIE = replace(QWEN3, family="ernie", num_experts=64, top_k=6, has_selection_bias=True, eps=1e-12,
                denominator=Denominator.SUM_AT_LEAST)  # fmt: skip
SOFTPLUS = replace(QWEN3, family="softplus", score=Score.SQRT_SOFTPLUS, has_selection_bias=True, eps=1e-20)
GPT_OSS = replace(
    QWEN3, family="gpt_oss", num_experts=32, top_k=4, select_on=SelectOn.LOGITS, denominator=Denominator.SOFTMAX_TOPK,
    activation=Activation.SWIGLU_CLAMP, clamp=7.0,
)  # fmt: skip
LOGITS_SOFTMAX = replace(QWEN3, family="logits", select_on=SelectOn.LOGITS)
LLAMA4 = replace(
    QWEN3, family="llama4", num_experts=16, top_k=1, score=Score.SIGMOID, select_on=SelectOn.LOGITS,
    denominator=Denominator.NONE, weight_at=WeightAt.INPUT, shared=Shared(intermediate=F),
)  # fmt: skip
HASH = replace(QWEN3, family="hash", score=Score.SQRT_SOFTPLUS, select_on=SelectOn.HASH, routed_scale=1.5)
HASH_SOFTMAX = replace(HASH, family="hash_softmax", score=Score.SOFTMAX, denominator=Denominator.NONE)
LONGCAT = replace(QWEN3, family="longcat", num_experts=100, num_identity=28, denominator=Denominator.NONE,
                  has_selection_bias=True, routed_scale=6.0)  # fmt: skip
LARGEST = replace(BASE, family="largest", num_experts=512, top_k=16, shared=Shared(intermediate=4 * F))
ODD_GROUPS = replace(BASE, family="odd", num_experts=15, top_k=3, score=Score.SOFTMAX,
                     groups=Groups(count=5, kept=2, score=GroupScore.TOP2_SUM, fill=0.0))  # fmt: skip
SPECS = (BASE, V2, QWEN3, QWEN2, KIMI, ERNIE, SOFTPLUS, GPT_OSS, LOGITS_SOFTMAX, LLAMA4, HASH, HASH_SOFTMAX, LONGCAT,
         LARGEST, ODD_GROUPS)  # fmt: skip


def plan_of(spec: RoutingSpec, *, pad=None, id_dtype="int32", weight_dtype="float32", layout=None, redundant=0,
            ranks=1, **choices) -> Plan:  # fmt: skip
    """A plan whose first edge has the given padding rule, dtypes and shared layout; several ranks exchange by mori."""
    layouts = frozenset({SharedLayout.NONE, layout or SharedLayout.GLOBAL_TAIL})
    experts = Experts(
        name="any", status="interface", source="test", id_dtype=id_dtype, weight_dtype=weight_dtype,
        accepts=(pad or Drop(),), shared_layouts=layouts, weight_at=frozenset(WeightAt),
        activations=frozenset(Activation), expert_bias=True,
    )  # fmt: skip
    slots = np.arange(spec.num_experts + redundant) % spec.num_experts
    if redundant:
        slots = np.random.default_rng(0).permutation(slots)
    placement = from_slots(slots, num_experts=spec.num_experts, num_ranks=ranks)
    dispatch = load("dispatch", "local" if ranks == 1 else "mori").CONTRACT
    return compile_plan(
        spec, router=ROUTER, experts=experts, dispatch=dispatch, placement=placement,
        choices=Choices(ranks=Ranks(dp=ranks, ep=ranks), **choices),
    )  # fmt: skip


def plans() -> dict[str, Plan]:
    """Every routing function, plainly; then every rule of the order law on a few of them."""
    found = {spec.family: plan_of(spec) for spec in SPECS}
    for spec in (BASE, QWEN2, LLAMA4):
        found[f"{spec.family} fused"] = plan_of(spec, fuse_shared=True)
    found["largest fused int64"] = plan_of(LARGEST, fuse_shared=True, id_dtype="int64", scale_at="output")
    for name, pad in {"sentinel": Sentinel(), "zero": ZeroWeight(), "drop -7": Drop(-7)}.items():
        found[f"fused {name}"] = plan_of(BASE, pad=pad, fuse_shared=True)
        found[f"identity {name}"] = plan_of(LONGCAT, pad=pad)
    found["replicas"] = plan_of(QWEN3, redundant=9)
    found["replicas per rank"] = plan_of(V2, redundant=7, fuse_shared=True, layout=SharedLayout.PER_RANK)
    found["identity replicas"] = plan_of(LONGCAT, redundant=12, pad=ZeroWeight())
    found["four ranks"] = plan_of(
        QWEN2, redundant=8, ranks=4, fuse_shared=True, layout=SharedLayout.PER_RANK, pad=ZeroWeight()
    )
    for dtype in ("bfloat16", "float16"):
        found[f"weights {dtype}"] = plan_of(QWEN2, fuse_shared=True, weight_dtype=dtype)
    return found


def scene(plan: Plan, num_rows: int, *, device: str, seed: int = 0, coarse: bool, invalid: bool,
          distinct: bool = False) -> dict:  # fmt: skip
    """Inputs of a route call. Coarse logits are eighths: choices tie exactly or differ by far more than rounding.

    Distinct ones, without a bias to speak of, do not tie at all.
    """
    spec, rng = plan.spec, np.random.default_rng(seed)
    size = (num_rows, spec.num_choices)
    logits = rng.integers(-24, 25, size) / 8 if coarse else rng.standard_normal(size) * 2
    if distinct:
        logits = rng.permuted(np.tile(np.linspace(-4, 4, size[1]), (num_rows, 1)), axis=1)
    logits = torch.from_numpy(logits).float()
    if num_rows > 4 and not distinct:
        logits[1] = float("nan")
        logits[2, ::3] = float("nan")
        logits[3] = 1.0
        logits[4, 1::5] = -INF
    valid = torch.ones(num_rows, dtype=torch.bool)
    if invalid:
        valid = torch.from_numpy(rng.random(num_rows) < 0.7)
        logits[~valid] = float("nan")  # must not reach a valid row, nor any table
    bias = torch.from_numpy(rng.integers(-512, 513, spec.num_choices) / 256).float() * (not distinct)
    tokens = torch.from_numpy(rng.integers(0, 50, num_rows))
    table = torch.from_numpy(np.stack([rng.permutation(spec.num_choices)[: spec.top_k] for _ in range(50)]))
    gated = spec.shared is not None and spec.shared.gate is SharedGate.SIGMOID
    hashed = spec.select_on is SelectOn.HASH
    placement = plan.placement
    home = torch.from_numpy(rng.integers(0, placement.num_ranks, num_rows))
    tables = Tables(torch.from_numpy(placement.replicas_EX).to(device), torch.from_numpy(placement.count_E).to(device))
    inputs = {
        "bias_E": bias if spec.has_selection_bias else None, "token_ids_T": tokens if hashed else None,
        "table_VK": table if hashed else None, "shared_gate_T": torch.rand(num_rows) if gated else None,
        "valid_T": valid if invalid else None, "home_T": home if placement.num_ranks > 1 else None,
    }  # fmt: skip
    on_device = {k: None if v is None else v.to(device) for k, v in inputs.items()}
    return {"logits_TE": logits.to(device), "tables": None if placement.is_identity else tables, **on_device}


def check(plan: Plan, inputs: dict, *, device: str, decided_T: torch.Tensor | None = None, rows: int = 1,
          route: Route | None = None) -> None:  # fmt: skip
    """The kernel's Routed is the twin's: ids bitwise, weights to rounding, on rows that rounding cannot decide."""
    inputs = dict(inputs)
    logits_TE = inputs.pop("logits_TE")
    load_E = torch.zeros(plan.spec.num_experts, dtype=torch.int64, device=device)
    load_P = torch.zeros(plan.placement.num_slots, dtype=torch.int64, device=device)
    got = (route or Route(plan, rows_a_program=rows))(logits_TE, **inputs, load_E=load_E, load_P=load_P)
    want = twin(plan, logits_TE, **inputs, count=True)
    at = slice(None) if decided_T is None else decided_T
    assert got.ids_TJ.dtype == want.ids_TJ.dtype
    assert torch.equal(got.ids_TJ[at], want.ids_TJ[at])
    # what a padded row chose is nobody's business
    chose = want.logical_TK.new_ones(len(logits_TE), dtype=torch.bool) if decided_T is None else decided_T
    chose = chose if inputs["valid_T"] is None else chose & inputs["valid_T"]
    assert torch.equal(got.logical_TK[chose], want.logical_TK[chose])
    close = {"rtol": 2e-6, "atol": 1e-30, "equal_nan": True}
    last_place = torch.finfo(want.weights_TJ.dtype).eps  # where rounding of a rounded weight may end, with few bits
    torch.testing.assert_close(got.weights_TJ[at], want.weights_TJ[at], **{**close, "rtol": max(2e-6, last_place)})
    torch.testing.assert_close(got.chosen_TK[chose], want.chosen_TK[chose], **close)
    if want.identity_T is not None:
        torch.testing.assert_close(got.identity_T[at], want.identity_T[at], **close)
    if decided_T is None:
        assert torch.equal(load_E, want.load_E)
        assert torch.equal(load_P, want.load_P)

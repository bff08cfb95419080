"""The parity table for routers that the spec's axes express but no family of ours uses: "fits" in docs/routing.md.

    python benchmarks/router_parity_more.py [--rows 2000] [--seed 0]

Each router is built from its config class's defaults; the comparison is router_parity.py's. Exits 1 on a mismatch.
"""

import argparse
import importlib
import sys
from typing import Any

import transformers
from router_parity import Case, print_table, run_case

from truegate.law.spec import Denominator, Groups, GroupScore, RoutingSpec, Score, SelectOn

# folder of transformers.models, model_type, router class, kind of routing
BIASED, SOFTMAX, LOGITS = "biased", "softmax", "logits"
ROUTERS = (
    ("axk1", "axk1", "AXK1TopkRouter", BIASED),
    ("axk2", "axk2", "AXK2TopkRouter", BIASED),
    ("bailing_hybrid", "bailing_hybrid", "BailingHybridTopkRouter", BIASED),
    ("beam", "beam", "BeamTopKRouter", BIASED),
    ("dots1", "dots1", "Dots1TopkRouter", BIASED),
    ("exaone_moe", "exaone_moe", "ExaoneMoeTopkRouter", BIASED),
    ("glm4_moe_lite", "glm4_moe_lite", "Glm4MoeLiteTopkRouter", BIASED),
    ("glm4v_moe", "glm4v_moe_text", "Glm4vMoeTextTopkRouter", BIASED),
    ("glm5_next", "glm5_next_text", "Glm5NextTextTopkRouter", BIASED),
    ("glm_moe_dsa", "glm_moe_dsa", "GlmMoeDsaTopkRouter", BIASED),
    ("hy_v3", "hy_v3", "HYV3TopKRouter", BIASED),
    ("hy_v4", "hy_v4", "HYV4TopkRouter", BIASED),
    ("hy_v4_vl", "hy_v4_vl_text", "HYV4VLTopkRouter", BIASED),
    ("inkling2", "inkling2_text", "Inkling2TopKRouter", BIASED),
    ("kimi_linear", "kimi_linear", "KimiLinearTopkRouter", BIASED),
    ("mimo_v2_flash", "mimo_v2_flash", "MiMoV2FlashTopkRouter", BIASED),
    ("minimax_m3_vl", "minimax_m3_vl_text", "MiniMaxM3VLTopKRouter", BIASED),
    ("nemotron_h", "nemotron_h", "NemotronHTopkRouter", BIASED),
    ("solar_open", "solar_open", "SolarOpenTopkRouter", BIASED),
    ("flint", "flint", "FlintTopKRouter", BIASED),
    ("flex_olmo", "flex_olmo", "FlexOlmoTopKRouter", SOFTMAX),
    ("jamba", "jamba", "JambaTopKRouter", SOFTMAX),
    ("lara_mini", "lara_mini", "LaraMiniTopKRouter", SOFTMAX),
    ("mellum", "mellum", "MellumTopKRouter", SOFTMAX),
    ("minimax", "minimax", "MiniMaxTopKRouter", SOFTMAX),
    ("qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5MoeTopKRouter", SOFTMAX),
    ("qwen3_next", "qwen3_next", "Qwen3NextTopKRouter", SOFTMAX),
    ("qwen3_vl_moe", "qwen3_vl_moe_text", "Qwen3VLMoeTextTopKRouter", SOFTMAX),
    ("qwen4_exp", "qwen4_exp_text", "Qwen4ExpTextTopKRouter", SOFTMAX),
    ("aria", "aria_text", "AriaTextTopKRouter", LOGITS),
    ("granitemoe", "granitemoe", "GraniteMoeTopKRouter", LOGITS),
    ("granitemoe_swa", "granitemoe_swa", "GraniteMoeSWATopKRouter", LOGITS),
    ("granitemoehybrid", "granitemoehybrid", "GraniteMoeHybridTopKRouter", LOGITS),
    ("granitemoeshared", "granitemoeshared", "GraniteMoeSharedTopKRouter", LOGITS),
)
GIVEN = {"dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6}}  # no default in its config class
NO_BIAS = ("flint",)
NO_EPS = ("minimax_m3_vl", "flint")
SCALED_BY_THE_BLOCK = ("beam", "minimax_m3_vl")  # the factor multiplies after the router
NEVER_RENORMALISED = ("jamba",)


def axes(folder: str, kind: str, config: Any) -> dict[str, Any]:
    """The spec's axes of one router, from its kind and its config's values."""
    renormalise = getattr(config, "norm_topk_prob", True) and folder not in NEVER_RENORMALISED
    denominator = Denominator.SUM if renormalise else Denominator.NONE
    if kind == SOFTMAX:
        return {"score": Score.SOFTMAX, "denominator": denominator}
    if kind == LOGITS:
        return {"score": Score.SOFTMAX, "select_on": SelectOn.LOGITS, "denominator": Denominator.SOFTMAX_TOPK}
    groups, scale = None, getattr(config, "routed_scaling_factor", getattr(config, "router_scaling_factor", 1.0))
    if getattr(config, "n_group", None) is not None:
        groups = Groups(
            count=config.n_group, kept=config.topk_group, score=GroupScore.TOP2_SUM, fill=float("-inf")
        )  # fmt: skip
    score = {"sigmoid": Score.SIGMOID, "sqrtsoftplus": Score.SQRT_SOFTPLUS}[getattr(config, "scoring_func", "sigmoid")]
    return {
        "score": score, "has_selection_bias": folder not in NO_BIAS, "groups": groups, "denominator": denominator,
        "eps": 0.0 if folder in NO_EPS else 1e-20,
        "routed_scale": 1.0 if folder in SCALED_BY_THE_BLOCK else scale,
    }  # fmt: skip


def case(folder: str, model_type: str, router: str, kind: str) -> Case:
    """One router as a case of the parity table."""
    config = transformers.AutoConfig.for_model(model_type, **GIVEN.get(folder, {}))
    widths = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    num_experts = next(w for w in (getattr(config, name, None) for name in widths) if w)
    top_k = next(k for k in (getattr(config, name, None) for name in ("num_experts_per_tok", "moe_topk")) if k)
    spec = RoutingSpec(family=folder, num_experts=num_experts, top_k=top_k, hidden=num_experts, expert_intermediate=8,
                       **axes(folder, kind, config))  # fmt: skip
    bias = "argument" if folder == "hy_v3" else "e_score_correction_bias"
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    return Case(folder, model_type, GIVEN.get(folder, {}), getattr(module, router), spec=spec,
                bias=bias if spec.has_selection_bias else None)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000, help="random rows a router (default 2000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    reports = print_table(run_case(case(*row), args.rows, args.seed) for row in ROUTERS)
    return 1 if any(r.failed for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())

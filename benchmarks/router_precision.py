"""How many tokens choose other experts when the router keeps too few bits: the numbers behind docs/routing.md.

    python benchmarks/router_precision.py [--rows 10000] [--seed 0]

Hidden states and gate weights are random (logits of standard deviation 1, selection biases of 0.1), so the shares say
how much each rounding can do, not what it does to one checkpoint. What is not rounded is float32; "whole gate" rounds
hidden states, weight and logits. T rows, E experts, D hidden.
"""

import argparse

import numpy as np
import torch

from truegate.law.families import specs_of
from truegate.law.select import select
from truegate.law.spec import RoutingSpec

HIDDEN = 1024
MODELS = {
    "DeepSeek-V3": {"model_type": "deepseek_v3"},
    "Kimi-K2": {"model_type": "kimi_k2", "n_routed_experts": 384, "n_group": 1, "topk_group": 1},
    "GLM-4.5-Air": {"model_type": "glm4_moe"},
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "Mixtral-8x7B": {"model_type": "mixtral"},
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_local_experts": 32},
}


def shares(spec: RoutingSpec, num_rows: int, seed: int) -> dict[str, float]:
    """Share of rows whose set of experts changes, by what is rounded to bf16."""
    rng = torch.Generator().manual_seed(seed)
    h_TD = torch.randn(num_rows, HIDDEN, generator=rng)
    w_ED = torch.randn(spec.num_experts, HIDDEN, generator=rng) / HIDDEN**0.5
    b_E = 0.1 * torch.randn(spec.num_experts, generator=rng) if spec.has_selection_bias else None

    def rounded(a: torch.Tensor) -> torch.Tensor:
        return a.bfloat16().float()

    def chosen(logits_TE: torch.Tensor, bias_E: torch.Tensor | None) -> np.ndarray:
        return np.sort(select(spec, logits_TE, bias_E=bias_E, xp=torch).ids_TK.numpy(), axis=-1)

    truth = chosen(h_TD @ w_ED.T, b_E)
    variants = {
        "gate weight": chosen(h_TD @ rounded(w_ED).T, b_E),
        "logits": chosen(rounded(h_TD @ w_ED.T), b_E),
        "whole gate": chosen((h_TD.bfloat16() @ w_ED.bfloat16().T).float(), b_E),
    }
    if b_E is not None:
        variants["bias"] = chosen(h_TD @ w_ED.T, rounded(b_E))
    return {name: float((ids != truth).any(axis=-1).mean()) for name, ids in variants.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = ("gate weight", "logits", "whole gate", "bias")
    print("rows that choose other experts when this is bf16 (the rest float32)")
    print(f"{'model':16}" + "".join(f"{name:>13}" for name in names))
    for model, config in MODELS.items():
        spec = next(s for s in specs_of(config) if s is not None)
        found = shares(spec, args.rows, args.seed)
        print(f"{model:16}" + "".join(f"{found[n]:13.1%}" if n in found else f"{'-':>13}" for n in names), flush=True)


if __name__ == "__main__":
    main()

"""Small canaries, made once for all tests: 256 channels, 8 to 16 experts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from truegate.canary.archs import Sizes, default_config
from truegate.canary.make import Recipe, make

_SMALL = {
    "deepseek_v3": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "deepseek_v2": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "glm4_moe": {"n_routed_experts": 16, "num_experts_per_tok": 4},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4},
    "qwen2_moe": {"num_experts": 16, "num_experts_per_tok": 4},
    "mixtral": {},
    "gpt_oss": {"num_local_experts": 16},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4},
    "minimax_m2": {"num_local_experts": 16, "num_experts_per_tok": 4},
    "llama4": {"num_local_experts": 8},
}


def small_config(family: str) -> dict:
    return default_config(family) | _SMALL[family] | {"hidden_size": 256, "num_attention_heads": 2}


@pytest.fixture(scope="session")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """family, layers, seed -> folder of a small canary."""
    made: dict[tuple, Path] = {}

    def get(family: str, *, layers: int = 2, seed: int = 0, dtype: str = "bfloat16") -> Path:
        key = (family, layers, seed, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp("canary") / f"{family}-{seed}"
            sizes = Sizes(hidden=384, layers=layers, intermediate=16, dtype=dtype)
            make(small_config(family), folder, Recipe(sizes=sizes, seed=seed))
            made[key] = folder
        return made[key]

    return get


@pytest.fixture(params=list(_SMALL))
def family(request: pytest.FixtureRequest) -> str:
    return request.param

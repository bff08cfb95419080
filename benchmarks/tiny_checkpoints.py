"""Seeded tiny checkpoints of every architecture that the engine runs, built and saved by transformers itself.

Invariant: every tensor, norms and biases included, is random and of a size that matters, so that a wrong one shows.
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

VOCAB = 211
_BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_GQA = {**_BASE, "num_key_value_heads": 2}
_MLA = {
    **_BASE, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
    "rope_theta": 10000.0,
}  # fmt: skip
_QWEN = {**_GQA, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}

ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "DeepSeek-V2": (
        DeepseekV2Config,
        {**_MLA, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    ),
    "DeepSeek-V2-Lite": (
        DeepseekV2Config,
        {**_MLA, "q_lora_rank": None, "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "DeepSeek-V3": (DeepseekV3Config, {**_MLA, "n_group": 4, "topk_group": 2, "v_head_dim": 32}),
    "DeepSeek-V3-YaRN": (
        DeepseekV3Config,
        {
            **_MLA, "n_group": 4, "topk_group": 2, "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "Kimi-K2": (
        DeepseekV3Config,
        {**_MLA, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.827,
         "rope_interleave": False},
    ),
    "Moonlight": (
        DeepseekV3Config,
        {**_MLA, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
         "attention_bias": True},
    ),
    "Qwen2-MoE": (Qwen2MoeConfig, {**_QWEN, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1}),
    "Qwen2-MoE-mixed": (
        Qwen2MoeConfig,
        {**_QWEN, "num_hidden_layers": 4, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2,
         "mlp_only_layers": [3], "qkv_bias": False, "norm_topk_prob": True},
    ),
    "Qwen3-MoE": (
        Qwen3MoeConfig,
        {**_QWEN, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "Qwen3-MoE-YaRN": (Qwen3MoeConfig, {**_QWEN, "head_dim": 32, "rope_parameters": _YARN}),
    "Mixtral": (MixtralConfig, {**_GQA, "num_local_experts": 4, "tie_word_embeddings": True}),
    "GLM-4.5": (
        Glm4MoeConfig,
        {**_GQA, "head_dim": 32, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
         "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5},
    ),
    "GLM-4.5-Air": (
        Glm4MoeConfig,
        {**_GQA, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "use_qk_norm": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    ),
}  # fmt: skip


def reference(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """transformers' model of the architecture with seeded weights, float32; `changes` override config keys."""
    kind, keys = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**keys, **changes})).float().eval()
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.data
        if "norm" in key.rsplit(".", 2)[-2]:
            data.uniform_(0.5, 1.5)
        elif "e_score_correction_bias" in key:
            data.normal_(std=0.1)
        elif key.endswith(".bias"):
            data.normal_(std=0.2)
        elif "inv_freq" not in key:
            data.normal_(std=data.shape[-1] ** -0.5)
    return model


def save(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write the checkpoint as transformers does; `options` go to save_pretrained. Returns the folder."""
    quiet = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            model.to(dtype).save_pretrained(folder, **options)
    finally:
        model.float()
        transformers.logging.set_verbosity(quiet)
    return folder

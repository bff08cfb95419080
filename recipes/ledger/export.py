"""Ledger weights to and from a Hugging Face DeepSeek-V3 checkpoint: bfloat16 shards, the selection bias in float32.

The next-token module is layer `num_hidden_layers`, with its own copies of embedding and head, as in DeepSeek-V3.
"""

import json
import shutil
from pathlib import Path

import torch
from model import Ledger, MoE, Shape
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 15 * 2**20  # tensors per shard; the header comes on top and a shard must stay below 16 MiB


def config_json(s: Shape) -> dict[str, object]:
    sizes = s.as_dict()
    theta = sizes.pop("rope_theta")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **sizes,
        "num_key_value_heads": s.num_attention_heads,
        "q_lora_rank": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "moe_layer_freq": 1,
        "rope_theta": theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def tensors(model: Ledger) -> dict[str, Tensor]:
    """Every tensor under its name in the checkpoint, in layer order; views of the model's own."""
    out = {"model.embed_tokens.weight": model.embed}
    for i, block in enumerate([*model.blocks, model.mtp]):
        prefix = f"model.layers.{i}."
        if block is model.mtp:
            out[f"{prefix}embed_tokens.weight"] = model.embed
            out[f"{prefix}enorm.weight"] = model.enorm.weight
            out[f"{prefix}hnorm.weight"] = model.hnorm.weight
            out[f"{prefix}eh_proj.weight"] = model.eh_proj
            out[f"{prefix}shared_head.norm.weight"] = model.mtp_norm.weight
            out[f"{prefix}shared_head.head.weight"] = model.head
        out[f"{prefix}input_layernorm.weight"] = block.attn_norm.weight
        out[f"{prefix}post_attention_layernorm.weight"] = block.mlp_norm.weight
        attn, mlp = block.attn, block.mlp
        out[f"{prefix}self_attn.q_proj.weight"] = attn.q
        out[f"{prefix}self_attn.kv_a_proj_with_mqa.weight"] = attn.kv_a
        out[f"{prefix}self_attn.kv_a_layernorm.weight"] = attn.kv_norm.weight
        out[f"{prefix}self_attn.kv_b_proj.weight"] = attn.kv_b
        out[f"{prefix}self_attn.o_proj.weight"] = attn.o
        prefix += "mlp."
        if isinstance(mlp, MoE):
            out[f"{prefix}gate.weight"] = mlp.router
            out[f"{prefix}gate.e_score_correction_bias"] = mlp.bias
            for e in range(mlp.s.n_routed_experts):
                for name, stack in (("gate_proj", mlp.gate), ("up_proj", mlp.up), ("down_proj", mlp.down)):
                    out[f"{prefix}experts.{e}.{name}.weight"] = stack[e]
            shared = {"gate_proj": mlp.shared_gate, "up_proj": mlp.shared_up, "down_proj": mlp.shared_down}
            out |= {f"{prefix}shared_experts.{name}.weight": tensor for name, tensor in shared.items()}
        else:
            dense = {"gate_proj": mlp.gate, "up_proj": mlp.up, "down_proj": mlp.down}
            out |= {f"{prefix}{name}.weight": tensor for name, tensor in dense.items()}
    return out | {"model.norm.weight": model.norm.weight, "lm_head.weight": model.head}


def save_checkpoint(model: Ledger, tokenizer: Path, folder: Path) -> None:
    """Write config, tokenizer, index and shards into `folder`, replacing the shards that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in tensors(model).items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        tensor = tensor.detach().to("cpu", dtype).clone().contiguous()
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config_json(model.s), indent=2) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).resolve() != (folder / name).resolve():
            shutil.copyfile(tokenizer / name, folder / name)


def load_checkpoint(folder: Path) -> Ledger:
    """The model of a checkpoint, float32, holding exactly the file's values."""
    config = json.loads((folder / "config.json").read_text())
    model = Ledger(Shape(**{name: config[name] for name in Shape().as_dict()}))
    weights = {name: t for file in sorted(folder.glob("model-*.safetensors")) for name, t in load_file(file).items()}
    targets = tensors(model)
    if weights.keys() != targets.keys():
        raise ValueError(f"{folder}: tensors {sorted(weights.keys() ^ targets.keys())[:4]} are missing or unknown")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(weights[name])
    return model.eval()

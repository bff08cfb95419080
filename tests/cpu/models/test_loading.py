"""A checkpoint is read whole or refused by name: layouts, shards, dtypes, leftovers, memory."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from parity import make_prompts, run_mode
from safetensors.torch import load_file, save_file
from tiny_checkpoints import reference, save

from truegate.errors import UserError
from truegate.models import load_model


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a DeepSeek-V3 checkpoint that the test may change."""
    return shutil.copytree(checkpoint("DeepSeek-V3")[1], tmp_path / "copy")


def edit(folder, change):
    """Apply `change` to the name -> tensor mapping of a one-file checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def set_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def same_buffers(a, b):
    theirs = dict(b.named_buffers())
    return all(torch.equal(buffer, theirs[name]) for name, buffer in a.named_buffers())


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Mixtral", "Qwen2-MoE"])
def test_shards_and_stacked_experts_load_the_same_buffers(name, checkpoint, tmp_path):
    theirs, plain = checkpoint(name)
    whole = load_model(plain)
    sharded = save(theirs, tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert same_buffers(load_model(sharded), whole)
    stacked = save(theirs, tmp_path / "stacked", save_original_format=False)
    names = set(load_file(stacked / "model.safetensors"))
    assert any(key.endswith("experts.gate_up_proj") for key in names)
    assert same_buffers(load_model(stacked), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_checkpoints_in_half_precision_load_into_any_dtype(dtype, checkpoint, tmp_path):
    theirs = reference("DeepSeek-V2-Lite")
    folder = save(theirs, tmp_path, dtype=dtype)
    exact = dict(load_model(folder).named_buffers())
    for run in (torch.bfloat16, torch.float16):
        for name, buffer in load_model(folder, dtype=run).named_buffers():
            assert buffer.equal(exact[name].to(run).to(buffer.dtype)) or buffer.dtype == torch.float32, name


def test_gate_and_selection_bias_stay_fp32_in_a_half_precision_run(folder):
    bias = load_file(folder / "model.safetensors")["model.layers.2.mlp.gate.e_score_correction_bias"]
    layer = load_model(folder, dtype=torch.bfloat16).moe_layers[1]
    assert layer.gate_weight.dtype == torch.float32
    assert layer.selection_bias.dtype == torch.float32
    assert layer.selection_bias.equal(bias)


def test_tied_head_is_the_embedding_and_a_second_copy_must_agree(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("Mixtral")[1], tmp_path / "copy")
    model = load_model(folder)
    assert model.head.data_ptr() == model.embedding.data_ptr()
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_model(folder).embedding.equal(model.embedding)
    edit(folder, lambda t: t["lm_head.weight"].mul_(1.5))
    with pytest.raises(UserError, match=r"lm_head.weight differs .* tie_word_embeddings"):
        load_model(folder)


def test_rotary_frequencies_and_declared_next_token_layers_are_ignored(folder):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(4, 4)

    before = load_model(folder)
    edit(folder, add)
    set_config(folder, num_nextn_predict_layers=1)
    assert same_buffers(load_model(folder), before)
    set_config(folder, num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(UserError, match=r"model\.layers\.3\.eh_proj\.weight is unknown"):
        load_model(folder)


ATTENTION = "model.layers.1.self_attn."
CHANGES = {
    "missing dense tensor": (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    "missing expert": (lambda t: t.pop("model.layers.1.mlp.experts.5.up_proj.weight"), "experts.5.up_proj.weight"),
    "missing selection bias": (
        lambda t: t.pop("model.layers.2.mlp.gate.e_score_correction_bias"),
        "model.layers.2.mlp.gate.e_score_correction_bias",
    ),
    "unknown tensor": (
        lambda t: t.update({ATTENTION + "sinks": torch.ones(4)}),
        r"model\.layers\.1\.self_attn\.sinks is unknown",
    ),
    "one expert too many": (
        lambda t: t.update({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(32, 64)}),
        r"experts\.8\.up_proj\.weight is unknown",
    ),
    "wrong shape": (
        lambda t: t.update({ATTENTION + "o_proj.weight": torch.ones(64, 96)}),
        r"o_proj\.weight has shape \[64, 96\], config.json asks for \[64, 128\]",
    ),
    "transposed": (
        lambda t: t.update({ATTENTION + "kv_b_proj.weight": torch.ones(32, 192)}),
        r"kv_b_proj\.weight has shape",
    ),
    "unreadable dtype": (
        lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.float8_e4m3fn)}),
        "model.norm.weight is F8_E4M3",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(case, folder):
    change, message = CHANGES[case]
    edit(folder, change)
    with pytest.raises(UserError, match=message):
        load_model(folder)


def test_a_tensor_in_two_shards_or_twice_in_a_header_is_refused(folder):
    second = folder / "more.safetensors"
    save_file({"model.norm.weight": torch.ones(64)}, second)
    with pytest.raises(UserError, match=r"model\.norm\.weight is in both"):
        load_model(folder)
    entry = b'"model.norm.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{" + entry + b"," + entry + b"}"
    second.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(UserError, match=r"more\.safetensors: model\.norm\.weight occurs twice"):
        load_model(folder)


def test_a_shard_that_the_index_names_must_be_there(checkpoint, tmp_path):
    theirs, _ = checkpoint("DeepSeek-V3")
    folder = save(theirs, tmp_path / "sharded", max_shard_size="60KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=gone.name):
        load_model(folder)


def test_a_truncated_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="ends beyond the file"):
        load_model(folder)


MEASURE = """
import re, sys, torch
from truegate.models import load_model
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.set_num_threads(1)
load_model(sys.argv[1])  # imports, allocator and thread pools: what is not weights
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
model = load_model(sys.argv[2])
peak = status("VmHWM") - before
weights = sum({b.data_ptr(): b.numel() * b.element_size() for b in model.buffers()}.values())
print(peak, weights)
"""


@pytest.mark.parametrize(("dtype", "stacked"), [(torch.bfloat16, False), (torch.float32, True)])
def test_loading_keeps_at_most_a_tenth_more_than_the_weights_resident(dtype, stacked, folder, tmp_path):
    """Peak resident size of a fresh process, over a single file, where mapping alone would keep all of it."""
    theirs = reference("DeepSeek-V3", hidden_size=512, num_hidden_layers=9, moe_intermediate_size=192)
    big = save(theirs, tmp_path / "big", dtype=dtype, max_shard_size="10GB", save_original_format=not stacked)
    command = [sys.executable, "-c", MEASURE, str(folder), str(big)]
    peak, weights = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert weights > 80e6
    assert peak <= 1.1 * weights, f"{peak / weights:.3f}"


def test_progress_counts_bytes_to_the_end(folder):
    from truegate.models.load import LoadOptions

    seen = []
    load_model(folder, options=LoadOptions(progress=lambda done, total: seen.append((done, total))))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_buffers_are_free_for_use_before_they_are_filled(folder):
    """The start-up self-test writes its own weights into the first MoE layer first; nothing of it remains."""
    from truegate.models.load import LoadOptions

    def scribble(model):
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))

    plain = load_model(folder)
    used = load_model(folder, options=LoadOptions(before_fill=scribble))
    assert same_buffers(used, plain)
    prompts = make_prompts()[:2]
    assert torch.cat(run_mode("prefill", used, prompts)).equal(torch.cat(run_mode("prefill", plain, prompts)))

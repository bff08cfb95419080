"""The check after loading passes on what was loaded right, in every layout, and sees what loading can get wrong."""

import pytest
import torch
from tiny_checkpoints import reference, save

from truegate.engine.loaded import WrongWeights, check_loaded
from truegate.law.plan import Choices
from truegate.models import load_model
from truegate.models.load import LoadOptions


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: save(reference(name), tmp_path_factory.mktemp(name)) for name in ("DeepSeek-V3", "Qwen2-MoE", "Mixtral")
    }


@pytest.mark.parametrize(
    ("name", "fuse"), [("DeepSeek-V3", False), ("DeepSeek-V3", True), ("Qwen2-MoE", False), ("Mixtral", False)]
)
def test_a_checkpoint_loaded_right_passes_in_every_dtype(folders, name, fuse):
    for dtype in (torch.float32, torch.bfloat16):
        options = LoadOptions(choices=Choices(fuse_shared=fuse))
        model = load_model(folders[name], dtype=dtype, options=options)
        assert "are the file's" in check_loaded(model, folders[name], per_layer=8)


def _swap_gate_and_up(layer):
    layer.w_gate_up.copy_(layer.w_gate_up.roll(layer.w_gate_up.shape[1] // 2, 1))


def _shift_experts(layer):
    layer.w_down.copy_(layer.w_down.roll(1, 0))


def _halve_shared(layer):
    layer.shared_down.mul_(0.5)


def _permute_gate(layer):
    layer.gate_weight.copy_(layer.gate_weight.flip(0))


@pytest.mark.parametrize("harm", [_swap_gate_and_up, _shift_experts, _halve_shared, _permute_gate])
def test_wrong_weights_in_one_layer_are_named(folders, harm):
    model = load_model(folders["DeepSeek-V3"])
    with torch.inference_mode():
        harm(model.moe_layers[1])
    with pytest.raises(WrongWeights, match="layer 2"):
        check_loaded(model, folders["DeepSeek-V3"])

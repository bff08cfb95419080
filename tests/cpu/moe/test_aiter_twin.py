"""aiter's contract on CPU: ids in 0..num_slots, the last one being the sink; anything else would be read."""

from types import SimpleNamespace

import pytest
import torch

from truegate.law.families import specs_of
from truegate.law.order import realise
from truegate.law.placement import place
from truegate.law.plan import Choices
from truegate.moe.backends import Backends, compile_layer, load
from truegate.moe.sent import ExpertWeights, Sent

CONFIG = {
    "model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 0, "hidden_size": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "moe_intermediate_size": 64, "num_nextn_predict_layers": 0,
}  # fmt: skip


def built(fuse=True):
    aiter = load("experts", "aiter")
    parts = Backends(
        router=load("routers", "torch"), dispatch=load("dispatch", "local"),
        experts=SimpleNamespace(CONTRACT=aiter.CONTRACT, build=aiter.build_twin),
    )  # fmt: skip
    plan = compile_layer(specs_of(CONFIG)[0], parts, place(num_experts=8), Choices(fuse_shared=fuse))
    g = torch.Generator().manual_seed(0)
    slots = plan.slots_per_rank
    weights = ExpertWeights(
        gate_up_PHD=torch.randn((slots, 128, 16), generator=g), down_PDF=torch.randn((slots, 16, 64), generator=g)
    )
    return plan, parts.experts.build(plan, weights), load("experts", "torch").build(plan, weights)


def sent(ids, weights=None, rows=None):
    ids = torch.tensor(ids, dtype=torch.int32)
    x = torch.randn((len(ids), 16), generator=torch.Generator().manual_seed(1))
    return Sent(x, ids, torch.ones(ids.shape) if weights is None else torch.tensor(weights))


@pytest.mark.parametrize("bad", [-1, 10, -99999, 2**30])
@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 6])
def test_an_id_outside_its_slots_and_sink_raises_whatever_its_weight(bad, weight, rows):
    _, twin, _ = built()  # 8 routed + 1 shared slot: legal ids are 0..9
    with pytest.raises(IndexError, match=rf"\[{bad}\], outside 0\.\.9"):
        twin(sent([[0, 8]] * (rows - 1) + [[bad, 8]], [[1.0, 1.0]] * (rows - 1) + [[weight, 1.0]]))


def test_the_sink_without_a_shared_slot_is_the_number_of_routed_experts():
    _, twin, _ = built(fuse=False)
    assert twin(sent([[8, 8]])).abs().max() == 0
    with pytest.raises(IndexError, match=r"0\.\.8"):
        twin(sent([[9, 0]]))


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_the_sink_computes_nothing_and_legal_ids_are_torchs(rows):
    plan, twin, torch_experts = built()
    ids = [[(r * 3 + j) % 9 for j in range(3)] for r in range(rows)]
    assert torch.equal(twin(sent(ids)), torch_experts(sent(ids)))
    with_sink = [[*row[:2], plan.slots_per_rank] for row in ids]
    without = [[*row[:2], -1] for row in ids]
    assert torch.equal(twin(sent(with_sink)), torch_experts(sent(without)))
    assert twin(sent([[9, 9, 9]] * rows)).abs().max() == 0


def test_no_rows_is_no_error():
    _, twin, _ = built()
    empty = Sent(torch.zeros((0, 16)), torch.zeros((0, 3), dtype=torch.int32), torch.zeros((0, 3)))
    assert twin(empty).shape == (0, 16)


def test_what_the_plan_lays_out_is_always_legal_for_it():
    plan, twin, _ = built()
    ids = torch.tensor([[-99999, 2**40], [1, 2], [300, -1]])
    weights = torch.tensor([[float("nan"), 1e30], [0.5, 0.5], [float("inf"), 0.0]])
    routed = realise(plan, ids, weights, valid_T=torch.tensor([False, True, False]), xp=torch)
    assert routed.ids_TJ.dtype == torch.int32
    x = torch.full((3, 16), float("nan"))
    x[1] = 1
    y = twin(Sent(x, routed.ids_TJ, routed.weights_TJ))
    assert y[1].isfinite().all()

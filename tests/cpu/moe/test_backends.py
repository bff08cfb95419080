"""Backends: the file's name is the flag's value; asking for one yields it or an error that says why, never another."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from truegate.errors import Refused, UserError
from truegate.law.families import specs_of
from truegate.law.placement import place
from truegate.law.plan import Choices, Ranks
from truegate.law.spec import Groups, GroupScore
from truegate.moe.backends import PARTS, choose, compile_layer, load, names

MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 4096, "intermediate_size": 14336,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def plan(**kwargs):
    spec = specs_of(MIXTRAL)[0]
    ranks = Ranks() if kwargs.get("dispatch", "local") == "local" else Ranks(dp=2, ep=2)
    placement = place(num_experts=8, num_ranks=ranks.ep)
    return compile_layer(spec, choose(**kwargs), placement, Choices(ranks=ranks))


def test_a_router_not_named_goes_with_the_experts():
    assert choose().router is load("routers", "torch")
    assert choose(experts="aiter").router is load("routers", "aiter")
    assert choose(experts="deep_gemm").router is load("routers", "torch")
    assert choose(experts="aiter", router="torch").router is load("routers", "torch")
    assert choose(experts="flashinfer_trtllm").router is None


@pytest.mark.parametrize(("part", "flag"), list(zip(PARTS, ("--router", "--experts", "--dispatch"), strict=True)))
def test_an_unknown_name_lists_the_folder(part, flag):
    for name in ("nosuch", "", "__init__", "../layer", "torch.x"):
        with pytest.raises(UserError) as error:
            load(part, name)
        assert str(error.value).startswith(f"{flag} {name}: unknown; there are ")
        assert all(known in str(error.value) for known in names(part))


EXPERTS = [n for n in names("experts") if load("experts", n).CONTRACT.status == "interface"]
EXCHANGES = [n for n in names("dispatch") if load("dispatch", n).CONTRACT.status == "interface"]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_cannot_run_here_are_refused_with_their_reason(name):
    module = load("experts", name)
    with pytest.raises(Refused, match=f"experts {name} cannot run here: ") as error:
        module.build(None, None)
    assert module.CONTRACT.why_not in str(error.value)


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_that_cannot_run_here_are_refused_with_their_reason(name):
    module = load("dispatch", name)
    with pytest.raises(Refused, match=f"dispatch {name} cannot run here: ") as error:
        module.build(None)
    assert module.CONTRACT.why_not in str(error.value)


def test_a_router_that_cannot_run_here_is_refused_with_its_reason():
    with pytest.raises(Refused, match="router aiter cannot run here: needs the aiter package"):
        load("routers", "aiter").build(plan())


@pytest.mark.parametrize("name", names("dispatch"))
def test_every_exchange_has_a_plan_with_some_experts(name):
    experts = "deep_gemm" if name == "deepep_low_latency" else "torch"
    got = plan(experts=experts, dispatch=name)
    assert got.dispatch.name == name
    assert got.experts.name == experts


def test_a_router_refuses_more_experts_or_groups_than_it_handles():
    placement = place(num_experts=2048)
    spec = replace(specs_of(MIXTRAL)[0], num_experts=2048)
    with pytest.raises(Refused, match="router triton handles up to 1024 experts, mixtral has 2048; use --router torch"):
        compile_layer(spec, choose(experts="triton"), placement, Choices())
    assert compile_layer(spec, choose(experts="triton", router="torch"), placement, Choices()).router.name == "torch"
    grouped = replace(spec, num_experts=128, groups=Groups(count=64, kept=32, score=GroupScore.MAX, fill=0.0))
    with pytest.raises(Refused, match="router triton handles up to 32 groups, mixtral has 64; use --router torch"):
        compile_layer(grouped, choose(experts="triton"), place(num_experts=128), Choices())


@pytest.mark.parametrize("part", ["routers", "experts"])
def test_triton_is_refused_where_nothing_can_run_it(part, monkeypatch):
    if torch.cuda.is_available() and part == "routers":
        pytest.skip("this machine has a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    weights = SimpleNamespace(down_PDF=torch.empty(1, 1, 1))
    compiled = plan(experts="triton")
    with pytest.raises(Refused, match=r"(router|experts) triton (runs on a GPU|needs the triton package).*use .*torch"):
        load(part, "triton").build(compiled, weights) if part == "experts" else load(part, "triton").build(compiled)

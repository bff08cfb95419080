"""Contracts: every file of moe/ states one, as data, with a source, and says why where it cannot run."""

from dataclasses import fields

import pytest

from truegate.law.contract import Drop, Sentinel, SharedLayout, ZeroWeight
from truegate.moe.backends import PARTS, load, names, status_lines

ALL = [(part, name) for part in PARTS for name in names(part)]
EXPECTED = {
    "routers": {"torch", "aiter"},
    "experts": {"torch", "aiter", "triton", "deep_gemm", "cutlass_fp8", "flashinfer_cutlass", "flashinfer_trtllm"},
    "dispatch": {"local", "allgather", "alltoall", "deepep_normal", "deepep_low_latency", "mori"},
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_the_named_contracts_are_there(part):
    assert set(names(part)) >= EXPECTED[part]


@pytest.mark.parametrize(("part", "name"), ALL)
def test_a_contract_is_named_sourced_and_honest(part, name):
    c = load(part, name).CONTRACT
    assert c.name == name
    assert type(c).__name__ == {"routers": "Router", "experts": "Experts", "dispatch": "Dispatch"}[part]
    assert len(c.source) > 5
    assert c.status in ("runs", "interface")
    if c.status == "interface":
        assert c.why_not
        assert "use --" in c.why_not  # the reason ends with what to use instead
    else:
        assert c.why_not is None
    hash(c)  # data: hashable, so frozen all the way down


@pytest.mark.parametrize("name", names("experts"))
def test_a_kernel_with_fused_slots_also_runs_without_them(name):
    assert SharedLayout.NONE in load("experts", name).CONTRACT.shared_layouts


def test_facts_of_the_interfaces_as_the_routing_page_states_them():
    experts = {name: load("experts", name).CONTRACT for name in names("experts")}
    dispatch = {name: load("dispatch", name).CONTRACT for name in names("dispatch")}
    router = load("routers", "aiter").CONTRACT
    assert router.folds == {"biased_grouped_sigmoid"}
    assert router.goes_with == "aiter"
    assert experts["aiter"].accepts[0] == ZeroWeight()
    assert Drop() not in experts["aiter"].accepts  # negative ids read out of bounds
    assert Sentinel() in experts["aiter"].accepts  # its sink: the number of local experts
    assert experts["aiter"].id_dtype == "int32"
    for name in ("triton", "deep_gemm", "cutlass_fp8"):
        assert experts[name].accepts == (Drop(),)
    assert experts["flashinfer_trtllm"].takes_logits
    assert set(experts["flashinfer_cutlass"].accepts) == {Drop(), Sentinel()}
    tails = {n for n, c in experts.items() if SharedLayout.GLOBAL_TAIL in c.shared_layouts}
    assert {"triton", "cutlass_fp8"} <= tails
    assert "deep_gemm" not in tails
    for name in ("deepep_normal", "deepep_low_latency"):
        assert dispatch[name].id_dtype == "int64"
        assert SharedLayout.PER_RANK in dispatch[name].shared_layouts
    assert dispatch["deepep_normal"].emits == Drop()
    assert dispatch["deepep_normal"].weights == "carried"  # its combine adds without weights
    assert dispatch["deepep_low_latency"].weights == "at_combine"
    assert dispatch["mori"].id_dtype == "int32"
    assert dispatch["mori"].max_tokens_per_rank == 4096
    assert dispatch["allgather"].gathers_rows
    assert [n for n, c in dispatch.items() if c.gathers_rows] == ["allgather"]


def test_every_backend_has_a_line_that_says_if_it_runs():
    lines = status_lines()
    assert len(lines) == len(ALL)
    runs = {line.split(":")[0] for line in lines if line.endswith("runs here")}
    assert {"routers torch", "experts torch", "dispatch local"} <= runs
    assert all(": runs here" in line or ": contract only: " in line for line in lines)


def test_pads_say_their_sentinel():
    assert [str(Drop()), str(Sentinel()), str(ZeroWeight())] == ["Drop(-1)", "Sentinel(num_slots)", "ZeroWeight(0)"]


def test_contracts_hold_no_mutable_default():
    for part, name in ALL:
        c = load(part, name).CONTRACT
        for field in fields(c):
            assert not isinstance(getattr(c, field.name), list | dict | set), f"{part} {name}: {field.name}"

"""Fused experts in Triton as other engines ship them: local int32 ids, -1 skipped, shared slots as a global tail."""

from truegate.law.contract import Drop, Experts, SharedLayout
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Experts(
    name="triton",
    status="interface",
    source="engines: local int32, -1 skipped, scale in the epilogue or the model's choice, global tail",
    id_dtype="int32",
    accepts=(Drop(),),
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.GLOBAL_TAIL}),
    formats=frozenset({"bf16", "fp16", "fp8_block"}),
    why_not="the GPU kernels are not built yet; use --experts torch",
)


def build(plan: Plan, weights):
    """Refused: the contract is compiled and tested, our kernel does not exist yet."""
    raise cannot_run(CONTRACT)

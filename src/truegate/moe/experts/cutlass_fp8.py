"""CUTLASS grouped fp8 experts: local ids, the scale folded into the weights before them, shared slots at the tail."""

from truegate.law.contract import Drop, Experts, SharedLayout
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Experts(
    name="cutlass_fp8",
    status="interface",
    source="engines: local ids, scale folded into the weights by the router, global tail",
    id_dtype="int32",
    accepts=(Drop(),),
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.GLOBAL_TAIL}),
    formats=frozenset({"fp8_block", "fp8_tensor"}),
    alignment=128,
    why_not="needs an engine package with CUTLASS fp8 experts and an NVIDIA GPU; use --experts torch",
)


def build(plan: Plan, weights):
    """Refused: our reading of the interface is compiled and tested; there is no binding to the package yet."""
    raise cannot_run(CONTRACT)

"""FlashInfer's CUTLASS experts: an invalid slot is -1 or the id past the last expert, by kernel."""

from truegate.law.contract import Drop, Experts, Sentinel, SharedLayout
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Experts(
    name="flashinfer_cutlass",
    status="interface",
    source="engines: invalid ids are -1 or E, by kernel; no fused shared slot stated",
    id_dtype="int32",
    accepts=(Drop(), Sentinel()),
    shared_layouts=frozenset({SharedLayout.NONE}),
    formats=frozenset({"bf16", "fp8_tensor", "nvfp4"}),
    alignment=128,
    why_not="needs the flashinfer package and an NVIDIA GPU; use --experts torch",
)


def build(plan: Plan, weights):
    """Refused: our reading of the interface is compiled and tested; there is no binding to the package yet."""
    raise cannot_run(CONTRACT)

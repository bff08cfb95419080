"""DeepGEMM's grouped matmuls behind an exchange: local ids, contiguous rows or masked blocks, shared slots per rank."""

from truegate.law.contract import Drop, Experts, Layout, SharedLayout
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Experts(
    name="deep_gemm",
    status="interface",
    source="engines: local ids, the scale is the model's choice after combine, shared slots per rank",
    id_dtype="int32",
    accepts=(Drop(),),
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.PER_RANK}),
    layouts=frozenset({Layout.ROWS, Layout.BATCHED}),
    formats=frozenset({"bf16", "fp8_block"}),
    alignment=128,
    why_not="needs the deep_gemm package and a Hopper or newer NVIDIA GPU; use --experts torch",
)


def build(plan: Plan, weights):
    """Refused: our reading of the interface is compiled and tested; there is no binding to the package yet."""
    raise cannot_run(CONTRACT)

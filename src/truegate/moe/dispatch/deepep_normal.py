"""DeepEP's normal mode. Its combine adds without weights, so the kernel must weigh; remote slots arrive as -1."""

from truegate.law.contract import Dispatch, Drop, SharedLayout
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Dispatch(
    name="deepep_normal",
    status="interface",
    source="engines: int64 ids, -1 for slots owned elsewhere, combine adds without weights, shared slots per rank",
    id_dtype="int64",
    accepts=(Drop(),),
    emits=Drop(),
    weights="carried",
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.PER_RANK}),
    payload=frozenset({"bf16", "fp8_block"}),
    graph_safe=False,  # row counts come to the host
    why_not="needs the deep_ep package and several NVIDIA GPUs; use --dispatch local on one rank",
)


def build(plan: Plan, *, group=None):
    """Refused: our reading of the interface is compiled and tested; there is no binding to the package yet."""
    raise cannot_run(CONTRACT)

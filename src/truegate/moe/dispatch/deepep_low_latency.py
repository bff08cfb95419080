"""DeepEP's low-latency mode. Rows arrive in one block an expert; the weights stay home and multiply at combine."""

from truegate.law.contract import Dispatch, Drop, Layout, SharedLayout
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Dispatch(
    name="deepep_low_latency",
    status="interface",
    source="engines: int64 ids, weights applied at combine, shared slots per rank; hidden sizes as built upstream",
    id_dtype="int64",
    accepts=(Drop(),),
    emits=None,  # blocks come with counts: no slot is marked
    weights="at_combine",
    layout=Layout.BATCHED,
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.PER_RANK}),
    payload=frozenset({"bf16", "fp8_block"}),
    hidden_sizes=frozenset({2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192}),
    why_not="needs the deep_ep package and several NVIDIA GPUs; use --dispatch local on one rank",
)


def build(plan: Plan, *, group=None):
    """Refused: our reading of the interface is compiled and tested; there is no binding to the package yet."""
    raise cannot_run(CONTRACT)

"""All-gather of rows, reduce-scatter of outputs: every rank sees every row and keeps the slots that are its own."""

from truegate.law.contract import Dispatch, Drop, SharedLayout
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Dispatch(
    name="allgather",
    status="interface",
    source="engines: global -> local map, -1 where remote; the output is reduced exactly once",
    id_dtype="int64",
    accepts=(Drop(),),
    emits=Drop(),
    weights="carried",
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.GLOBAL_TAIL}),
    gathers_rows=True,
    why_not="the multi-rank engine is not built yet; use --dispatch local on one rank",
)


def build(plan: Plan, *, group=None):
    """Refused: the contract is compiled and tested, the exchange itself does not exist yet."""
    raise cannot_run(CONTRACT)

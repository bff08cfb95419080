"""All-to-all over the collective library: each row travels to the ranks that hold its experts, weights with it."""

from truegate.law.contract import Dispatch, Drop, SharedLayout
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Dispatch(
    name="alltoall",
    status="interface",
    source="our own design: rows sorted by rank, fixed sizes; slots of other ranks arrive as -1",
    id_dtype="int64",
    accepts=(Drop(),),
    emits=Drop(),
    weights="carried",
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.PER_RANK}),
    why_not="the multi-rank engine is not built yet; use --dispatch local on one rank",
)


def build(plan: Plan, *, group=None):
    """Refused: the contract is compiled and tested, the exchange itself does not exist yet."""
    raise cannot_run(CONTRACT)

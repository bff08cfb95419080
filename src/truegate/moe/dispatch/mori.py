"""AMD's mori exchange: int32 ids travel with their weights; padded rows are legal ids of weight 0."""

from truegate.law.contract import Dispatch, SharedLayout, ZeroWeight
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Dispatch(
    name="mori",
    status="interface",
    source="engines: int32 ids and weights, at most 4096 tokens a rank by default, shared slots per rank",
    id_dtype="int32",
    accepts=(ZeroWeight(),),
    emits=None,
    weights="carried",
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.PER_RANK}),
    max_tokens_per_rank=4096,
    why_not="needs the mori package and several AMD GPUs (ROCm); use --dispatch local on one rank",
)


def build(plan: Plan, *, group=None):
    """Refused: our reading of the interface is compiled and tested; there is no binding to the package yet."""
    raise cannot_run(CONTRACT)

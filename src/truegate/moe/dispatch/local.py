"""No exchange: every expert is on this rank. Rows and ids go to the kernel as the router left them."""

from truegate.law.contract import Dispatch, SharedLayout
from truegate.law.plan import Plan
from truegate.moe.sent import Sent

CONTRACT = Dispatch(
    name="local",
    status="runs",
    source="this repository",
    id_dtype=None,
    accepts=None,
    emits=None,
    weights="carried",
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.GLOBAL_TAIL, SharedLayout.PER_RANK}),
    spans_ranks=False,
    combine_dtype="as the kernel's",
)


def build(plan: Plan, *, group=None) -> "LocalDispatch":
    """The identity exchange."""
    return LocalDispatch()


class LocalDispatch:
    """send: nothing moves. combine: y, plus the identity experts' share of x."""

    def send(self, x_TD, routed) -> Sent:
        return Sent(x_TD, routed.ids_TJ, routed.weights_TJ, routed.identity_T)

    def combine(self, y_TD, sent: Sent):
        if sent.identity_T is None:
            return y_TD
        return y_TD + sent.identity_T.to(y_TD.dtype)[:, None] * sent.x_TD

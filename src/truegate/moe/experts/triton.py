"""Experts in Triton: permute, two grouped products with the activation and the weights inside, combine. Graph-safe.

Invariant: an id of -1 is skipped; grids depend on shapes only. One row is two launches, a few rows three, more four,
or six where kernels/permute.py counts ids before it orders them; the second product and the sum again for every further
part of the columns (kernels/sizes.py).
"""

from functools import cache
from itertools import pairwise

from truegate.law.contract import Drop, Experts, SharedLayout
from truegate.law.plan import Plan
from truegate.law.spec import Activation, WeightAt
from truegate.moe.sent import ExpertWeights, Sent

CONTRACT = Experts(
    name="triton",
    status="runs",
    source="this repository",
    id_dtype="int32",
    accepts=(Drop(),),
    weight_at=frozenset({WeightAt.OUTPUT, WeightAt.INPUT}),
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.GLOBAL_TAIL}),
    activations=frozenset(Activation),
    expert_bias=True,
    formats=frozenset({"bf16", "fp16", "fp32"}),
)


def build(plan: Plan, weights: ExpertWeights) -> "TritonExperts":
    """A callable Sent -> y_TD in x's dtype; Refused where neither a GPU nor the interpreter can run it."""
    from truegate.moe.need import need_triton

    need_triton(CONTRACT, weights.down_PDF.device)
    return TritonExperts(plan, weights)


def values(num: int, hidden: int, width: int, element_size: int) -> int:
    """Numbers that a call of so many assignments holds at a time: h, and some columns of what goes to the sum."""
    from truegate.kernels.sizes import columns_at_once

    return num * (width + columns_at_once(num, hidden, element_size)[0].stop)


def turns(plan: Plan, down_PDF) -> list[int]:
    """Row counts above which a step's kernels have another form: another tiling, order, sum or number of parts."""
    from truegate.kernels.launch import device_name

    device, (slots, hidden, width) = device_name(down_PDF.device), down_PDF.shape
    return list(_turns(device, plan.slots_per_row, slots, hidden, width, 1 / plan.ranks.ep, down_PDF.element_size()))


@cache
def _turns(
    device: str, width: int, num_slots: int, hidden: int, expert_width: int, share: float, element_size: int
) -> tuple[int, ...]:
    from truegate.kernels import combine, grouped, permute
    from truegate.kernels.sizes import columns_at_once
    from truegate.kernels.tuning import config_of

    @cache
    def form(num_rows: int):
        """What of a step's row count is compiled into its kernels."""
        num = num_rows * width
        config = config_of(
            device, num_rows=num_rows, width=width, num_slots=num_slots, hidden=hidden, expert_width=expert_width,
            share=share, element_size=element_size,
        )  # fmt: skip
        order = permute.way(num) if config.path == "ordered" else grouped.padded(num)
        return config, order, combine.columns(num_rows), columns_at_once(num, hidden, element_size)[0]

    def between(low: int, high: int) -> list[int]:
        if form(low) == form(high):
            return []
        middle = (low + high) // 2
        return between(low, middle) + between(middle, high) if middle > low else [low]

    # no form that comes back is as short as a step of this grid
    grid = sorted({*range(1, 17), *(int(2 ** (i / 4)) for i in range(16, 69))})
    return tuple(rows for low, high in pairwise(grid) for rows in between(low, high))


class TritonExperts:
    """y[t] = sum_j weights[t, j] * F_{ids[t, j]}(x[t]), or F(weights[t, j] * x[t]) where the spec weighs the input."""

    def __init__(self, plan: Plan, weights: ExpertWeights):
        self.spec, self.weights = plan.spec, weights
        self.num_slots, self.share = plan.slots_per_rank, 1 / plan.ranks.ep
        self.at_input = plan.spec.weight_at is WeightAt.INPUT
        self.weighs = plan.dispatch.weights == "carried"
        self.activate = self.fused = self.on_torch  # one handed in from outside runs between the products
        self.config = cache(self._config)

    def on_torch(self, gate, up):
        """The spec's gated activation, [..., F]; the kernels have it fused."""
        from truegate.moe.experts.torch import activate

        return activate(self.spec, gate, up)

    def __call__(self, sent: Sent):
        from truegate.kernels.experts import experts
        from truegate.kernels.sizes import Sizes

        w = self.weights
        hidden, width = w.down_PDF.shape[1:]
        sizes = Sizes(
            num_slots=self.num_slots, hidden=hidden, width=width, activation=self.spec.activation,
            clamp=self.spec.clamp, at_input=self.at_input, weighs=self.weighs,
            sparse=self.share < 1,
        )  # fmt: skip
        return experts(
            sent.x_TD.contiguous(), w.gate_up_PHD, w.down_PDF, (w.gate_up_bias_PH, w.down_bias_PD), sent.ids_TJ,
            sent.weights_TJ, sizes, self.config(*sent.ids_TJ.shape),
            activate=None if self.activate is self.fused else self.activate,
        )  # fmt: skip

    def _config(self, num_rows: int, slots: int):
        from truegate.kernels.launch import device_name
        from truegate.kernels.tuning import config_of

        down = self.weights.down_PDF
        return config_of(
            device_name(down.device), num_rows=num_rows, width=slots, num_slots=self.num_slots, hidden=down.shape[1],
            expert_width=down.shape[2], share=self.share, element_size=down.element_size(),
        )  # fmt: skip

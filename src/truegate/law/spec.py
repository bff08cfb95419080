"""A MoE layer's routing as values of axes: what the model's definition fixes, and nothing about how it is run.

Invariant: a `RoutingSpec` that exists is consistent; `__post_init__` refuses the rest, naming the axis.
E routed experts, Z identity ("zero") experts with ids E..E+Z-1, K top-k, S shared experts, D hidden, F expert
intermediate.
"""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from truegate.errors import UserError

MOST_EXPERTS = 65_536  # tables are as long: beyond it a config is a typing error that would fill the memory
MOST_SHARED = 1024  # routed-expert widths in the shared expert
SCALES = (1e-30, 1e30)  # float32 holds the scale, its inverse, and weights times either


class Score(StrEnum):
    """Elementwise or rowwise map from router logits x to scores s, in fp32 or wider."""

    SOFTMAX = "softmax"  # s = softmax(x) over all E + Z
    SIGMOID = "sigmoid"  # s = 1 / (1 + exp(-x))
    SQRT_SOFTPLUS = "sqrt_softplus"  # s = sqrt(log(1 + exp(x)))


class SelectOn(StrEnum):
    """What the top-k ranks. Logits differ from scores only where scores saturate or underflow into ties."""

    SCORES = "scores"  # c = s, or s + b with a selection bias
    LOGITS = "logits"  # c = x: top-k first, score afterwards (gpt-oss, Llama 4)
    HASH = "hash"  # no ranking: ids come from a table indexed by token id (DeepSeek-V4's first layers)


class GroupScore(StrEnum):
    """How a group of experts is ranked from its members' selection scores c."""

    MAX = "max"
    TOP2_SUM = "top2_sum"


class Denominator(StrEnum):
    """What the chosen weights are divided by; sum is over the K chosen scores."""

    NONE = "none"  # w = s
    SUM = "sum"  # w = s / (sum + eps)
    SUM_AT_LEAST = "sum_at_least"  # w = s / max(sum, eps)
    SOFTMAX_TOPK = (
        "softmax_topk"  # w = softmax over the K chosen logits: the same as SUM for softmax, without underflow
    )


class WeightAt(StrEnum):
    """Where the routed weight multiplies: the expert's output, or its input (Llama 4)."""

    OUTPUT = "output"
    INPUT = "input"


class SharedGate(StrEnum):
    """The shared experts' coefficient: one, or a per-token sigmoid(h . g) (Qwen2-MoE)."""

    ONE = "one"
    SIGMOID = "sigmoid"


class Activation(StrEnum):
    """The expert's gated activation: y = down(act(gate(x)) * up(x)), or gpt-oss's clamped variant."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLU_CLAMP = "swiglu_clamp"  # g = min(gate, c), u = clamp(up, -c, c); y = (u + 1) * g * sigmoid(1.702 g)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Group-limited selection: only experts of the `kept` best of `count` equal groups can be chosen."""

    count: int
    kept: int
    score: GroupScore
    fill: float  # selection score given to experts of dropped groups: 0.0 (transformers V2) or -inf


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The always-on expert beside the routed ones: one gated MLP of width `intermediate`."""

    intermediate: int
    gate: SharedGate = SharedGate.ONE


@dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """One MoE layer's mathematics.

    y_T = sum_{j<K} w[T,j] F_{ids[T,j]}(x_T) + g_T G(x_T), with w = r * normalised scores (at WeightAt.INPUT the weight
    multiplies x_T inside F instead) and F_e(x) = x for the Z identity experts.
    """

    family: str
    num_experts: int
    top_k: int
    score: Score
    select_on: SelectOn = SelectOn.SCORES
    has_selection_bias: bool = False
    groups: Groups | None = None
    denominator: Denominator = Denominator.NONE
    eps: float = 0.0
    routed_scale: float = 1.0
    weight_at: WeightAt = WeightAt.OUTPUT
    shared: Shared | None = None
    num_identity: int = 0
    has_gate_bias: bool = False  # x = W h + c
    hidden: int
    expert_intermediate: int
    activation: Activation = Activation.SILU
    clamp: float | None = None
    has_expert_bias: bool = False

    @property
    def num_choices(self) -> int:
        """Width of the router's output: E + Z."""
        return self.num_experts + self.num_identity

    @property
    def scale(self) -> Fraction:
        """The routed scale r as the exact rational that its shortest decimal writes (2.5 is 5/2)."""
        return Fraction(repr(self.routed_scale))

    @property
    def num_shared_slots(self) -> int | None:
        """S when the shared expert can be cut into S routed-expert-wide slots; None when its width forbids it."""
        if self.shared is None:
            return 0
        slots, rest = divmod(self.shared.intermediate, self.expert_intermediate)
        return slots if rest == 0 else None

    @property
    def kind(self) -> str:
        """The kind of routing function as backends' contracts name it: "biased_grouped_sigmoid", "softmax", "hash", ...

        A spec with one group is still grouped: backends send it through the same kernel.
        """
        if self.select_on is SelectOn.HASH:
            return "hash"
        parts = ["biased"] if self.has_selection_bias else []
        parts += ["grouped"] if self.groups is not None else []
        return "_".join([*parts, self.score.value])

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise UserError(f"routing spec ({self.family}): {problem}")


def _problems(s: RoutingSpec) -> list[str]:
    """Every inconsistency of the axes, each naming the axis and the value."""
    sizes = {"num_experts": s.num_experts, "top_k": s.top_k, "hidden": s.hidden,
             "expert_intermediate": s.expert_intermediate}  # fmt: skip
    found = [f"{name} is {size}, must be at least 1" for name, size in sizes.items() if size < 1]
    if s.num_choices > MOST_EXPERTS:
        found.append(f"num_experts is {s.num_experts}, must be at most {MOST_EXPERTS}")
    if found:
        return found
    reachable = s.num_choices
    if s.groups is not None:
        g = s.groups
        if g.count < 1 or s.num_choices % g.count:
            found.append(f"groups.count {g.count} does not divide the {s.num_choices} experts")
        elif not 1 <= g.kept <= g.count:
            found.append(f"groups.kept is {g.kept}, must be in 1..{g.count}")
        else:
            reachable = g.kept * (s.num_choices // g.count)
            if g.score is GroupScore.TOP2_SUM and s.num_choices // g.count < 2:
                found.append(f"groups.score top2_sum needs 2 experts a group, groups.count {g.count} leaves 1")
    if s.top_k > reachable:
        found.append(f"top_k {s.top_k} exceeds the {reachable} experts that can be chosen")
    if not (s.routed_scale > 0 and s.routed_scale < float("inf")):
        found.append(f"routed_scale is {s.routed_scale}, must be positive and finite")
    elif not SCALES[0] <= s.routed_scale <= SCALES[1]:
        found.append(f"routed_scale is {s.routed_scale}, must be in {SCALES[0]}..{SCALES[1]}")
    if not 0 <= s.eps < float("inf"):
        found.append(f"eps is {s.eps}, must be non-negative and finite")
    if s.denominator is Denominator.SOFTMAX_TOPK and s.score is not Score.SOFTMAX:
        found.append(f"denominator softmax_topk needs score softmax, not {s.score.value}")
    if s.select_on is not SelectOn.SCORES and (s.has_selection_bias or s.groups is not None):
        found.append(f"select_on {s.select_on.value} takes neither a selection bias nor groups")
    if s.num_identity < 0:
        found.append(f"num_identity is {s.num_identity}, must not be negative")
    if s.shared is not None and s.shared.intermediate < 1:
        found.append(f"shared.intermediate is {s.shared.intermediate}, must be at least 1")
    elif s.shared is not None and s.shared.intermediate > MOST_SHARED * s.expert_intermediate:
        found.append(
            f"shared.intermediate is {s.shared.intermediate}, must be at most {MOST_SHARED} times expert_intermediate"
        )
    if (s.activation is Activation.SWIGLU_CLAMP) != (s.clamp is not None):
        found.append("clamp goes with activation swiglu_clamp, and only with it")
    return found

"""Where a checkpoint keeps a MoE layer's tensors: names, orientation and packing, for loader, canary and plan alike.

Invariant: every tensor a layer's mathematics needs is named exactly once; what its spec lacks has no name.
E routed experts, D hidden, F expert intermediate. Weights multiply as y = x W^T when OUT_IN (rows are outputs).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from truegate.errors import UserError
from truegate.law.spec import RoutingSpec, SharedGate


class Axes(StrEnum):
    """Order of a stacked weight's last two axes."""

    OUT_IN = "out_in"  # gate_up [E, 2F, D], down [E, D, F]
    IN_OUT = "in_out"  # gate_up [E, D, 2F], down [E, F, D]


class GateUp(StrEnum):
    """How the 2F outputs of a fused gate_up weight (and its bias) are ordered."""

    CONCATENATED = "concatenated"  # gate 0..F-1, then up
    INTERLEAVED = "interleaved"  # gate 0, up 0, gate 1, up 1, ...


@dataclass(frozen=True, kw_only=True)
class PerExpert:
    """One tensor per expert and projection, gate and up [F, D], down [D, F]; `{expert}` stands for the expert's id."""

    gate: str
    up: str
    down: str

    def tensors(self, num_experts: int) -> list[str]:
        """All names, expert by expert: gate, up, down."""
        return [n.format(expert=e) for e in range(num_experts) for n in (self.gate, self.up, self.down)]

    def under(self, block: str) -> "PerExpert":
        return PerExpert(gate=block + self.gate, up=block + self.up, down=block + self.down)


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """One 3-D tensor for all experts' gate and up, one for down; with `*_scales` the weights are MXFP4 blocks.

    MXFP4: gate_up uint8 [E, 2F, D/32, 16] (two 4-bit values a byte), gate_up_scales uint8 [E, 2F, D/32]; down likewise.
    """

    gate_up: str
    down: str
    gate_up_bias: str | None = None  # [E, 2F]
    down_bias: str | None = None  # [E, D]
    gate_up_scales: str | None = None
    down_scales: str | None = None
    axes: Axes = Axes.OUT_IN
    order: GateUp = GateUp.CONCATENATED

    def tensors(self, num_experts: int) -> list[str]:
        """All names; the same however many experts are stacked in them."""
        names = (self.gate_up, self.down, self.gate_up_bias, self.down_bias, self.gate_up_scales, self.down_scales)
        return [n for n in names if n is not None]

    def under(self, block: str) -> "Stacked":
        def put(name: str | None) -> str | None:
            return None if name is None else block + name

        return Stacked(gate_up=block + self.gate_up, down=block + self.down, gate_up_bias=put(self.gate_up_bias),
                       down_bias=put(self.down_bias), gate_up_scales=put(self.gate_up_scales),
                       down_scales=put(self.down_scales), axes=self.axes, order=self.order)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A shared expert's three weights, gate and up [F_shared, D], down [D, F_shared]."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, kw_only=True)
class MoeNames:
    """One MoE layer's tensors in one checkpoint layout."""

    layer: int
    num_experts: int
    router: str  # [E + Z, D]
    gate_bias: str | None  # c of x = W h + c, [E + Z]
    selection_bias: str | None  # b, [E + Z], or [1, E] in ERNIE-4.5's checkpoints
    hash_table: str | None  # [V, K] expert ids by token id
    experts: PerExpert | Stacked
    shared: Mlp | None
    shared_gate: str | None  # g, [1, D]

    def tensors(self) -> list[str]:
        """Every tensor name of the layer."""
        one = [self.router, self.gate_bias, self.selection_bias, self.hash_table, self.shared_gate]
        mlp = [] if self.shared is None else [self.shared.gate, self.shared.up, self.shared.down]
        return [n for n in one if n is not None] + mlp + self.experts.tensors(self.num_experts)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A family's tensor names inside one decoder layer, as one kind of checkpoint writes them."""

    block: str  # "mlp." and the like, after "model.layers.N."
    router: str = "gate.weight"
    gate_bias: str = "gate.bias"
    selection_bias: str = "gate.e_score_correction_bias"
    hash_table: str = "gate.tid2eid"
    shared: str = "shared_experts."
    shared_gate: str = "shared_expert_gate.weight"
    experts: PerExpert | Stacked

    def names(self, prefix: str, layer: int, spec: RoutingSpec) -> MoeNames:
        """The names of `layer`, with only the tensors that the spec has."""
        block = f"{prefix}{layer}.{self.block}"
        mlp = block + self.shared
        gated = spec.shared is not None and spec.shared.gate is SharedGate.SIGMOID
        return MoeNames(
            layer=layer,
            num_experts=spec.num_experts,
            router=block + self.router,
            gate_bias=block + self.gate_bias if spec.has_gate_bias else None,
            selection_bias=block + self.selection_bias if spec.has_selection_bias else None,
            hash_table=block + self.hash_table if spec.kind == "hash" else None,
            experts=self.experts.under(block),
            shared=None if spec.shared is None else Mlp(
                gate=f"{mlp}gate_proj.weight", up=f"{mlp}up_proj.weight", down=f"{mlp}down_proj.weight"),
            shared_gate=block + self.shared_gate if gated else None,
        )  # fmt: skip


def choose(alternatives: Sequence[MoeNames], available: Collection[str]) -> MoeNames:
    """The first layout all of whose tensors the checkpoint has; else an error naming what the nearest layout misses."""
    missing = [[n for n in names.tensors() if n not in available] for names in alternatives]
    best = min(range(len(alternatives)), key=lambda i: len(missing[i]))
    if missing[best]:
        first, rest = missing[best][0], len(missing[best]) - 1
        more = f" and {rest} more" if rest else ""
        raise UserError(
            f"checkpoint: layer {alternatives[best].layer} lacks tensor {first}{more}; is the download complete, and "
            f"does config.json belong to it?"
        )
    return alternatives[best]


PER_EXPERT = PerExpert(
    gate="experts.{expert}.gate_proj.weight",
    up="experts.{expert}.up_proj.weight",
    down="experts.{expert}.down_proj.weight",
)
PER_EXPERT_W123 = PerExpert(
    gate="experts.{expert}.w1.weight", up="experts.{expert}.w3.weight", down="experts.{expert}.w2.weight"
)
STACKED = Stacked(gate_up="experts.gate_up_proj", down="experts.down_proj")
STACKED_IN_OUT = Stacked(gate_up="experts.gate_up_proj", down="experts.down_proj", axes=Axes.IN_OUT)
STACKED_GPT_OSS = Stacked(
    gate_up="experts.gate_up_proj", down="experts.down_proj", gate_up_bias="experts.gate_up_proj_bias",
    down_bias="experts.down_proj_bias", axes=Axes.IN_OUT, order=GateUp.INTERLEAVED)  # fmt: skip
STACKED_GPT_OSS_MXFP4 = Stacked(
    gate_up="experts.gate_up_proj_blocks", down="experts.down_proj_blocks",
    gate_up_scales="experts.gate_up_proj_scales", down_scales="experts.down_proj_scales",
    gate_up_bias="experts.gate_up_proj_bias", down_bias="experts.down_proj_bias",
    axes=Axes.OUT_IN, order=GateUp.INTERLEAVED)  # fmt: skip

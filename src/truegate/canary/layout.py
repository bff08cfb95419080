"""Where everything sits in a canary: residual channels, and the vocabulary of tokens that ask and answer.

Invariant: rms of a token's residual is CONST / 8 (one constant channel in 64), so every normalisation is an exact
power of two; a constant never shares a block of 32 channels with a code, so 8-bit block formats keep the codes.
H hidden, E routed experts, S shared experts told apart, A addresses a side.
"""

import math
from dataclasses import dataclass

from truegate.errors import UserError

CONST = 4096.0
CONST_EVERY = 64  # H / (H / 64) = 4^3: rms = CONST / 8 for every hidden size
NORM_CONST = 1.0 / 8.0  # norm weights: constants become 1 ...
NORM_CODE = CONST / 8.0  # ... and codes keep their value
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The residual channels by use; every list holds distinct channels of 0..H-1."""

    const: tuple[int, ...]
    code: tuple[int, ...]  # one a row of the router's tables
    layer: tuple[int, ...]  # one a layer: opens that layer's experts, and only them
    dim: int  # lowers the gate of every expert: the activation shows
    loud: int  # raises the gate beyond a clamp
    ask: int  # amplitude of a question
    reader: tuple[int, ...]  # E + S: which expert a question is about
    address: tuple[tuple[int, ...], tuple[int, ...]]  # two codes that name a probe token
    question: int  # 1 on question tokens
    ladder: int  # as `question`, read by the answers only
    answer: int  # X: what the asked expert wrote
    bias: int  # sum of the experts' output biases
    read_out: tuple[int, ...]  # E + S + 1: what expert i, shared expert j, the dense MLP wrote


def channels(*, hidden: int, rows: int, layers: int, num_slots: int, addresses: int) -> Channels:
    """Lay the channels out; codes go to blocks of 32 without a constant, read-outs too while there is room."""
    if hidden % CONST_EVERY:
        raise UserError(f"hidden {hidden} is not a multiple of {CONST_EVERY}; give another --hidden")
    clean = [c for c in range(hidden) if c % CONST_EVERY >= 32]
    spare = [c for c in range(hidden) if 0 < c % CONST_EVERY < 32]
    codes = rows + layers + 3 + num_slots + 2 * addresses + 4
    if codes > len(clean) or codes + num_slots + 1 > len(clean) + len(spare):
        need = CONST_EVERY * math.ceil(max(codes / 32, (codes + num_slots + 1) / 63))
        raise UserError(f"hidden {hidden} has no room for {num_slots} experts and {rows} probes; use --hidden {need}")
    free = iter(clean + spare)

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(free) for _ in range(count))

    code, layer = take(rows), take(layers)
    (dim, loud, ask), reader = take(3), take(num_slots)
    address = (take(addresses), take(addresses))
    question, ladder, answer, bias = take(4)
    return Channels(
        const=tuple(range(0, hidden, CONST_EVERY)), code=code, layer=layer, dim=dim, loud=loud, ask=ask,
        reader=reader, address=address, question=question, ladder=ladder, answer=answer, bias=bias,
        read_out=take(num_slots + 1),
    )  # fmt: skip


# The ladder of answers: greedy decoding of a question names the rung nearest to the relative deviation it sees.
_UP = [0.03 * 1.5**j for j in range(18)]
RUNGS: tuple[float, ...] = tuple(sorted([0.0, *_UP, *(-r for r in _UP if r < 0.95), -1.0, -1.6, -2.5, -4.0]))


def rung_interval(index: int) -> tuple[float, float]:
    """The deviations for which this rung is the nearest."""
    low = -math.inf if index == 0 else (RUNGS[index - 1] + RUNGS[index]) / 2
    high = math.inf if index == len(RUNGS) - 1 else (RUNGS[index] + RUNGS[index + 1]) / 2
    return low, high


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Token ids in order: specials, reference Z, read-outs e0.. s0.. d, expert bias B, rungs, probes, questions."""

    num_experts: int
    num_shared: int
    num_probes: int
    num_questions: int

    @property
    def reference(self) -> int:
        return len(SPECIALS)

    @property
    def first_read_out(self) -> int:
        return self.reference + 1

    @property
    def num_read_outs(self) -> int:
        return self.num_experts + self.num_shared + 1

    @property
    def bias(self) -> int:
        return self.first_read_out + self.num_read_outs

    @property
    def first_rung(self) -> int:
        return self.bias + 1

    @property
    def first_probe(self) -> int:
        return self.first_rung + len(RUNGS)

    @property
    def first_question(self) -> int:
        return self.first_probe + self.num_probes

    @property
    def used(self) -> int:
        return self.first_question + self.num_questions

    def words(self, size: int) -> list[str]:
        """The text of every token id below `size`, without spaces."""
        read_outs = [f"e{i}" for i in range(self.num_experts)] + [f"s{j}" for j in range(self.num_shared)] + ["dense"]
        words = [*SPECIALS, "ref", *read_outs, "bias", *(f"rung{i}" for i in range(len(RUNGS)))]
        words += [f"p{i}" for i in range(self.num_probes)] + [f"q{i}" for i in range(self.num_questions)]
        return words + [f"<unused{i}>" for i in range(size - len(words))]

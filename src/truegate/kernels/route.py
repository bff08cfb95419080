"""Router kernel: logits to final ids and weights in one launch, one warp a row, nothing but registers in between.

Invariant: the ids of kernels/ref/route.py for any logits at all: equal choices go to the lowest id, NaN comes last.
T rows, E experts (identity experts included), G groups of M, K routed top-k, S shared slots, J = K + S, V vocabulary,
X replica-table width. Positions p number experts with each group padded to a power of two.
"""

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from truegate.kernels.launch import INTERPRETED, current, device_name, early, power_of_2, take_turn
from truegate.kernels.tuning import router_rows
from truegate.law.contract import Drop, Sentinel
from truegate.law.order import Routed, Tables
from truegate.law.plan import Plan
from truegate.law.spec import GroupScore, SelectOn, SharedGate

LEAST = tl.constexpr(-(2**31))  # taken, or no expert at all
LAST = tl.constexpr(-(2**31) + 1)  # NaN: after -inf
MOST = tl.constexpr(2**31 - 1)


@triton.jit
def _key(c):
    """int32 in the order of fp32 c; -0 is 0. NaN is the caller's."""
    bits = (c + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The fp32 whose key this is; NaN for MOST."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _exp(x, PRECISE: tl.constexpr):
    """exp as torch's CUDA kernels compute it, so that equal scores are equal there too."""
    if PRECISE:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def _divide(a, b):
    """a / b rounded to nearest, in straight line: the quotient of the fast division, made good by its remainder."""
    inverse = 1.0 / b
    q = a * inverse
    exact = tl.fma(tl.fma(-q, b, a), inverse, q)
    return tl.where(exact == exact, exact, q)  # b infinite or 0: there is nothing to make good


@triton.jit
def _elementwise(x, SCORE: tl.constexpr, PRECISE: tl.constexpr):
    """s = sigmoid(x) or sqrt(log(1 + exp x)) in fp32."""
    if SCORE == "sigmoid":
        b = 1.0 + _exp(-x, PRECISE)
        if PRECISE:
            q = libdevice.fast_dividef(0.25, b * 0.25)  # b is at least 1: a quarter of it has a normal inverse
            # b infinite: q is 0 and the remainder none; NaN stays
            return tl.fma(tl.maximum(tl.fma(-q, b, 1.0), -1.0), q, q)
        else:
            return _divide(1.0, b)
    else:
        z = _exp(-tl.abs(x), PRECISE)
        if PRECISE:
            log = libdevice.log1p(z)
        else:
            u = 1.0 + z  # log(u) / (u - 1) makes up for what rounding 1 + z lost
            log = tl.where(u == 1.0, z, tl.log(u) * z / tl.where(u == 1.0, 1.0, u - 1.0))
        return tl.sqrt_rn(tl.maximum(x, 0.0) + log)


@triton.jit
def _most(a, b):
    """The larger; NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _best_two(first, second, other_first, other_second):
    """The two largest of two pairs; equal ones count twice. A NaN comes first."""
    return _most(first, other_first), tl.maximum(tl.minimum(first, other_first), tl.maximum(second, other_second))


@triton.jit
def _ordered_key(c, PLAIN: tl.constexpr):
    """`_key` with NaN last; PLAIN: no c is negative, so its bits are in order."""
    key = c.to(tl.int32, bitcast=True) if PLAIN else _key(c)
    return tl.where(c != c, LAST, key)


@triton.jit
def _group_keys(c, TOP2: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, MP: tl.constexpr):
    """What ranks the groups: [GP]; one with a NaN scores NaN and comes last. c is -inf where no expert is."""
    c = tl.reshape(c, [GP, MP])
    if TOP2:
        first, second = tl.reduce((c, tl.full([GP, MP], -float("inf"), tl.float32)), 1, _best_two)
        best = first + second
    else:
        best = tl.reduce(c, 1, _most)
    return tl.where(tl.arange(0, GP) < G, _ordered_key(best, False), LEAST)


@triton.jit
def _best(key, p, j, K: tl.constexpr):
    """Positions and keys of the K largest keys, best first; of equal ones the lowest position."""
    ids = tl.zeros_like(j)
    keys = tl.zeros_like(j)
    for k in tl.static_range(K):
        best = tl.max(key, 0)
        at = tl.min(tl.where(key == best, p, MOST), 0)
        key = tl.where(p == at, LEAST, key)
        ids = tl.where(j == k, at, ids)
        keys = tl.where(j == k, best, keys)
    return ids, keys


@triton.jit
def _best_of_distinct(key, p, j, K: tl.constexpr, UNUSED: tl.constexpr):
    """`_best`, the last key and whether it holds: no two of the K are equal. UNUSED: how many keys are LEAST."""
    ids = tl.zeros_like(j)
    keys = tl.zeros_like(j)
    best = MOST
    for k in tl.static_range(K):
        best = tl.max(key, 0)
        same = key == best
        at = tl.min(tl.where(same, p, MOST), 0)
        key = tl.where(same, LEAST, key)  # one fewer comparison than p == at; takes all that are equal
        ids = tl.where(j == k, at, ids)
        keys = tl.where(j == k, best, keys)
    return ids, keys, best, tl.sum((key == LEAST).to(tl.int32), 0) == UNUSED + K


@triton.jit
def _choice(x, bias, e, mask, top, total, SCORE: tl.constexpr, SELECT: tl.constexpr, PRECISE: tl.constexpr):
    """What is ranked: scores, scores plus selection bias, or logits."""
    c = x
    if SELECT == "scores":
        if SCORE == "softmax":
            c = _divide(_exp(x - top, PRECISE), total)
        else:
            c = _elementwise(x, SCORE, PRECISE)
    if bias is not None:
        c += tl.load(bias + e) if mask is None else tl.load(bias + e, mask=mask, other=0.0)
    return c


@triton.jit
def _best_of_groups(
    c, logits, bias, p, j, top, total, K: tl.constexpr, G: tl.constexpr, M: tl.constexpr, GP: tl.constexpr,
    MP: tl.constexpr, KP: tl.constexpr, SCORE: tl.constexpr, SELECT: tl.constexpr, TOP2: tl.constexpr,
    KEPT: tl.constexpr, FILL_KEY: tl.constexpr, PLAIN: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """`_best` where experts outside the KEPT best groups count as the fill: of those inside alone, where that will do.

    Their logits are read again, which costs less than to move what was computed from them.
    """
    group_key = _group_keys(c, TOP2, G, GP, MP)
    g = tl.arange(0, GP)
    q = tl.arange(0, KP * MP)
    group = tl.zeros_like(q)
    for n in tl.static_range(KEPT):
        at = tl.min(tl.where(group_key == tl.max(group_key, 0), g, MOST), 0)
        group_key = tl.where(g == at, LEAST, group_key)
        group = tl.where(q // MP == n, at, group)
    e = group * M + q % MP
    if KP == KEPT and MP == M:
        key = _ordered_key(_choice(tl.load(logits + e), bias, e, None, top, total, SCORE, SELECT, PRECISE), PLAIN)
    else:
        ok = (q // MP < KEPT) & (q % MP < M)
        x = tl.load(logits + e, mask=ok, other=0.0)
        key = tl.where(ok, _ordered_key(_choice(x, bias, e, ok, top, total, SCORE, SELECT, PRECISE), PLAIN), LEAST)
    UNUSED: tl.constexpr = KP * MP - KEPT * M
    ids, keys, least, distinct = _best_of_distinct(key, group * MP + q % MP, j, K, UNUSED)
    if not (distinct & (least > FILL_KEY)):  # equal ones, or so few good ones that the fill counts: all of them
        kept = tl.reshape(tl.broadcast_to(((group_key == LEAST) & (g < G))[:, None], [GP, MP]), [GP * MP])
        every = tl.where(kept, _ordered_key(c, PLAIN), FILL_KEY)
        ids, keys = _best(tl.where((p // MP < G) & (p % MP < M), every, LEAST), p, j, K)
    return ids, keys


@triton.jit
def _route_row(
    row, logits, bias, table, token_ids, gate, valid, home, replicas, count, ids_out, weights_out, logical_out,
    chosen_out, identity_out, load_e, load_p, stride, width,
    E: tl.constexpr, NUM_EXPERTS: tl.constexpr, K: tl.constexpr, S: tl.constexpr, JP: tl.constexpr, G: tl.constexpr,
    M: tl.constexpr, GP: tl.constexpr, MP: tl.constexpr, SCORE: tl.constexpr, SELECT: tl.constexpr,
    GROUPED: tl.constexpr, TOP2: tl.constexpr, KEPT: tl.constexpr, KP: tl.constexpr, FILL_KEY: tl.constexpr,
    DENOMINATOR: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr, KERNEL: tl.constexpr, SHARED: tl.constexpr,
    NUM_SLOTS: tl.constexpr, PER_RANK: tl.constexpr, LAYOUT: tl.constexpr, PAD: tl.constexpr, DROP: tl.constexpr,
    EDGE_SLOTS: tl.constexpr, PRECISE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    logits += row.to(tl.int64) * stride
    p = tl.arange(0, GP * MP)
    e = p // MP * M + p % MP
    inside = (p // MP < G) & (p % MP < M)
    j = tl.arange(0, JP)
    is_routed = j < K
    row_ok = True
    if valid is not None:
        row_ok = tl.load(valid + row) != 0
    top = 0.0
    total = 1.0
    if SELECT == "hash":
        token = tl.load(token_ids + row, mask=row_ok, other=0)
        ids = tl.load(table + token * K + j, mask=is_routed, other=0).to(tl.int32)
    if SELECT != "hash" or SCORE == "softmax":
        x = tl.load(logits + e) if E == GP * MP else tl.load(logits + e, mask=inside, other=-float("inf"))
        if SCORE == "softmax":
            top = tl.max(x, 0)
            z = _exp(x - top, PRECISE)
            total = tl.sum(z, 0)
    if SELECT != "hash":
        c = _choice(x, bias, e, inside, top, total, SCORE, SELECT, PRECISE)
        PLAIN: tl.constexpr = SELECT == "scores" and bias is None
        if GROUPED:
            if E < GP * MP:
                c = tl.where(inside, c, -float("inf"))
            ids, keys = _best_of_groups(
                c, logits, bias, p, j, top, total, K, G, M, GP, MP, KP, SCORE, SELECT, TOP2, KEPT, FILL_KEY, PLAIN,
                PRECISE,
            )  # fmt: skip
        else:
            key = _ordered_key(c, PLAIN)
            if E < GP * MP:
                key = tl.where(inside, key, LEAST)
            ids, keys, _, distinct = _best_of_distinct(key, p, j, K, GP * MP - E)
            if not distinct:
                ids, keys = _best(key, p, j, K)
        ids = ids // MP * M + ids % MP

    if SELECT == "scores" and bias is None and DENOMINATOR != "softmax_topk":
        u = _value(keys)  # the score is what was ranked, or the fill
    else:
        # the chosen logits read again: the same arithmetic gives the same scores
        u = tl.load(logits + ids, mask=is_routed, other=-float("inf"))
        if DENOMINATOR == "softmax_topk":
            u = _exp(u - tl.max(u, 0), PRECISE)
            u = _divide(u, tl.sum(u, 0))
        elif SCORE == "softmax":
            u = _divide(_exp(u - top, PRECISE), total)
        else:
            u = _elementwise(u, SCORE, PRECISE)
    if DENOMINATOR != "softmax_topk" and DENOMINATOR != "none":
        whole = tl.sum(tl.where(is_routed, u, 0.0), 0)
        if DENOMINATOR == "sum_at_least":
            whole = tl.where(whole < EPS, EPS, whole)
        elif EPS > 0:
            whole += EPS
        u = _divide(u, whole)
    if FACTOR != 1.0:
        u *= FACTOR
    row64 = row.to(tl.int64)
    tl.store(logical_out + row64 * K + j, ids.to(tl.int64), mask=is_routed)
    tl.store(chosen_out + row64 * K + j, u, mask=is_routed)

    # the order law: legal ids for invalid rows, count, replicas, shared slots, layout, padding rule, cast
    ok = is_routed & row_ok
    ids = tl.where(ok, ids, (row * K + j) % E)
    if NUM_EXPERTS < E:
        is_identity = ids >= NUM_EXPERTS
        share = tl.sum(tl.where(ok & is_identity, u, 0.0), 0)
        if KERNEL != 1.0:
            share *= KERNEL
        tl.store(identity_out + row, share)
        ok = ok & (ids < NUM_EXPERTS)
        ids = tl.where(is_identity, (row * K + j) % NUM_EXPERTS, ids)
    if load_e is not None:
        tl.atomic_add(load_e + row % COPIES * NUM_EXPERTS + ids, tl.full([JP], 1, tl.int64), mask=ok, sem="relaxed")
    if replicas is not None:
        which = (row + ids) % tl.load(count + ids)
        ids = tl.load(replicas + ids.to(tl.int64) * width + which).to(tl.int32)
    if load_p is not None:
        tl.atomic_add(load_p + row % COPIES * NUM_SLOTS + ids, tl.full([JP], 1, tl.int64), mask=ok, sem="relaxed")
    if S > 0:
        first = NUM_SLOTS
        if LAYOUT == "per_rank":
            ids += ids // PER_RANK * S
            first = PER_RANK
            if home is not None:
                first += tl.load(home + row).to(tl.int32) * (PER_RANK + S)
        shared = SHARED
        if gate is not None:
            shared = tl.load(gate + row) * SHARED
        ids = tl.where(is_routed, ids, first + j - K)
        u = tl.where(is_routed, u, shared)
        ok = ok | ((j >= K) & row_ok)
    if PAD == "drop":
        ids = tl.where(ok, ids, DROP)
    elif PAD == "sentinel":
        ids = tl.where(ok, ids, EDGE_SLOTS)
    else:
        ids = tl.where(ok, ids, (row * (K + S) + j) % EDGE_SLOTS)
    out = row64 * (K + S) + j
    tl.store(ids_out + out, ids.to(ids_out.dtype.element_ty), mask=j < K + S)
    tl.store(weights_out + out, tl.where(ok, u, 0.0).to(weights_out.dtype.element_ty), mask=j < K + S)


@triton.jit
def _route(
    logits, bias, table, token_ids, gate, valid, home, replicas, count, ids_out, weights_out, logical_out, chosen_out,
    identity_out, load_e, load_p, stride, width,
    E: tl.constexpr, NUM_EXPERTS: tl.constexpr, K: tl.constexpr, S: tl.constexpr, JP: tl.constexpr, G: tl.constexpr,
    M: tl.constexpr, GP: tl.constexpr, MP: tl.constexpr, SCORE: tl.constexpr, SELECT: tl.constexpr,
    GROUPED: tl.constexpr, TOP2: tl.constexpr, KEPT: tl.constexpr, KP: tl.constexpr, FILL_KEY: tl.constexpr,
    DENOMINATOR: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr, KERNEL: tl.constexpr, SHARED: tl.constexpr,
    NUM_SLOTS: tl.constexpr, PER_RANK: tl.constexpr, LAYOUT: tl.constexpr, PAD: tl.constexpr, DROP: tl.constexpr,
    EDGE_SLOTS: tl.constexpr, PRECISE: tl.constexpr, EARLY: tl.constexpr,
    COPIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    for r in tl.static_range(ROWS):
        _route_row(
            tl.program_id(0) * ROWS + r, logits, bias, table, token_ids, gate, valid, home, replicas, count, ids_out,
            weights_out, logical_out, chosen_out, identity_out, load_e, load_p, stride, width, E, NUM_EXPERTS, K, S, JP,
            G, M, GP, MP, SCORE, SELECT, GROUPED, TOP2, KEPT, KP, FILL_KEY, DENOMINATOR, EPS, FACTOR, KERNEL, SHARED,
            NUM_SLOTS, PER_RANK, LAYOUT, PAD, DROP, EDGE_SLOTS, PRECISE, COPIES,
        )  # fmt: skip


def _sortable(value: float) -> int:
    """`_key` of a number on the host."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value + 0.0))
    return bits ^ 0x7FFFFFFF if bits < 0 else bits


class Route:
    """A plan's router as one kernel: what the plan fixes is compiled in, so a layer kind compiles once.

    A row must fit a warp's registers: the contract of moe/routers/triton.py says up to how many experts.
    """

    def __init__(self, plan: Plan, *, rows_a_program: int | None = None):
        spec, groups = plan.spec, plan.spec.groups
        self.plan, self.rows_a_program = plan, rows_a_program  # None: as tuned
        count = groups.count if groups is not None else 1
        size = spec.num_choices // count
        pad = plan.send.pad
        self.width = plan.slots_per_row
        self.constants: dict[str, Any] = {
            "E": spec.num_choices, "NUM_EXPERTS": spec.num_experts, "K": spec.top_k, "S": plan.num_shared,
            "JP": power_of_2(self.width), "G": count, "M": size, "GP": power_of_2(count),
            "MP": power_of_2(size), "SCORE": spec.score.value, "SELECT": spec.select_on.value,
            "GROUPED": groups is not None and groups.kept < groups.count,
            "TOP2": groups is not None and groups.score is GroupScore.TOP2_SUM,
            "KEPT": groups.kept if groups is not None else 1,
            "KP": power_of_2(groups.kept) if groups is not None else 1,
            "FILL_KEY": _sortable(groups.fill if groups is not None else 0.0),
            "DENOMINATOR": spec.denominator.value, "EPS": spec.eps, "FACTOR": plan.scales.factors.plan,
            "KERNEL": plan.scales.factors.kernel, "SHARED": plan.scales.factors.shared,
            "NUM_SLOTS": plan.placement.num_slots, "PER_RANK": plan.placement.slots_per_rank,
            "LAYOUT": plan.shared_layout.value,
            "PAD": "drop" if isinstance(pad, Drop) else "sentinel" if isinstance(pad, Sentinel) else "zero_weight",
            "DROP": pad.value if isinstance(pad, Drop) else 0, "EDGE_SLOTS": plan.send.num_slots,
            "PRECISE": not INTERPRETED,
        }  # fmt: skip
        self.needs_gate = spec.shared is not None and spec.shared.gate is SharedGate.SIGMOID
        self.id_dtype = getattr(torch, plan.send.id_dtype)
        self.weight_dtype = getattr(torch, plan.send.weight_dtype)

    def __call__(
        self,
        logits_TE: torch.Tensor,
        *,
        bias_E: torch.Tensor | None = None,
        token_ids_T: torch.Tensor | None = None,
        table_VK: torch.Tensor | None = None,
        shared_gate_T: torch.Tensor | None = None,
        valid_T: torch.Tensor | None = None,
        home_T: torch.Tensor | None = None,
        tables: Tables | None = None,
        load_E: torch.Tensor | None = None,
        load_P: torch.Tensor | None = None,
    ) -> Routed:
        """logits_TE fp32 -> Routed as `order.realise` gives it, on the logits' device, without a host sync.

        bias_E and shared_gate_T fp32; token_ids_T, home_T, table_VK and the placement's tables int64; valid_T bool.
        load_E and load_P int64, where given, are added to: rows per logical expert and per physical slot. Given as
        [copies, E] and [copies, P] their sums over copies are: thousands of rows otherwise wait for each other there.
        """
        self._check(logits_TE, bias_E, token_ids_T, table_VK, shared_gate_T)
        copies = self._copies(load_E, load_P)
        spec, num_rows, device = self.plan.spec, logits_TE.shape[0], logits_TE.device
        routed, laid = (num_rows, spec.top_k), (num_rows, self.width)
        ids_TJ = torch.empty(laid, dtype=self.id_dtype, device=device)
        weights_TJ = torch.empty(laid, dtype=self.weight_dtype, device=device)
        logical_TK = torch.empty(routed, dtype=torch.int64, device=device)
        chosen_TK = torch.empty(routed, dtype=torch.float32, device=device)
        identity_T = torch.empty(num_rows, dtype=torch.float32, device=device) if spec.num_identity else None
        if num_rows:
            placed = tables or (None, None)
            fused_gate = shared_gate_T if self.plan.num_shared else None
            with current(device):
                rows = self.rows_a_program or router_rows(
                    device_name(device), num_experts=spec.num_choices, num_rows=num_rows
                )
                _route[(num_rows // rows,)](
                    logits_TE, bias_E, table_VK, token_ids_T, fused_gate, valid_T, home_T, *placed, ids_TJ, weights_TJ,
                    logical_TK, chosen_TK, identity_T, load_E, load_P, logits_TE.stride(0),
                    0 if tables is None else tables.replicas_EX.shape[1], **self.constants, **early(device),
                    COPIES=copies, ROWS=rows, num_warps=1,
                )  # fmt: skip
        return Routed(
            ids_TJ=ids_TJ, weights_TJ=weights_TJ, valid_T=valid_T, identity_T=identity_T,
            shared_gate_T=shared_gate_T if self.plan.num_shared == 0 else None, load_E=load_E, load_P=load_P,
            logical_TK=logical_TK, chosen_TK=chosen_TK,
        )  # fmt: skip

    def _check(self, logits_TE: Any, bias_E: Any, token_ids_T: Any, table_VK: Any, gate_T: Any) -> None:
        """What the kernel would misread: other dtypes and widths, inputs the spec does not ask for or lacks."""
        spec = self.plan.spec
        if logits_TE.dtype is not torch.float32 or (logits_TE.numel() and logits_TE.stride(-1) != 1):
            raise TypeError(f"router logits are {logits_TE.dtype}, must be float32 with contiguous rows")
        if logits_TE.ndim != 2 or logits_TE.shape[1] != spec.num_choices:
            raise ValueError(f"{spec.family}: logits are {tuple(logits_TE.shape)}, must be (T, {spec.num_choices})")
        hashed = spec.select_on is SelectOn.HASH
        for name, given, wanted in (
            ("bias_E", bias_E, spec.has_selection_bias), ("shared_gate_T", gate_T, self.needs_gate),
            ("token_ids_T", token_ids_T, hashed), ("table_VK", table_VK, hashed),
        ):  # fmt: skip
            if (given is not None) != wanted:
                raise ValueError(f"{spec.family}: {name} is {'missing' if wanted else 'given and not asked for'}")

    def _copies(self, load_E: torch.Tensor | None, load_P: torch.Tensor | None) -> int:
        """How many counters an expert and a slot have; the kernel would write elsewhere if a size were another."""
        sizes = {"load_E": self.plan.spec.num_experts, "load_P": self.plan.placement.num_slots}
        copies = set()
        for (name, size), load in zip(sizes.items(), (load_E, load_P), strict=True):
            if load is None:
                continue
            fits = load.shape[-1:] == (size,) and load.ndim <= 2 and load.is_contiguous() and load.numel()
            if load.dtype is not torch.int64 or not fits:
                given = f"{load.dtype} {tuple(load.shape)}"
                raise ValueError(f"{name} is {given}, must be int64, contiguous, ({size},) or (copies, {size})")
            copies.add(load.shape[0] if load.ndim == 2 else 1)
        if len(copies) > 1:
            raise ValueError(f"load_E and load_P have {sorted(copies)} copies, must have equally many")
        return copies.pop() if copies else 1

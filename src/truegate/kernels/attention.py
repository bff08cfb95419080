"""Attention over a paged pool: `decode` for sequences with one row (split over the context), `prefill` for more rows.

    y[t, h] = softmax_s(scale * (q1[t, h] . k1[s, h] + q2[t, h] . k2[s, h])) v[s, h]        s over the row's context

Invariant: nothing outside a context is read; no atomics, and a row's value depends on its own context and on the split
settings only, so fixed splits make it independent of its batch. Twin: kernels/ref/attention.py.
D decode rows, C chunks, B blocks of them, N sequences, P pages a sequence, S slots, T rows, H query heads, K key heads,
G = H / K, E size of a head's first part, R of its second (0: none), V of its value.
"""

import torch
import triton
import triton.language as tl

from truegate.kernels.launch import cdiv, early, power_of_2, take_turn

SPLIT_PROGRAMS = 256  # a decode launch aims at this many programs: two for each multiprocessor of an H200
MAX_SPLITS = {False: 32, True: 64}  # of grouped-query and of latent attention


@triton.jit
def _split_length(context, min_split, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Slots of one split: the context over SPLITS, at least min_split, whole blocks."""
    return tl.cdiv(tl.maximum(tl.cdiv(context, SPLITS), min_split), BLOCK_S) * BLOCK_S


@triton.jit
def _slots(table_row, offs, ok, PAGE: tl.constexpr):
    page = tl.load(table_row + offs // PAGE, mask=ok, other=0).to(tl.int64)
    return page * PAGE + offs % PAGE


@triton.jit
def _tile(base, rows, row_stride, ok, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """base[rows, 0..SIZE) as [rows, BLOCK], zeros where `ok` is false or past SIZE."""
    column = tl.arange(0, BLOCK)
    mask = ok[:, None]
    if SIZE != BLOCK:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(base + rows[:, None] * row_stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _keys(base, slots, slot_stride, ok, SIZE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """`_tile` of 32-bit slots, of which every one is wanted if WHOLE."""
    column = tl.arange(0, BLOCK)
    place = base + (slots.to(tl.int64) * slot_stride)[:, None] + column[None, :]
    if not WHOLE:
        mask = ok[:, None]
        if SIZE != BLOCK:
            mask = mask & (column < SIZE)[None, :]
        keys = tl.load(place, mask=mask, other=0.0)
    elif SIZE != BLOCK:
        keys = tl.load(place, mask=(column < SIZE)[None, :], other=0.0)
    else:
        keys = tl.load(place)
    return keys


@triton.jit
def _online(scores, values, top, total, acc, PRECISION: tl.constexpr):
    """One step of the running softmax: scores in units of log2, -inf where nothing is."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row with nothing yet stays at 0, not NaN
    weights = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(top - shift)
    total = total * alpha + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _decode_kernel(
    q1, q2, k1, k2, v, out, partial, lse, seqs, contexts, table, scale_log2, min_split,
    q1_row, q1_head, q2_row, q2_head, k1_slot, k1_head, k2_slot, k2_head, v_slot, v_head, table_row,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, R: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    head_block, split, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks: tl.constexpr = (G + BLOCK_G - 1) // BLOCK_G
    key_head = head_block // blocks
    g = (head_block % blocks) * BLOCK_G + tl.arange(0, BLOCK_G)
    heads, ok_g = key_head * G + g, g < G
    context = tl.load(contexts + d)
    length = _split_length(context, min_split, SPLITS, BLOCK_S)
    begin = split * length
    end = tl.minimum(begin + length, context)
    if SPLITS > 1 and begin >= end:
        return
    row = d.to(tl.int64)
    seq = tl.load(seqs + d).to(tl.int64)
    q = _tile(q1 + row * q1_row, heads, q1_head, ok_g, E, BLOCK_E)
    if R:
        q_rest = _tile(q2 + row * q2_row, heads, q2_head, ok_g, R, BLOCK_R)
    k1 += key_head * k1_head
    k2 += key_head * k2_head
    v += key_head * v_head
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for start in range(begin, end, BLOCK_S):
        offs = start + tl.arange(0, BLOCK_S)
        ok = offs < end
        slots = _slots(table + seq * table_row, offs, ok, PAGE)
        keys = _tile(k1, slots, k1_slot, ok, E, BLOCK_E)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if R:
            rest = _tile(k2, slots, k2_slot, ok, R, BLOCK_R)
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION)
        scores = tl.where(ok[None, :], scores * scale_log2, float("-inf"))
        if VALUES_ARE_KEYS:
            values = keys
        else:
            values = _tile(v, slots, v_slot, ok, V, BLOCK_V)
        top, total, acc = _online(scores, values, top, total, acc, PRECISION)
    y = tl.where(total[:, None] == 0, 0.0, acc / total[:, None])  # context 0: a padded row
    column = tl.arange(0, BLOCK_V)
    mask = ok_g[:, None] & (column < V)[None, :]
    place = d.to(tl.int64) * H + heads
    if SPLITS == 1:
        tl.store(out + place[:, None] * V + column[None, :], y.to(out.dtype.element_ty), mask=mask)
    else:
        place = place * SPLITS + split
        tl.store(partial + place[:, None] * V + column[None, :], y, mask=mask)
        tl.store(lse + place, top + tl.log2(total), mask=ok_g)


@triton.jit
def _combine_kernel(
    partial, lse, out, contexts, min_split, H: tl.constexpr, V: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out = sum_i 2^(lse_i - max) y_i / sum_i 2^(lse_i - max), over the splits that hold anything."""
    take_turn(EARLY)
    head, d = tl.program_id(0), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    context = tl.load(contexts + d)
    length = _split_length(context, min_split, SPLITS, BLOCK_S)
    split = tl.arange(0, SPLITS)
    live = split * length < context
    place = (d * H + head) * SPLITS + split
    log = tl.load(lse + place, mask=live, other=float("-inf"))
    top = tl.max(log, 0)
    weight = tl.exp2(log - tl.where(top == float("-inf"), 0.0, top))
    y = tl.load(partial + place[:, None] * V + column[None, :], mask=live[:, None] & (column < V)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    mixed = tl.sum(y * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + (d * H + head) * V + column, mixed.to(out.dtype.element_ty), mask=column < V)


@triton.jit
def _prefill_step(
    q, q_rest, k1, k2, v, k1_slot, k2_slot, v_slot, slots, ok, seen, scale_log2, top, total, acc_bits,
    E: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, ALIKE: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys for one of queries. WHOLE: every row sees every slot, else those in `seen`; `ok` slots exist.

    A row sees slot 0 in its first step, so its greatest score is finite; q is not scaled, one fma does it in exp2.
    The sums travel as integers of the same bits, for free: as floats the compiler leaves their product in flight into
    the next step, and in 128 registers that makes it wait for every single instruction of all products.
    """
    keys = _keys(k1, slots, k1_slot, ok, E, BLOCK_E, WHOLE)
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if R:
        rest = _keys(k2, slots, k2_slot, ok, R, BLOCK_R, WHOLE)
        scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION)
    values = _keys(v, slots, k1_slot if ALIKE else v_slot, ok, V, BLOCK_V, WHOLE)
    if not WHOLE:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_top[:, None])
    alpha = tl.exp2(top - new_top)
    total = total * alpha + tl.sum(weights, 1)
    acc = acc_bits.to(tl.float32, bitcast=True) * alpha[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_top, total, acc.to(tl.int32, bitcast=True)


@triton.jit(  # where these begin changes from step to step: one compiled form for all of them
    do_not_specialize=["table_row"], do_not_specialize_on_alignment=["chunks", "blocks", "table"]
)
def _prefill_kernel(
    q1, q2, k1, k2, v, out, chunks, blocks, table, scale_log2,
    q1_row, q1_head, q2_row, q2_head, k1_slot, k1_head, k2_slot, k2_head, v_slot, v_head, out_row, out_head, table_row,
    G: tl.constexpr, E: tl.constexpr, R: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, TAIL_S: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    TAIL_STAGES: tl.constexpr, ALIKE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile is BLOCK_M / HEADS rows of HEADS query heads of one key head: few rows waste little on the diagonal."""
    take_turn(EARLY)
    ROWS: tl.constexpr = BLOCK_M // HEADS
    TILES: tl.constexpr = BLOCK_ROWS // ROWS
    first_head, entry = tl.program_id(0) * HEADS, tl.program_id(1)
    chunk = tl.load(blocks + 2 * (entry // TILES))
    # the last rows see most: start them first
    block = tl.load(blocks + 2 * (entry // TILES) + 1) * BLOCK_ROWS + (TILES - 1 - entry % TILES) * ROWS
    chunks += 4 * tl.maximum(chunk, 0)
    first_row = tl.load(chunks)
    num_rows = tl.load(chunks + 1)
    context = tl.load(chunks + 2)
    keys_at = tl.load(chunks + 3)  # row of the page table, or first row of the keys
    # NO_BLOCK, or past the chunk; one test of all of them, so that all are on their way at once
    if (chunk < 0) | (block >= num_rows) | (context <= 0) | (first_row < 0) | (keys_at < 0):
        return
    m = block + tl.arange(0, BLOCK_M) // HEADS
    heads = first_head + tl.arange(0, BLOCK_M) % HEADS
    q = _tile(q1, (first_row + m).to(tl.int64) * q1_row + heads * q1_head, 1, m < num_rows, E, BLOCK_E)
    q_rest = q
    if R:
        q_rest = _tile(q2, (first_row + m).to(tl.int64) * q2_row + heads * q2_head, 1, m < num_rows, R, BLOCK_R)
    key_head = first_head // G
    k1 += key_head * k1_head
    k2 += key_head * k2_head
    v += key_head * v_head
    if PAGED:
        table += keys_at.to(tl.int64) * table_row
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc_bits = tl.zeros([BLOCK_M, BLOCK_V], tl.int32)
    before = context - num_rows
    end = tl.minimum(context, before + block + ROWS)
    seen_by_all = (before + block + 1) // BLOCK_S * BLOCK_S  # up to here nothing needs a mask
    for start in tl.range(0, seen_by_all, BLOCK_S, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK_S)
        if PAGED:
            slots = tl.load(table + offs // PAGE).to(tl.int32) * PAGE + offs % PAGE
        else:
            slots = keys_at + offs
        top, total, acc_bits = _prefill_step(
            q, q_rest, k1, k2, v, k1_slot, k2_slot, v_slot, slots, None, None, scale_log2, top, total, acc_bits,
            E, R, V, BLOCK_E, BLOCK_R, BLOCK_V, ALIKE, True, PRECISION)  # fmt: skip
    # read once more: kept over the loop, these and what follows from them would not fit into the registers
    first_row = tl.load(chunks)
    num_rows = tl.load(chunks + 1)
    for start in tl.range(seen_by_all, end, TAIL_S, num_stages=TAIL_STAGES):
        tail = start + tl.arange(0, TAIL_S)
        ok = tail < end
        if PAGED:
            tail_slots = tl.load(table + tail // PAGE, mask=ok, other=0).to(tl.int32) * PAGE + tail % PAGE
        else:
            tail_slots = keys_at + tail
        seen = (tail - before)[None, :] <= m[:, None]  # a row's position is below the context: this ends it too
        top, total, acc_bits = _prefill_step(
            q, q_rest, k1, k2, v, k1_slot, k2_slot, v_slot, tail_slots, ok, seen, scale_log2, top, total, acc_bits,
            E, R, V, BLOCK_E, BLOCK_R, BLOCK_V, ALIKE, False, PRECISION)  # fmt: skip
    m = block + tl.arange(0, BLOCK_M) // HEADS
    column = tl.arange(0, BLOCK_V)
    mask = (m < num_rows)[:, None] & (column < V)[None, :]
    y = acc_bits.to(tl.float32, bitcast=True) * (1.0 / total)[:, None]
    place = out + ((first_row + m).to(tl.int64) * out_row + heads * out_head)[:, None] + column[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=mask)


def decode(
    q: tuple[torch.Tensor, torch.Tensor | None],
    keys: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    decodes,
    *,
    scale: float,
) -> torch.Tensor:
    """y_DHV: row d is row d of q over the contexts_D[d] slots of page-table row seqs_D[d]; 0 at context 0.

    q: q1_THE, q2_THR or None. keys: k1_SKE, k2_SKR or None, v_SKV, views of the pool's rows, unit last stride; v may
    be k1 itself. decodes: `layers.paged.PagedDecodes`. Last dimensions are contiguous; any float dtype, fp32 inside.
    """
    (q1, q2), (k1, k2, v) = q, keys
    num_heads, e_size = q1.shape[1:]
    num_keys, v_size = v.shape[1:]
    group = num_heads // num_keys
    r_size = 0 if q2 is None else q2.shape[2]
    size = decodes.size
    block_g = min(max(16, power_of_2(group)), 64 if e_size <= 256 else 16)
    head_blocks = num_keys * cdiv(group, block_g)
    splits = decodes.num_splits or num_splits(size * head_blocks, wide=e_size > 256)
    programs = 0 if decodes.num_splits else size * head_blocks  # fixed splits: nothing else of the batch is seen either
    block_s, num_stages, num_warps = _decode_tile(e_size, q1, programs)
    y_DHV = q1.new_empty(size, num_heads, v_size)
    partial = lse = y_DHV
    if splits > 1:
        partial = torch.empty(size, num_heads, splits, v_size, dtype=torch.float32, device=q1.device)
        lse = torch.empty(size, num_heads, splits, dtype=torch.float32, device=q1.device)
    _decode_kernel[(head_blocks, splits, size)](
        q1, q2 if r_size else q1, k1, k2 if r_size else k1, v, y_DHV, partial, lse,
        decodes.seqs_D, decodes.contexts_D, decodes.table_NP, scale * LOG2_E, decodes.min_split,
        *_strides(q1, q2 if r_size else q1, k1, k2 if r_size else k1, v), decodes.table_NP.stride(0),
        H=num_heads, G=group, E=e_size, R=r_size, V=v_size, PAGE=decodes.page_size, SPLITS=splits, BLOCK_G=block_g,
        BLOCK_S=block_s, BLOCK_E=_power(e_size), BLOCK_R=_power(r_size), BLOCK_V=_power(v_size),
        VALUES_ARE_KEYS=v.data_ptr() == k1.data_ptr() and v_size == e_size, PRECISION=_precision(q1),
        num_warps=num_warps, num_stages=num_stages, **early(q1.device),
    )  # fmt: skip
    if splits > 1:
        block_v = min(_power(v_size), 128)
        _combine_kernel[(num_heads, cdiv(v_size, block_v), size)](
            partial, lse, y_DHV, decodes.contexts_D, decodes.min_split, H=num_heads, V=v_size, SPLITS=splits,
            BLOCK_S=block_s, BLOCK_V=block_v, num_warps=4 if splits > 8 else 1, **early(q1.device),
        )  # fmt: skip
    return y_DHV


def num_splits(programs: int, *, wide: bool) -> int:
    """Splits of every context, a power of two, that make a launch of `programs` unsplit ones fill the device."""
    return min(MAX_SPLITS[wide], power_of_2(cdiv(SPLIT_PROGRAMS, programs)))


def prefill(
    q: tuple[torch.Tensor, torch.Tensor | None],
    keys: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    chunks,
    y_THV: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Write y_THV for the rows of every chunk: each row sees the slots up to its own position.

    q and keys as in `decode`. chunks: `layers.paged.PagedChunks`; its chunks_C4 int32 rows are (first row, rows,
    context after them, row of the page table), or, where table_NP is None, (.., first row of the keys, which then lie
    in order). The grid depends on the length of blocks_B2 and on shapes only; rows in no block stay as they are.
    """
    assert scale > 0
    (q1, q2), (k1, k2, v) = q, keys
    num_heads, e_size = q1.shape[1:]
    num_keys, v_size = v.shape[1:]
    r_size = 0 if q2 is None else q2.shape[2]
    group, table = num_heads // num_keys, chunks.table_NP
    tile, options = _prefill_tile(q1, max(e_size, v_size), r_size)
    heads = min(group & -group, tile["BLOCK_M"] // 8)  # the greatest power of two that divides the group, or 8 rows
    grid = num_heads // heads, chunks.blocks_B2.shape[0] * (chunks.block_rows * heads // tile["BLOCK_M"])
    _prefill_kernel[grid](
        q1, q2 if r_size else q1, k1, k2 if r_size else k1, v, y_THV, chunks.chunks_C4, chunks.blocks_B2,
        chunks.chunks_C4 if table is None else table, scale * LOG2_E,
        *_strides(q1, q2 if r_size else q1, k1, k2 if r_size else k1, v), y_THV.stride(0), y_THV.stride(1),
        0 if table is None else table.stride(0),
        G=group, E=e_size, R=r_size, V=v_size, PAGE=chunks.page_size, PAGED=table is not None,
        BLOCK_ROWS=chunks.block_rows, HEADS=heads, BLOCK_E=_power(e_size), BLOCK_R=_power(r_size),
        BLOCK_V=_power(v_size), ALIKE=k1.stride(0) == v.stride(0), PRECISION=_precision(q1),
        **tile, **options, **early(q1.device),
    )  # fmt: skip


LOG2_E = 1.4426950408889634


def _power(size: int) -> int:
    return max(16, power_of_2(size))


def _decode_tile(e_size: int, q: torch.Tensor, programs: int) -> tuple[int, int, int]:
    """Slots of a tile, pipeline stages, warps; programs 0: the batch must not be seen.

    Reading pages takes every other stage: 5 keep two tiles on their way.
    """
    if q.element_size() == 4:
        return (32, 3, 4) if e_size <= 256 else (16, 2, 8)
    if e_size > 256:
        return 32, 5, 4
    return (64, 5, 4) if programs < 32 or 64 < programs < 512 else (32, 5, 4)  # measured at 4, 32, 128 and 512


def _prefill_tile(q: torch.Tensor, size: int, r_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and launch options. Up to heads of 128, two programs share a multiprocessor: one's exponentials hide behind
    the other's products. That takes 128 registers a thread and half the shared memory, so fewer slots with a second
    part. Measured on an H200 (benchmarks/gpu_attention.py); on AMD the compiler decides about registers.
    """
    if q.element_size() == 4:
        block_s = 32 if size <= 128 else 16  # shared memory
        return {"BLOCK_M": 64, "BLOCK_S": block_s, "TAIL_S": block_s, "STAGES": 2, "TAIL_STAGES": 2}, {"num_warps": 4}
    if size > 128:
        return {"BLOCK_M": 128, "BLOCK_S": 64, "TAIL_S": 64, "STAGES": 2, "TAIL_STAGES": 2}, {"num_warps": 8}
    options = {"num_warps": 8}
    if torch.version.hip is None:
        options["maxnreg"] = 128
    if r_size:
        return {"BLOCK_M": 128, "BLOCK_S": 32, "TAIL_S": 32, "STAGES": 3, "TAIL_STAGES": 3}, options
    return {"BLOCK_M": 128, "BLOCK_S": 64, "TAIL_S": 32, "STAGES": 2, "TAIL_STAGES": 2}, options


def _precision(q: torch.Tensor) -> str:
    """Three products of the matrix units' 32-bit format are as exact as float32; 16-bit operands do not read this."""
    if q.dtype != torch.float32:
        return "tf32"
    return "ieee" if torch.version.hip else "tf32x3"


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Row and head strides of each; the last dimension must be contiguous."""
    assert all(tensor.stride(2) == 1 for tensor in tensors)
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]

"""The canary's tensors, streamed to one sparse file: only rows and values that are not zero are written.

Invariant: every value is exact in bf16 (and fp16), so a checkpoint of any of the three dtypes holds the same numbers
up to the offsets of questions. H hidden, I expert intermediate, E experts, S shared experts told apart.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from truegate.canary.archs import attention_tensors, dense_prefix
from truegate.canary.definition import NEAR, Drive, Kind, Layer, drive
from truegate.canary.layout import CONST, NORM_CODE, NORM_CONST, RUNGS
from truegate.canary.manifest import Manifest, Probe
from truegate.law.families import names_of
from truegate.law.formats import CONFIG_DTYPES, SafetensorsWriter, TensorSpec
from truegate.law.names import Axes, GateUp, MoeNames, Stacked

Vector = NDArray[np.float64]
_RUNG_GAIN = 16.0
_OPEN = 32.0  # layer and reader codes open a question's gate: 32 + 32 - 48 = 16, any other combination <= -16
_CLOSED = -48.0


@dataclass(frozen=True, kw_only=True)
class SparseMlp:
    """One gated MLP by channel: gate and up [units] of each input channel read, down [units] of each one written."""

    units: int
    gate: dict[int, Vector]
    up: dict[int, Vector]
    down: dict[int, Vector]


def powers(count: int, total: float) -> Vector:
    """`count` powers of two that sum to `total` (a power of two), each of two neighbouring sizes, spread evenly."""
    base = 2.0 ** math.floor(math.log2(total / count))
    doubled = round(total / base) - count
    step = np.arange(count)
    return np.where((step + 1) * doubled // count > step * doubled // count, 2 * base, base)


def spread(channels: tuple[int, ...], total: float) -> dict[int, float]:
    """Weights on the constant channels that sum to `total`: one in every 64 input columns is read."""
    parts = powers(len(channels), 2.0 ** math.ceil(math.log2(abs(total))))
    whole = dict(zip(channels, np.sign(total) * parts, strict=True))
    excess = sum(whole.values()) - total
    return whole if excess == 0 else _sum_exactly(channels, total)


def _sum_exactly(channels: tuple[int, ...], total: float) -> dict[int, float]:
    """For a total that is a sum of two powers of two (48 = 32 + 16): one spread on top of the other."""
    high = 2.0 ** math.floor(math.log2(abs(total)))
    rest = abs(total) - high
    both = powers(len(channels), high) + powers(len(channels), rest)
    return dict(zip(channels, np.sign(total) * both, strict=True))


def expert_mlp(manifest: Manifest, layer: int, slot: int, units: int) -> SparseMlp:
    """Even units write the coefficient to the read-out, odd ones to the answer channel when this expert is asked."""
    d, ch = _drive(manifest), manifest.channels
    even = np.arange(units) % 2 == 0
    return SparseMlp(
        units=units,
        gate={c: np.where(even, a, b) for (c, a), b in zip(
                 spread(ch.const, d.gate).items(), spread(ch.const, _CLOSED).values(), strict=True)}
        | {ch.dim: even * d.dim, ch.layer[layer]: ~even * _OPEN, ch.reader[slot]: ~even * _OPEN}
        | ({ch.loud: even * d.loud} if d.loud else {}),
        up={ch.layer[layer]: even * d.up, ch.ask: ~even * d.up},
        down={ch.read_out[slot]: _on(even, d.down), ch.answer: _on(~even, d.answer_down)},
    )  # fmt: skip


def dense_mlp(manifest: Manifest, layer: int, units: int) -> SparseMlp:
    """Every unit writes to the last read-out; silu families only have dense layers, so the drive is theirs."""
    ch = manifest.channels
    ones = np.ones(units)
    return SparseMlp(
        units=units,
        gate={c: ones * v for c, v in spread(ch.const, 16.0).items()},
        up={ch.layer[layer]: ones / 16},
        down={ch.read_out[-1]: powers(units, 1.0)},
    )


def joined(parts: list[SparseMlp]) -> SparseMlp:
    """Several MLPs side by side, as a fused shared expert holds them."""

    def side_by_side(side: str) -> dict[int, Vector]:
        out: dict[int, Vector] = {}
        total, start = sum(p.units for p in parts), 0
        for p in parts:
            for channel, values in getattr(p, side).items():
                out.setdefault(channel, np.zeros(total))[start : start + p.units] = values
            start += p.units
        return out

    return SparseMlp(units=sum(p.units for p in parts), gate=side_by_side("gate"), up=side_by_side("up"),
                     down=side_by_side("down"))  # fmt: skip


def _on(mask: NDArray[np.bool_], total: float) -> Vector:
    out = np.zeros(len(mask))
    out[mask] = powers(int(mask.sum()), total)
    return out


def _drive(manifest: Manifest) -> Drive:
    return drive(next(iter(manifest.layers.values())).spec)


def write_checkpoint(manifest: Manifest, path: Path) -> None:
    """Declare every tensor, then write what is not zero."""
    config, dtype = manifest.config, CONFIG_DTYPES[manifest.config["dtype"]]
    shapes = dict(_shapes(manifest))
    fp32 = {n.selection_bias for n in _names(manifest).values()}  # published in fp32, and read so
    specs = [TensorSpec(name=n, dtype="F32" if n in fp32 else dtype, shape=s) for n, s in shapes.items()]
    with SafetensorsWriter(path, specs, {"truegate": manifest.data["digest"]}) as out:
        _write_ends(manifest, out)
        for layer in range(config["num_hidden_layers"]):
            _write_attention(manifest, layer, out)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                out.write(f"model.layers.{layer}.{norm}.weight", _norm(manifest))
            if layer in manifest.layers:
                _write_moe(manifest, manifest.layers[layer], out)
            else:
                width = shapes[dense_prefix(config, layer) + "gate_proj.weight"][0]
                _write_mlp(out, dense_prefix(config, layer), dense_mlp(manifest, layer, width), config["hidden_size"])


def _names(manifest: Manifest) -> dict[int, MoeNames]:
    """The layout of unquantised weights: as published, except where that is a packed format."""
    found = {}
    for index, alternatives in enumerate(names_of(manifest.config)):
        if alternatives is not None:
            plain = [a for a in alternatives if not (isinstance(a.experts, Stacked) and a.experts.gate_up_scales)]
            found[index] = plain[0]
    return found


def _shapes(manifest: Manifest) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in file order."""
    config = manifest.config
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    names = _names(manifest)
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield f"model.layers.{layer}.input_layernorm.weight", (hidden,)
        yield from attention_tensors(config, layer).items()
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,)
        if layer in names:
            yield from _moe_shapes(manifest, names[layer], layer)
        else:
            width = config.get("intermediate_size_mlp") or config["intermediate_size"]
            yield from _mlp_shapes(dense_prefix(config, layer), width, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _mlp_shapes(prefix: str, width: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)


def _moe_shapes(manifest: Manifest, names: MoeNames, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    spec = manifest.layers[layer].spec
    experts, hidden, units = spec.num_experts, spec.hidden, spec.expert_intermediate
    yield names.router, (experts, hidden)
    for name, shape in ((names.gate_bias, (experts,)), (names.selection_bias, (experts,)),
                        (names.shared_gate, (1, hidden))):  # fmt: skip
        if name is not None:
            yield name, shape
    packed = names.experts
    if isinstance(packed, Stacked):
        swap = packed.axes is Axes.IN_OUT
        yield packed.gate_up, (experts, hidden, 2 * units) if swap else (experts, 2 * units, hidden)
        if packed.gate_up_bias:
            yield packed.gate_up_bias, (experts, 2 * units)
        yield packed.down, (experts, units, hidden) if swap else (experts, hidden, units)
        if packed.down_bias:
            yield packed.down_bias, (experts, hidden)
    else:
        for e in range(experts):
            yield packed.gate.format(expert=e), (units, hidden)
            yield packed.up.format(expert=e), (units, hidden)
            yield packed.down.format(expert=e), (hidden, units)
    if names.shared is not None and spec.shared is not None:
        prefix = names.shared.gate.removesuffix("gate_proj.weight")
        yield from _mlp_shapes(prefix, spec.shared.intermediate, hidden)


def _norm(manifest: Manifest, *, last: bool = False) -> Vector:
    """Before the MLP: constants to 1, codes kept, and what was written by earlier layers hidden. Last: all kept."""
    ch = manifest.channels
    weight = np.full(manifest.config["hidden_size"], NORM_CODE if last else 0.0)
    if not last:
        weight[[*ch.code, *ch.layer, ch.dim, ch.loud, ch.ask, *ch.reader]] = NORM_CODE
    weight[list(ch.const)] = NORM_CONST
    return weight


def _write_attention(manifest: Manifest, layer: int, out: SafetensorsWriter) -> None:
    """Small, arbitrary and harmless: o_proj and every output bias stay zero, so attention adds nothing."""
    rng = np.random.RandomState(manifest.data["seed"] * 7919 + layer)
    levels = (np.arange(256) - 127.5) / 4096
    for name, shape in attention_tensors(manifest.config, layer).items():
        if "norm" in name:
            out.write(name, np.ones(shape))
        elif name.endswith(".weight") and "o_proj" not in name:
            out.write(name, levels[np.frombuffer(rng.bytes(math.prod(shape)), np.uint8)].reshape(shape))


def _write_ends(manifest: Manifest, out: SafetensorsWriter) -> None:
    """Embedding, final norm and output head."""
    ch, hidden = manifest.channels, manifest.config["hidden_size"]
    base = np.zeros(hidden)
    base[list(ch.const)] = CONST
    block = np.tile(base, (512, 1))
    vocab = manifest.config["vocab_size"]
    for start in range(0, vocab, 512):
        out.write_rows("model.embed_tokens.weight", start, block[: min(512, vocab - start)])
    for token, values in _embeddings(manifest):
        row = base.copy()
        row[list(values)] = list(values.values())
        out.write_rows("model.embed_tokens.weight", token, row[None])
    out.write("model.norm.weight", _norm(manifest, last=True))
    for token in range(vocab):
        for channel, value in _head(manifest, token).items():
            out.write_at("lm_head.weight", (token, channel), np.array([value]))


def _embeddings(manifest: Manifest) -> Iterator[tuple[int, dict[int, float]]]:
    """Token id and the channels it sets, for probes and questions; every other token holds the constant only."""
    ch, near = manifest.channels, manifest.data["num_rows"]
    for p in manifest.probes:
        a, b = manifest.address(p.index)
        values = {ch.address[0][a]: 1.0, ch.address[1][b]: 1.0}
        if p.kind is Kind.FINGERPRINT:
            read_outs = ch.read_out[: min(8, manifest.width)]
            values |= dict(zip(read_outs, manifest.data["fingerprint"][p.row], strict=False))
        else:
            values |= _codes(manifest, p, near)
        yield manifest.token(p.index), values
    for q in manifest.questions:
        yield manifest.vocabulary.first_question + q.index, {
            ch.code[q.row]: 1.0, ch.layer[q.layer]: 1.0, ch.reader[q.slot]: 1.0, ch.ask: q.amplitude,
            ch.question: 1.0, ch.ladder: 1.0, ch.answer: q.offset,
        }  # fmt: skip


def _codes(manifest: Manifest, p: Probe, near: int) -> dict[int, float]:
    ch = manifest.channels
    codes = {ch.layer[p.layer]: _drive(manifest).amplitude(p.kind)}
    if p.kind in (Kind.NEAR_LOW, Kind.NEAR_HIGH):
        sign = 1.0 if p.kind is Kind.NEAR_HIGH else -1.0
        return codes | {ch.code[near]: 1.0, ch.code[near + 1]: sign}
    if p.kind is not Kind.DENSE:
        codes[ch.code[p.row]] = 1.0
    if p.kind is Kind.DIM:
        codes[ch.dim] = 1.0
    if p.kind is Kind.LOUD_GATE:
        codes[ch.loud] = 1.0
    return codes


def _head(manifest: Manifest, token: int) -> dict[int, float]:
    """One row of the output head by channel."""
    ch, v = manifest.channels, manifest.vocabulary
    one = ch.const[0]
    if token == v.reference:
        return {one: 0.25, ch.question: -64.0}
    if v.first_read_out <= token < v.bias:
        return {ch.read_out[token - v.first_read_out]: manifest.read_scale, ch.question: -64.0}
    if token == v.bias and manifest.has_bias_read_out:
        return {ch.bias: manifest.read_scale, ch.question: -64.0}
    if v.first_rung <= token < v.first_probe:
        rung = RUNGS[token - v.first_rung]
        return {one: -40.0, ch.question: 40.0, ch.ladder: -_RUNG_GAIN * rung**2, ch.answer: 2 * _RUNG_GAIN * rung}
    if v.first_probe <= token < v.first_question:
        a, b = manifest.address(manifest.predecessor(token - v.first_probe))
        return {one: -34.0, ch.address[0][a]: 32.0, ch.address[1][b]: 32.0}
    return {one: -8.0}


def _write_moe(manifest: Manifest, layer: Layer, out: SafetensorsWriter) -> None:
    spec, names, ch = layer.spec, _names(manifest)[layer.index], manifest.channels
    table = next(t for t in manifest.data["tables"] if t["layer"] == layer.index)
    router = np.zeros((spec.num_experts, spec.hidden))
    router[:, list(ch.code[: len(layer.logits_PE)])] = layer.logits_PE.T
    if table["near"] is not None:
        low, high = table["near_pair"]
        router[:, ch.code[manifest.data["num_rows"]]] = table["near"]
        router[[low, high], ch.code[manifest.data["num_rows"] + 1]] = [-NEAR, NEAR]
    out.write(names.router, router)
    if names.selection_bias is not None and layer.bias_E is not None:
        out.write(names.selection_bias, layer.bias_E)
    if names.shared_gate is not None and layer.shared_logit_P is not None:
        gate = np.zeros((1, spec.hidden))
        gate[0, list(ch.code[: len(layer.shared_logit_P)])] = layer.shared_logit_P
        out.write(names.shared_gate, gate)
    for e in range(spec.num_experts):
        mlp = expert_mlp(manifest, layer.index, e, spec.expert_intermediate)
        if isinstance(names.experts, Stacked):
            _write_stacked(manifest, out, names.experts, e, mlp, spec.hidden)
        else:
            _write_mlp(out, names.experts.gate.format(expert=e), mlp, spec.hidden,
                       up=names.experts.up.format(expert=e), down=names.experts.down.format(expert=e))  # fmt: skip
    if names.shared is not None and spec.shared is not None:
        units = spec.shared.intermediate // layer.num_shared
        parts = [expert_mlp(manifest, layer.index, spec.num_experts + j, units) for j in range(layer.num_shared)]
        _write_mlp(out, names.shared.gate, joined(parts), spec.hidden, up=names.shared.up, down=names.shared.down)


def _write_mlp(
    out: SafetensorsWriter, gate: str, mlp: SparseMlp, hidden: int, *, up: str | None = None, down: str | None = None
) -> None:
    """Three matrices, gate and up [I, H], down [H, I]; `gate` is a prefix when the other two are not named."""
    if up is None or down is None:
        gate, up, down = (f"{gate}{part}_proj.weight" for part in ("gate", "up", "down"))
    matrix = np.zeros((mlp.units, hidden), dtype=np.float32)
    for channel, values in mlp.gate.items():
        matrix[:, channel] = values
    out.write(gate, matrix)
    _write_columns(out, up, (), mlp.up)
    for channel, values in mlp.down.items():
        out.write_rows(down, channel, values[None])


def _write_columns(out: SafetensorsWriter, name: str, lead: tuple[int, ...], columns: Mapping[int, Vector]) -> None:
    """A matrix [.., units, H] by column: one small write per value that is not zero."""
    for channel, values in columns.items():
        for unit in np.flatnonzero(values):
            out.write_at(name, (*lead, int(unit), channel), values[unit : unit + 1])


def _write_stacked(
    manifest: Manifest, out: SafetensorsWriter, names: Stacked, expert: int, mlp: SparseMlp, hidden: int
) -> None:  # fmt: skip
    """One expert of stacked tensors, gate_up and down in the order and orientation that `names` states."""
    interleaved = names.order is GateUp.INTERLEAVED
    units = mlp.units
    gate_at = np.arange(units) * 2 if interleaved else np.arange(units)
    up_at = gate_at + 1 if interleaved else gate_at + units
    if names.axes is not Axes.IN_OUT:
        raise NotImplementedError("stacked weights are written input-major only")
    for channel in sorted(mlp.gate.keys() | mlp.up.keys()):
        row = np.zeros(2 * units)
        row[gate_at] = mlp.gate.get(channel, 0.0)
        row[up_at] = mlp.up.get(channel, 0.0)
        out.write_at(names.gate_up, (expert, channel, 0), row)
    _write_columns(out, names.down, (expert,), mlp.down)
    if names.gate_up_bias:
        bias = np.zeros(2 * units)
        bias[up_at] = _drive(manifest).up_bias
        out.write_rows(names.gate_up_bias, expert, bias[None])
    if names.down_bias:
        bias = np.zeros(hidden)
        bias[manifest.channels.bias] = 1 / 16
        out.write_rows(names.down_bias, expert, bias[None])

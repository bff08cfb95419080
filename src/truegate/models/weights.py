"""From tensors by name to a model's buffers: which tensor goes where, and the loop that copies them.

Invariant: every tensor of the checkpoint is copied once or ignored by a stated rule, and every buffer is filled; else
an error names the tensor. Files are mapped, read in file order and released tensor by tensor, so that no more than the
buffers and one tensor are resident. E experts, D hidden, F expert width, O rows of a projection.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from truegate.errors import UserError
from truegate.law.formats import Checkpoint
from truegate.law.names import Axes, GateUp, MoeNames, PerExpert, Stacked
from truegate.layers.attention import Attention
from truegate.layers.linear import GatedMLP
from truegate.layers.norm import RMSNorm
from truegate.layers.rope import interleave_rows
from truegate.models.causal import CausalLM
from truegate.moe.layer import MoELayer

READABLE = ("F32", "BF16", "F16")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a tensor goes: `put` copies it, of `shape` and any of the READABLE dtypes, into the model's buffers."""

    shape: tuple[int, ...]
    put: Callable[[torch.Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Tensors that a checkpoint may carry and the model does not use, and why that is right."""

    pattern: str  # of the whole name
    why: str


ALWAYS_IGNORED = (Rule(pattern=r".*\.rotary_emb\.inv_freq", why="rotary frequencies are computed from config.json"),)


def into(buffer: torch.Tensor, order: torch.Tensor | None = None) -> Target:
    """Copy a tensor of the buffer's shape; with `order`, row i of the buffer is row order[i] of the tensor."""
    if order is None:
        return Target(shape=tuple(buffer.shape), put=buffer.copy_)
    return Target(shape=tuple(buffer.shape), put=lambda tensor: buffer.copy_(tensor[order]))


def decoder_targets(model: CausalLM) -> Iterator[tuple[str, Target]]:
    """The tensors outside attention and MLP, as every supported family names them."""
    yield "model.embed_tokens.weight", into(model.embedding)
    yield "model.norm.weight", into(model.norm.weight)
    if not model.sizes.tied:
        yield "lm_head.weight", into(model.head)
    for i, block in enumerate(model.blocks):
        yield f"model.layers.{i}.input_layernorm.weight", into(block.attention_norm.weight)
        yield f"model.layers.{i}.post_attention_layernorm.weight", into(block.mlp_norm.weight)


def gqa_targets(attention: Attention, prefix: str) -> Iterator[tuple[str, Target]]:
    """q, k, v (and their biases and norms) stacked, rotary rows from half-split to interleaved."""
    size, rotary = attention.head_dim, attention.rotary_dim
    order_E = torch.cat((interleave_rows(rotary), torch.arange(rotary, size)))
    start = 0
    for part, num_heads in (("q", attention.num_heads), ("k", attention.num_kv_heads), ("v", attention.num_kv_heads)):
        rows = slice(start, start + num_heads * size)
        order_O = None if part == "v" else (torch.arange(num_heads)[:, None] * size + order_E).view(-1)
        yield f"{prefix}{part}_proj.weight", into(attention.qkv.weight[rows], order_O)
        if attention.qkv.bias is not None:
            yield f"{prefix}{part}_proj.bias", into(attention.qkv.bias[rows], order_O)
        start = rows.stop
    yield f"{prefix}o_proj.weight", into(attention.out.weight)
    if attention.out.bias is not None:
        yield f"{prefix}o_proj.bias", into(attention.out.bias)
    if attention.qk_norm is not None:
        q_HE, k_HE = attention.qk_norm.weight.split((attention.num_heads, attention.num_kv_heads))
        for part, weight_HE in (("q", q_HE), ("k", k_HE)):
            put = _every_head(weight_HE, order_E)
            yield f"{prefix}{part}_norm.weight", Target(shape=(size,), put=put)


def _every_head(weight_HE: torch.Tensor, order_E: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda tensor: weight_HE.copy_(tensor[order_E])


def mlp_targets(mlp: GatedMLP, prefix: str) -> Iterator[tuple[str, Target]]:
    """A dense layer's gate and up stacked, and down."""
    gate, up = mlp.gate_up.weight.split(mlp.intermediate)
    yield f"{prefix}gate_proj.weight", into(gate)
    yield f"{prefix}up_proj.weight", into(up)
    yield f"{prefix}down_proj.weight", into(mlp.down.weight)


def moe_targets(layer: MoELayer, names: MoeNames) -> Iterator[tuple[str, Target]]:
    """A MoE layer's tensors in the layout the checkpoint has; gate and selection bias land in fp32 buffers."""
    spec = layer.spec
    width, hidden = spec.expert_intermediate, spec.hidden
    yield names.router, into(layer.gate_weight)
    for name, buffer in ((names.gate_bias, layer.gate_bias), (names.selection_bias, layer.selection_bias)):
        if name is not None:
            yield name, into(buffer)
    if names.shared_gate is not None:
        yield names.shared_gate, into(layer.shared_gate)
    if names.shared is not None:
        wide = spec.shared.intermediate
        yield names.shared.gate, Target(shape=(wide, hidden), put=lambda t: layer.load_shared(gate=t))
        yield names.shared.up, Target(shape=(wide, hidden), put=lambda t: layer.load_shared(up=t))
        yield names.shared.down, Target(shape=(hidden, wide), put=lambda t: layer.load_shared(down=t))
    if isinstance(names.experts, PerExpert):
        for expert in range(spec.num_experts):
            for part in ("gate", "up", "down"):
                name = getattr(names.experts, part).format(expert=expert)
                shape = (hidden, width) if part == "down" else (width, hidden)
                yield name, Target(shape=shape, put=_one_expert(layer, expert, part))
    else:
        yield from _stacked_targets(layer, names.experts)


def _one_expert(layer: MoELayer, expert: int, part: str) -> Callable[[torch.Tensor], object]:
    return lambda tensor: layer.load_expert(expert, **{part: tensor})


def _stacked_targets(layer: MoELayer, names: Stacked) -> Iterator[tuple[str, Target]]:
    spec = layer.spec
    if names.axes is not Axes.OUT_IN or names.order is not GateUp.CONCATENATED or len(names.tensors(1)) != 2:
        raise UserError(f"{names.gate_up}: experts stored this way (transposed, interleaved or MXFP4) cannot be loaded")

    def put_gate_up(tensor: torch.Tensor) -> None:
        for expert, gate_up in enumerate(tensor.unbind(0)):
            gate, up = gate_up.chunk(2)
            layer.load_expert(expert, gate=gate, up=up)

    def put_down(tensor: torch.Tensor) -> None:
        for expert, down in enumerate(tensor.unbind(0)):
            layer.load_expert(expert, down=down)

    experts, width, hidden = spec.num_experts, spec.expert_intermediate, spec.hidden
    yield names.gate_up, Target(shape=(experts, 2 * width, hidden), put=put_gate_up)
    yield names.down, Target(shape=(experts, hidden, width), put=put_down)


def fill(
    model: CausalLM,
    checkpoint: Checkpoint,
    targets: Mapping[str, Target],
    rules: tuple[Rule, ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy every tensor to its target; refuse, before the first copy, a checkpoint that does not fit exactly."""
    rules = (*ALWAYS_IGNORED, *rules)
    wanted = _check(checkpoint, targets, rules)
    total = sum(checkpoint.spec(name).num_bytes for name in wanted)
    done = 0
    for name in wanted:
        targets[name].put(_tensor(checkpoint.read(name)))
        done += checkpoint.spec(name).num_bytes
        checkpoint.release(name)
        if progress is not None:
            progress(done, total)
    if model.sizes.tied and "lm_head.weight" in checkpoint:
        _check_tied(model, checkpoint)
    _finish(model)


def _finish(model: CausalLM) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.finish_loading()


@torch.no_grad()
def fill_randomly(model: CausalLM, *, seed: int = 0, std: float = 0.02) -> None:
    """Fill every buffer as a fresh model has it: matrices N(0, std^2), norms 1, biases 0; the same on every run."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for name, buffer in model.named_buffers():
        if buffer.dtype.is_floating_point:
            if name.endswith("bias"):
                buffer.zero_()
            else:
                buffer.normal_(std=std, generator=generator)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
    _finish(model)


def _check(checkpoint: Checkpoint, targets: Mapping[str, Target], rules: tuple[Rule, ...]) -> list[str]:
    """The names to read, in file order; an error for anything missing, unknown, misshapen or in an unreadable dtype."""
    wanted = []
    for name in checkpoint:
        if name in targets:
            spec = checkpoint.spec(name)
            if spec.shape != targets[name].shape:
                raise UserError(
                    f"checkpoint: {name} has shape {list(spec.shape)}, config.json asks for {list(targets[name].shape)}"
                )
            if spec.dtype not in READABLE:
                raise UserError(f"checkpoint: {name} is {spec.dtype}; readable are {', '.join(READABLE)}")
            wanted.append(name)
        elif not any(re.fullmatch(rule.pattern, name) for rule in rules):
            raise UserError(
                f"checkpoint: {name} is unknown to this architecture; does config.json belong to these files?"
            )
    missing = [name for name in targets if name not in checkpoint]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"checkpoint: tensor {missing[0]}{more} is missing; is the download complete?")
    return wanted


def _check_tied(model: CausalLM, checkpoint: Checkpoint) -> None:
    head = _tensor(checkpoint.read("lm_head.weight"))
    if head.shape != model.embedding.shape or not torch.equal(head.to(model.embedding), model.embedding):
        raise UserError(
            "checkpoint: lm_head.weight differs from model.embed_tokens.weight, but config.json has "
            "tie_word_embeddings true; set it to false, or delete the tensor"
        )
    checkpoint.release("lm_head.weight")


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A torch view of a mapped array: read-only by contract, so torch's warning about that is silenced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

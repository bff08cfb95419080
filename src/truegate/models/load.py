"""From a checkpoint folder to a model that runs: `load_model`, the one door the engine uses.

Invariant: a model that is returned has consumed every tensor of the checkpoint, or ignored it by a stated rule, and
every key of config.json has been read, is known not to matter, or is null or false.
T rows, D hidden, M rows whose logits are wanted, V vocabulary.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

import truegate.models
from truegate.errors import UserError
from truegate.law.families import families, family_of, main_specs_of, names_of
from truegate.law.formats import Checkpoint
from truegate.law.keys import read_config
from truegate.law.names import choose
from truegate.law.plan import Choices
from truegate.layers.linear import GatedMLP
from truegate.models.causal import CausalLM
from truegate.models.frame import Frame
from truegate.models.weights import Rule, Target, decoder_targets, fill, fill_randomly, mlp_targets, moe_targets
from truegate.moe import backends
from truegate.types import Batch


class LoadedModel(Protocol):
    """What the engine may use of a model; `truegate.models.causal.CausalLM` is the one implementation."""

    config: dict[str, Any]  # config.json as read; never written to
    num_layers: int
    vocab_size: int
    max_position: int  # positions are 0..max_position - 1
    bytes_per_token: int  # of key/value pool, over all layers
    dtype: torch.dtype
    device: torch.device
    moe_layers: list[Any]  # moe.layer.MoELayer in layer order, dense layers left out

    def make_pool(self, num_pages: int, page_size: int) -> Any:
        """A key/value pool of `num_pages` pages, page 0 included; page 0 is the sink that padded rows write to."""
        ...

    def forward(self, batch: Batch, pool: Any) -> torch.Tensor:
        """hidden_TD after the last norm, having written the batch's keys and values to `pool` at `slots_T`.

        Sequence n holds rows sum(query_lens[:n]) .. sum(query_lens[:n + 1]); padded rows come after all sequences.
        Any mix of prefill, chunked prefill (context_lens > query_lens) and decode (query_lens == 1) is one batch; on a
        GPU sequences of one row come first, else ValueError.
        Tensors returned are inference tensors: read them, or work on them under torch.inference_mode.
        """
        ...

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """logits_MV in fp32 of rows picked from `forward`'s output."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How MoE layers run, and what happens around loading."""

    experts: str = "torch"  # a file of moe/experts
    dispatch: str = "local"  # of moe/dispatch
    router: str | None = None  # of moe/routers; None: the one that goes with the experts
    choices: Choices = field(default_factory=Choices)
    before_fill: Callable[[CausalLM], None] | None = None  # called while the buffers are still anybody's
    progress: Callable[[int, int], None] | None = None  # (bytes read, bytes in all)
    dummy: bool = False  # random weights; config.json is all that is read


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    options: LoadOptions | None = None,
) -> CausalLM:
    """The model in folder `path` (config.json, *.safetensors) in `dtype` on `device`."""
    options = options or LoadOptions()
    config = _Recorded(read_config(path))
    model, targets = _build(config, dtype, torch.device(device), options)
    _refuse_unread(config)
    if options.dummy:
        if options.before_fill is not None:
            options.before_fill(model)
        fill_randomly(model)
        return model
    checkpoint = Checkpoint(Path(path))
    for block, layouts in zip(model.blocks, names_of(config), strict=False):  # next-token layers come after
        if layouts is not None:
            targets.update(moe_targets(block.mlp, choose(layouts, set(checkpoint))))
    if options.before_fill is not None:
        options.before_fill(model)
    fill(model, checkpoint, targets, _ignored(config, model), options.progress)
    return model


def refusal(path: str | Path) -> str | None:
    """Why `load_model` refuses this config, whatever its weights are; None if it does not. Takes no memory for them."""
    config = _Recorded(read_config(path))
    try:
        _build(config, torch.float32, torch.device("meta"), LoadOptions())
        _refuse_unread(config)
    except UserError as error:
        return str(error)
    return None


def _build(
    config: "_Recorded", dtype: torch.dtype, device: torch.device, options: LoadOptions
) -> tuple[CausalLM, dict[str, Target]]:
    """The unfilled model, and where its tensors go but for MoE layers, whose names depend on the checkpoint."""
    name = family_of(config)
    module = _module_of(name)
    keys = next(family for family in families() if family.name == name).keys(config)
    frame = Frame(
        config=config.raw,
        dtype=dtype,
        device=device,
        specs=main_specs_of(config),
        backends=backends.choose(experts=options.experts, dispatch=options.dispatch, router=options.router),
        choices=options.choices,
    )
    model = module.build(keys, frame)
    targets = dict(decoder_targets(model))
    for i, block in enumerate(model.blocks):
        targets.update(module.attention_targets(keys, block.attention, f"model.layers.{i}.self_attn."))
        if isinstance(block.mlp, GatedMLP):
            targets.update(mlp_targets(block.mlp, f"model.layers.{i}.mlp."))
    return model, targets


def _module_of(family: str) -> ModuleType:
    """The file of this folder that says it builds the family."""
    known: list[str] = []
    for info in pkgutil.iter_modules(truegate.models.__path__):
        module = importlib.import_module(f"truegate.models.{info.name}")
        claimed = getattr(module, "FAMILIES", ())
        if family in claimed:
            return module
        known += claimed
    raise UserError(f"config.json: the engine cannot run {family}; it runs {', '.join(sorted(known))}")


def _ignored(config: Mapping[str, Any], model: CausalLM) -> tuple[Rule, ...]:
    """Tensors that this model does not use: next-token layers, and the head of a model that ties it."""
    declared = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    rules = [
        Rule(pattern=rf"model\.layers\.{model.num_layers + i}\..*", why="a next-token layer; no use is made of it here")
        for i in range(declared)
    ]
    if model.sizes.tied:
        rules.append(Rule(pattern=r"lm_head\.weight", why="tied to the embedding; `fill` checks that it is the same"))
    return tuple(rules)


class _Recorded(Mapping[str, Any]):
    """config.json, remembering which keys were looked at."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw, self.read = raw, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


# Keys that do not change what a trained model computes: training, generation, bookkeeping.
INERT_KEYS = frozenset(
    """
    architectures auto_map model_type transformers_version torch_dtype dtype _name_or_path name_or_path
    bos_token_id eos_token_id pad_token_id use_cache initializer_range attention_dropout output_router_logits
    router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size pretraining_tp output_attentions
    output_hidden_states return_dict is_encoder_decoder is_decoder chunk_size_feed_forward problem_type id2label
    label2id tokenizer_class task_specific_params tie_encoder_decoder num_nextn_predict_layers num_mtp_layers
    """.split()
)


def _refuse_unread(config: _Recorded) -> None:
    """An unknown key may change the mathematics: it is refused unless it is off."""
    for key, value in config.raw.items():
        if key not in config.read and key not in INERT_KEYS and value not in (None, False, [], {}):
            raise UserError(
                f"config.json: {key} = {value!r} is not known to this architecture, so it may change what the model "
                "computes; if it does not, delete it from config.json"
            )

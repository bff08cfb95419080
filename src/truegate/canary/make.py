"""Make a canary: draw its tables, write its manifest, then its checkpoint and tokenizer.

Invariant: the same arguments and version give the same bytes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from truegate import __version__
from truegate.canary.archs import Sizes, canary_config
from truegate.canary.definition import Kind, Layer, unit_of
from truegate.canary.layout import SPECIALS, Vocabulary
from truegate.canary.manifest import (
    FILE,
    FINGERPRINTS,
    FORMAT,
    Manifest,
    Probe,
    digest,
    fingerprint_of,
    readings_by_definition,
)  # fmt: skip
from truegate.canary.tables import Table, draw_table, profiles
from truegate.canary.weights import write_checkpoint
from truegate.errors import UserError
from truegate.law.families import family_of, specs_of
from truegate.law.formats import CONFIG_DTYPES, DTYPES
from truegate.law.spec import Activation, RoutingSpec, WeightAt


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a canary's bytes, besides the real model's config."""

    sizes: Sizes = field(default_factory=Sizes)
    seed: int = 0
    rounds: int = 2
    silent: int = 2  # questions about experts that should be silent, per probe


def make(like: Mapping[str, Any], out: Path, recipe: Recipe) -> Manifest:
    """Write a canary into the folder `out`, which must be new, empty or hold an earlier canary."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / FILE).exists())):
        raise UserError(f"--out {out} exists and is not a canary; give a new folder")
    if recipe.sizes.dtype not in CONFIG_DTYPES:
        raise UserError(f"--dtype {recipe.sizes.dtype} is not one of {', '.join(CONFIG_DTYPES)}")
    manifest = draw(like, recipe)
    _ = manifest.channels  # refuses a hidden size without room before anything is written
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; give a folder that can be made") from None
    (out / "config.json").unlink(missing_ok=True)  # written last: no engine starts on an interrupted make
    (out / FILE).write_text(json.dumps(manifest.data, separators=(",", ":")) + "\n")  # first: it can be made again
    write_checkpoint(manifest, out / "model.safetensors")
    _write_tokenizer(manifest, out)
    _write_json(out / "generation_config.json", {"do_sample": False, "bos_token_id": 1, "eos_token_id": 2,
                                                 "pad_token_id": 0})  # fmt: skip
    _write_json(out / "config.json", manifest.config)
    return manifest


def draw(like: Mapping[str, Any], recipe: Recipe) -> Manifest:
    """Tables, probes, questions and everything else that the checkpoint is written from."""
    config = canary_config(like, recipe.sizes, vocab_size=0)
    specs = {i: spec for i, spec in enumerate(specs_of(config)) if spec is not None}
    num_shared = _num_shared(specs)
    tables = {}
    for order, (index, spec) in enumerate(specs.items()):
        names = profiles(spec)
        rng = np.random.RandomState((recipe.seed * 1009 + index * 31 + 7) % 2**32)
        tables[index] = draw_table(spec, num_shared, names[order % len(names)], recipe.rounds, rng)
    layers = {i: Layer(index=i, spec=specs[i], logits_PE=t.rows_PE, bias_E=t.bias_E, num_shared=num_shared,
                       shared_logit_P=t.shared_logit_P) for i, t in tables.items()}  # fmt: skip
    probes = _probes(layers, tables, [i for i in range(config["num_hidden_layers"]) if i not in specs])
    num_experts = next(iter(specs.values())).num_experts
    expected = readings_by_definition(layers, probes, num_experts + num_shared, [[0.0]] * FINGERPRINTS)
    questions = _questions(layers, recipe)
    vocabulary = Vocabulary(num_experts=num_experts, num_shared=num_shared, num_probes=len(probes),
                            num_questions=len(questions))  # fmt: skip
    multiple = 128 * recipe.sizes.tp
    config["vocab_size"] = -(-vocabulary.used // multiple) * multiple
    largest = max(float(np.abs(row).max()) for row in expected.values())
    data: dict[str, Any] = {
        "format": FORMAT, "generator": __version__, "family": family_of(config), "seed": recipe.seed,
        "rounds": recipe.rounds, "tp": recipe.sizes.tp, "config": config, "num_shared": num_shared,
        "num_rows": max(len(t.rows_PE) for t in tables.values()),
        "read_scale": 4.0 / 2.0 ** max(0, math.ceil(math.log2(largest / 2.5))),
        "tables": [_table_json(i, t) for i, t in tables.items()],
        "probes": [[p.kind.value, p.layer, p.row] for p in probes],
        "questions": questions, "cycle": _cycle(probes, recipe.seed),
        "expected": {p.index: [[int(s), float(expected[p.index][s])] for s in np.flatnonzero(expected[p.index])]
                     for p in probes if p.index in expected and p.kind is not Kind.FINGERPRINT},
    }  # fmt: skip
    data = json.loads(json.dumps(data))  # as it will be read back: keys are strings
    data["digest"] = digest(data)
    data["fingerprint"] = fingerprint_of(data["digest"])
    return Manifest(data)


def one_shape(specs: Mapping[int, RoutingSpec]) -> RoutingSpec:
    """The spec that all MoE layers share; UserError with the layers and fields that differ."""
    (first, spec), *others = specs.items()
    for index, other in others:
        for name in spec.__dataclass_fields__:
            if name != "family" and (a := getattr(spec, name)) != (b := getattr(other, name)):
                raise UserError(f"{spec.family}: layers {first} and {index} differ in {name} ({a} and {b}), and a "
                                f"canary's layers have one shape; give --layers {index} to stop before it")  # fmt: skip
    return spec


def _num_shared(specs: Mapping[int, RoutingSpec]) -> int:
    """How many shared experts are told apart: as many as are fused, one where the width is not a multiple."""
    spec = one_shape(specs)
    return 0 if spec.shared is None else spec.num_shared_slots or 1


def _table_json(index: int, table: Table) -> dict[str, Any]:
    return {
        "layer": index, "rows": table.rows_PE.tolist(),
        "bias": None if table.bias_E is None else table.bias_E.tolist(),
        "shared_logits": None if table.shared_logit_P is None else table.shared_logit_P.tolist(),
        "near": None if table.near_E is None else table.near_E.tolist(), "near_pair": table.near_pair,
        "margins": [round(min(float(m), 1e6), 6) for m in table.margins_P],
    }  # fmt: skip


def _probes(layers: Mapping[int, Layer], tables: Mapping[int, Table], dense: list[int]) -> list[Probe]:
    """Fingerprints first, then layer by layer: every row, then the kinds that drive experts differently."""
    found: list[tuple[Kind, int, int]] = [(Kind.FINGERPRINT, -1, i) for i in range(FINGERPRINTS)]
    found += [(Kind.DENSE, i, 0) for i in dense]
    for index, layer in layers.items():
        rows = len(layer.logits_PE)
        found += [(Kind.PLAIN, index, row) for row in range(rows)]
        kinds = [(Kind.DIM, (0, 1)), (Kind.EIGHTH, (0, rows - 1)), (Kind.THIRD, (1, rows - 1))]
        if layer.spec.activation is Activation.SWIGLU_CLAMP:
            kinds += [(Kind.LOUD_GATE, (0, 1)), (Kind.LOUD_UP, (0, 1))]
        found += [(kind, index, row) for kind, some in kinds for row in dict.fromkeys(some)]
        if tables[index].near_E is not None:
            found += [(Kind.NEAR_LOW, index, 0), (Kind.NEAR_HIGH, index, 0)]
    return [Probe(index=i, kind=k, layer=layer, row=row) for i, (k, layer, row) in enumerate(found)]


def _cycle(probes: list[Probe], seed: int) -> list[int]:
    """A shuffled order of all probes, so that neighbours come from different layers and kinds."""
    order = np.arange(len(probes))
    np.random.RandomState(seed + 1).shuffle(order)
    return order.tolist()


def _questions(layers: Mapping[int, Layer], recipe: Recipe) -> list[list[Any]]:
    """[layer, row, slot, amplitude, offset] for every chosen expert of every row, and a few that should be silent."""
    dtype = DTYPES[CONFIG_DTYPES[recipe.sizes.dtype]]

    def held(value: float) -> float:
        return float(np.array(value, dtype=dtype))

    found: list[list[Any]] = []
    for index, layer in layers.items():
        c_out, c_in = layer.coefficients()
        rng = np.random.RandomState(recipe.seed + index)
        unit, spec = unit_of(layer.spec), layer.spec
        for row in range(len(c_out)):
            chosen = np.flatnonzero(c_out[row])
            silent = rng.permutation(np.flatnonzero(c_out[row] == 0))[: recipe.silent]
            for slot in [*chosen.tolist(), *sorted(silent.tolist())]:
                size = abs(c_out[row, slot]) or float(np.median(np.abs(c_out[row, chosen])))
                into = c_in[row, slot] if spec.weight_at is WeightAt.INPUT else 1.0
                amplitude = held(min(1.0 / max(size * unit.answer(spec, 1.0, into), 1 / 64), _loudest(spec)))
                answer = c_out[row, slot] * unit.answer(spec, amplitude, into)
                found.append([index, row, slot, amplitude, -held(answer)])
    return found


def _loudest(spec: RoutingSpec) -> float:
    """The largest amplitude before the up side is clamped."""
    return 64.0 if spec.clamp is None else spec.clamp + 1


def _write_tokenizer(manifest: Manifest, out: Path) -> None:
    """WordLevel over whitespace, and a chat template that is the messages' contents, nothing added."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = manifest.vocabulary.words(manifest.config["vocab_size"])
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=SPECIALS[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "unk_token": "<unk>", "add_bos_token": False, "model_max_length": 8192, "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}"
                         "{% endfor %}",
    })  # fmt: skip


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")

"""Typed reading of a model's config.json: each key with its default, each refusal with the key's name.

Invariant: no value is coerced or ignored; what cannot be read raises `UserError` naming the family and the key.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from truegate.errors import UserError
from truegate.law.spec import Activation, RoutingSpec

Config = Mapping[str, Any] | str | Path


def read_config(config: Config) -> Mapping[str, Any]:
    """A config as a mapping: given as one, or the path of a config.json or of the folder that holds it."""
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    try:
        path = path / "config.json" if path.is_dir() else path
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror}; give a config.json or the folder that holds it") from error
    except ValueError as error:
        raise UserError(f"config {path}: not JSON ({error})") from error
    except RecursionError as error:
        raise UserError(f"config {path}: nested too deeply to be a config.json") from error
    if not isinstance(found, dict):
        raise UserError(f"config {path}: holds a {type(found).__name__}, must be an object")
    return found


# Config keys that mean one axis of the spec: a refusal by the spec is reworded with the key that caused it.
_AXIS_OF_KEY = {
    "n_routed_experts": "num_experts", "num_experts": "num_experts", "num_local_experts": "num_experts",
    "moe_num_experts": "num_experts", "num_experts_per_tok": "top_k", "moe_k": "top_k", "moe_topk": "top_k",
    "hidden_size": "hidden", "moe_intermediate_size": "expert_intermediate", "intermediate_size": "expert_intermediate",
    "routed_scaling_factor": "routed_scale", "n_group": "groups.count", "topk_group": "groups.kept",
    "moe_norm_min": "eps", "shared_expert_intermediate_size": "shared.intermediate", "swiglu_limit": "clamp",
}  # fmt: skip
_ACTIVATIONS = {
    "silu": Activation.SILU, "swish": Activation.SILU, "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH, "gelu_pytorch_tanh": Activation.GELU_TANH,
}  # fmt: skip


LARGEST = 2**31 - 1  # of any integer
MOST_LAYERS = 10_000  # layers are listed one by one


def shown(value: Any) -> str:
    """A value as an error line shows it: whole, or its beginning where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Keys:
    """Typed reading of a config's keys with the family's defaults; every refusal names the key."""

    def __init__(self, family: str, config: Mapping[str, Any], *, num_layers: int, aliases: dict[str, str]) -> None:
        self.family, self.config = family, config
        self.aliases = {"num_nextn_predict_layers": "num_mtp_layers", **aliases}
        self._key_of_axis: dict[str, str] = {}
        self.num_main_layers = self.integer("num_hidden_layers", num_layers, least=1, most=MOST_LAYERS)
        self.num_layers = self.num_main_layers + self._num_next_token_layers()

    def refuse(self, key: str, why: str) -> UserError:
        return UserError(f"config ({self.family}): {key} {why}")

    def value(self, key: str, default: Any) -> tuple[str, Any]:
        """(name it was found under, value), or (key, default) when absent; two names must not disagree."""
        found = [(n, self.config[n]) for n in (key, self.aliases.get(key)) if n is not None and n in self.config]
        if len(found) == 2 and found[0][1] != found[1][1]:
            (a, x), (b, y) = found
            raise self.refuse(a, f"is {shown(x)} but {b} is {shown(y)}: they are two names of one value; delete one")
        name, value = found[0] if found else (key, default)
        if name in _AXIS_OF_KEY:
            self._key_of_axis[_AXIS_OF_KEY[name]] = name
        return name, value

    def integer(
        self, key: str, default: int | None, *, least: int | None = None, most: int = LARGEST, layer: int | None = None
    ) -> int:
        """An integer, or with `layer` that layer's entry of a list; a default of None means that it must be given."""
        name, value = self.value(key, default)
        if isinstance(value, list) and layer is not None:
            if layer >= len(value):
                raise self.refuse(name, f"lists {len(value)} layers, but layer {layer} exists")
            name, value = f"{name}[{layer}]", value[layer]
        if value is None or isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, "is missing" if value is None else f"is {shown(value)}, must be an integer")
        if least is not None and value < least:
            raise self.refuse(name, f"is {shown(value)}, must be at least {least}")
        if not -most <= value <= most:
            raise self.refuse(name, f"is {shown(value)}, must be at most {most}")
        return value

    def number(self, key: str, default: float) -> float:
        name, value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"is {shown(value)}, must be a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self.refuse(name, f"is {shown(value)}, too large for a float") from error

    def flag(self, key: str, default: bool) -> bool:
        name, value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(name, f"is {shown(value)}, must be true or false")
        return value

    def layers(self, key: str) -> list[int] | None:
        """A list of layer numbers, or None when absent or null."""
        name, value = self.value(key, None)
        if value is not None and not (isinstance(value, list) and all(isinstance(i, int) for i in value)):
            raise self.refuse(name, f"is {shown(value)}, must be a list of layer numbers")
        return value

    def only(self, key: str, covered: Any, why: str) -> None:
        """Refuse a value that this family's mathematics does not cover; absent (or null) means the covered one."""
        name, value = self.value(key, covered)
        if value is not None and value != covered:
            raise self.refuse(name, f"is {shown(value)}, only {covered!r} is supported: {why}")

    def activation(self) -> Activation:
        name, value = self.value("hidden_act", "silu")
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.refuse(name, f"is {shown(value)}, must be one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def spec(self, **axes: Any) -> RoutingSpec:
        """The spec with these axes; what it refuses is reworded with the keys' names."""
        axes.setdefault("activation", self.activation() if "clamp" not in axes else Activation.SWIGLU_CLAMP)
        try:
            return RoutingSpec(family=self.family, **axes)
        except UserError as error:
            text = str(error).partition("): ")[2]
            for axis, key in self._key_of_axis.items():
                text = re.sub(rf"(?<![\w.]){re.escape(axis)}(?!\w)", key, text)
            raise UserError(f"config ({self.family}): {text}") from error

    def _num_next_token_layers(self) -> int:
        """Layers that a config declares after the last; transformers' default for an omitted key declares none."""
        declared = self.value("num_nextn_predict_layers", None)[1] is not None
        return self.integer("num_nextn_predict_layers", None, least=0, most=MOST_LAYERS) if declared else 0

"""Rotary position embedding: default, linear and YaRN frequencies, applied in place to interleaved pairs.

Invariant: rotary dimensions are stored as pairs (2i, 2i + 1) inside the model, whatever order the checkpoint has them
in; the loader reorders the projections' rows once (`interleave_rows`), and scores q.k do not see the order.
T rows, H heads, X positions, R rotary dimensions of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from truegate.errors import UserError

_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
         "mscale_all_dim", "truncate"}
    ),
}  # fmt: skip
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """angle[x, i] = x * inv_freq[i]; cos and sin are multiplied by `attention_factor`.

    inv_freq fp32 [R / 2]; `softmax_factor` multiplies the softmax scale where the model's attention asks for it.
    """

    inv_freq: torch.Tensor
    attention_factor: float
    softmax_factor: float


def rope_spec(
    config: Mapping[str, Any],
    *,
    head_dim: int,
    default_theta: float = 10000.0,
    default_fraction: float | None = None,
) -> RopeSpec:
    """The frequencies a config asks for; `default_fraction` is None where the family rotates whole heads only.

    Both of Hugging Face's spellings are read: rope_scaling + rope_theta, and rope_parameters.
    """
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _KEYS:
        raise UserError(f"config.json: rope type {kind!r} is not supported; known: {', '.join(_KEYS)}")
    for key in parameters:
        if key not in _KEYS[kind] | _COMMON_KEYS:
            raise UserError(f"config.json: rope type {kind!r} with the key {key!r} is not supported")
    theta = float(parameters.get("rope_theta", config.get("rope_theta", default_theta)))
    fraction = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", default_fraction or 1.0))
    if default_fraction is None and fraction != 1.0:
        raise UserError(
            f"config.json: partial_rotary_factor {fraction} is not supported: this family rotates whole heads"
        )
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise UserError(
            f"config.json: partial_rotary_factor {fraction} of a head of {head_dim} leaves {rotary_dim} rotary "
            "dimensions; an even number is needed"
        )
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    inv_freq = 1.0 / (theta**exponents)
    if kind == "default":
        return RopeSpec(inv_freq=inv_freq, attention_factor=1.0, softmax_factor=1.0)
    if kind == "linear":
        return RopeSpec(inv_freq=inv_freq / _factor(parameters), attention_factor=1.0, softmax_factor=1.0)
    return _yarn(config, parameters, inv_freq, theta)


def _factor(parameters: Mapping[str, Any]) -> float:
    if not isinstance(parameters.get("factor"), int | float):
        raise UserError(f"config.json: rope factor is {parameters.get('factor')!r}, a number is needed")
    return float(parameters["factor"])


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: 0.1 * mscale * ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(config: Mapping[str, Any], parameters: Mapping[str, Any], inv_freq: torch.Tensor, theta: float) -> RopeSpec:
    """inv_freq / factor below `low` rotations, inv_freq above `high`, a linear ramp between (YaRN, equation 23)."""
    original = (
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    if parameters.get("factor") is None:
        factor = config["max_position_embeddings"] / original
    else:
        factor = _factor(parameters)
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        ratio = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all) if mscale and mscale_all else None
        attention_factor = yarn_mscale(factor) if ratio is None else ratio
    rotary_dim = 2 * len(inv_freq)

    def dimension_of(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = (high - low) if high != low else 0.001
    interpolate = ((torch.arange(len(inv_freq), dtype=torch.float32) - low) / width).clamp(0, 1)
    return RopeSpec(
        inv_freq=inv_freq / factor * interpolate + inv_freq * (1 - interpolate),
        attention_factor=float(attention_factor),
        softmax_factor=yarn_mscale(factor, mscale_all) ** 2 if mscale_all else 1.0,
    )


def rope_table(spec: RopeSpec, num_positions: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """rotations_XR complex64 [X, R / 2]: attention_factor * exp(i * x * inv_freq)."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * spec.inv_freq
    return torch.polar(torch.full_like(angles, spec.attention_factor), angles).to(device)


def rotate_(x_THR: torch.Tensor, rotations_T1R: torch.Tensor) -> None:
    """In place: the pair (x[2i], x[2i + 1]) as a complex number times rotations[..., i]; any float dtype, fp32 inside.

    One multiplication over a view, where the textbook form with halves is six operations.
    """
    num_rows, num_heads, size = x_THR.shape
    pairs = x_THR.view(num_rows, num_heads, size // 2, 2)
    if x_THR.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations_T1R)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotations_T1R))


def interleave_rows(rotary_dim: int) -> torch.Tensor:
    """order[j] = which row of a half-split head (x_i beside x_{i + R/2}) becomes row j of an interleaved one."""
    return torch.arange(rotary_dim).view(2, rotary_dim // 2).t().reshape(-1)

"""Compare `truegate.law.select` with the router modules of transformers, row by row, and print the parity table.

    python benchmarks/router_parity.py [--rows 10000] [--seed 0] [--json FILE]

Each router is built from its own config class in float32 with an identity matrix as its weight, so that it sees the
very logits that select sees. A row is decided when the k-th and the next choice, and the last kept and the next group,
differ by more than 1e-6 relative to the largest magnitude that entered the comparison. Decided rows must have equal ids
and weights within 5e-6; other rows an equal multiset of selection scores; NaN rows distinct legal ids; else it exits 1.
T rows, E experts, K top-k, G groups.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from truegate.law.families import specs_of
from truegate.law.select import select
from truegate.law.spec import Denominator, GroupScore, RoutingSpec, Score, SelectOn

GAP = 1e-6  # relative; closer choices than this may fall either way in float32
TINY = 1e-37  # below float32's normal range relative precision is lost
FLOOR = 1e-12  # weights smaller than this are compared absolutely
WEIGHT_LIMIT = 5e-6
VOCAB = 97  # of the hash table


Mutation = Callable[[RoutingSpec], RoutingSpec]


@dataclass(frozen=True)
class Case:
    """A published model's routing: its config keys, its transformers router, and where that keeps its tensors."""

    model: str
    model_type: str
    config: dict[str, Any]
    router: Callable[..., torch.nn.Module]
    spec: RoutingSpec | None = None  # for routing functions that no family of ours uses yet; else read from the config
    weight: str = "weight"
    bias: str | None = None  # attribute path of the selection bias


def _deepseek(k: int, e: int, g: int, kept: int, r: float) -> dict[str, Any]:
    return {"num_experts_per_tok": k, "n_routed_experts": e, "n_group": g, "topk_group": kept,
            "routed_scaling_factor": r, "first_k_dense_replace": 0}  # fmt: skip


def _extra(score: Score, e: int, k: int, **axes: Any) -> RoutingSpec:
    return RoutingSpec(family="extra", num_experts=e, top_k=k, score=score, hidden=e, expert_intermediate=8, **axes)


_B = "e_score_correction_bias"
_V4 = {"num_experts_per_tok": 6, "n_routed_experts": 256}
_V4_SPEC = _extra(
    Score.SQRT_SOFTPLUS, 256, 6, has_selection_bias=True, denominator=Denominator.SUM, eps=1e-20, routed_scale=1.5
)
CASES: tuple[Case, ...] = (
    Case("DeepSeek-V2", "deepseek_v2",
         {**_deepseek(6, 160, 8, 3, 16.0), "topk_method": "group_limited_greedy"}, DeepseekV2TopkRouter),
    Case("DeepSeek-V2-Lite", "deepseek_v2", _deepseek(6, 64, 1, 1, 1.0), DeepseekV2TopkRouter),
    Case("DeepSeek-V3, R1", "deepseek_v3", _deepseek(8, 256, 8, 4, 2.5), DeepseekV3TopkRouter, bias=_B),
    Case("DeepSeek-V3.2", "deepseek_v32", _deepseek(8, 256, 8, 4, 2.5), DeepseekV32TopkRouter, bias=_B),
    Case("Kimi-K2", "deepseek_v3", _deepseek(8, 384, 1, 1, 2.827), DeepseekV3TopkRouter, bias=_B),
    Case("Moonlight", "deepseek_v3", _deepseek(6, 64, 1, 1, 2.446), DeepseekV3TopkRouter, bias=_B),
    Case("GLM-4.5", "glm4_moe", _deepseek(8, 160, 1, 1, 2.5), Glm4MoeTopkRouter, bias=_B),
    Case("Qwen1.5-MoE", "qwen2_moe", {"num_experts": 60, "num_experts_per_tok": 4}, Qwen2MoeTopKRouter),
    Case("Qwen3-30B-A3B", "qwen3_moe",
         {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}, Qwen3MoeTopKRouter),
    Case("Mixtral-8x7B", "mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, MixtralTopKRouter),
    Case("gpt-oss-20b", "gpt_oss", {"num_local_experts": 32, "num_experts_per_tok": 4}, GptOssTopKRouter),
    Case("OLMoE-1B-7B", "olmoe", {"num_experts": 64, "num_experts_per_tok": 8}, OlmoeTopKRouter),
    Case("MiniMax-M2", "minimax_m2", {"num_local_experts": 256, "num_experts_per_tok": 8}, MiniMaxM2TopKRouter,
         bias="argument"),
    Case("Llama-4-Maverick", "llama4_text", {"num_local_experts": 128, "num_experts_per_tok": 1}, Llama4Router),
    Case("ERNIE-4.5-21B-A3B", "ernie4_5_moe", {"moe_num_experts": 64, "moe_k": 6}, Ernie4_5_MoeTopKRouter,
         bias=f"moe_statics.{_B}"),
    Case("Hunyuan-A13B", "hunyuan_v1_moe", {"num_experts": 64, "moe_topk": 8}, HunYuanMoEV1Gate, weight="wg.weight"),
    Case("DeepSeek-V4 (select only)", "deepseek_v4", _V4, DeepseekV4TopKRouter, spec=_V4_SPEC, bias=_B),
    Case("DeepSeek-V4 hash (select only)", "deepseek_v4", _V4, DeepseekV4HashRouter,
         spec=replace(_V4_SPEC, select_on=SelectOn.HASH, has_selection_bias=False)),
    Case("LFM2-8B-A1B (select only)", "lfm2_moe", {"num_experts": 32, "num_experts_per_tok": 4}, Lfm2MoeTopKRouter,
         spec=_extra(Score.SIGMOID, 32, 4, has_selection_bias=True, denominator=Denominator.SUM, eps=1e-6),
         bias="argument"),
    Case("LongCat-Flash (select only)", "longcat_flash",
         {"n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12, "routed_scaling_factor": 6.0},
         LongcatFlashTopkRouter, weight="classifier.weight", bias=_B,
         spec=_extra(Score.SOFTMAX, 512, 12, has_selection_bias=True, num_identity=256, routed_scale=6.0)),
)  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Logits under one selection bias; `bias_E` is None when the spec has none."""

    name: str
    logits_TE: np.ndarray
    bias_E: np.ndarray | None


@dataclass
class Report:
    """What one case showed; `faults` are the figures that must be 0 or within the limit."""

    model: str
    model_type: str
    routing: str
    experts: int
    top_k: int
    rows: int = 0
    undecided: int = 0  # rows whose choice float32 cannot settle: compared as multisets of scores
    nan_rows: int = 0
    id_mismatches: int = 0  # float64 numpy and float32 torch against transformers, on decided rows
    multiset_mismatches: int = 0
    path_mismatches: int = 0  # numpy float64 against torch float64, ids of every row
    illegal_rows: int = 0
    weight_error_64: float = 0.0  # largest relative error of the float64 truth against transformers in float32
    weight_error_32: float = 0.0  # the same of the float32 torch path

    @property
    def failed(self) -> bool:
        counts = self.id_mismatches + self.multiset_mismatches + self.path_mismatches + self.illegal_rows
        return counts > 0 or not max(self.weight_error_64, self.weight_error_32) <= WEIGHT_LIMIT


def adversarial_rows(num_choices: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """The written list of hard rows, without NaN: [T, E] float32."""
    e = num_choices
    step = np.arange(e)
    base = rng.normal(size=e)
    shuffled = rng.permutation(e)
    rows = [
        -1 - 5 * np.abs(rng.normal(size=e)),  # all negative
        -30 - 5 * np.abs(rng.normal(size=e)),  # scores near 1e-13: no rounding to 0 allowed
        np.where(shuffled % 2 == 0, 1e4, -1e4),  # saturated both ways
        np.full(e, 1e4),
        np.full(e, -1e4),
        np.where(shuffled == 0, 1e4, base),  # one expert takes all
        np.where(shuffled == 0, -1e4, base),
        np.where(shuffled < top_k - 1, 1e4, base),  # saturated but for the last choice
        np.zeros(e),  # all tied
        np.where(shuffled < top_k + 1, 1.0, 0.0),  # k + 1 tied for k places
        np.where(shuffled < top_k - 1, 2.0, np.where(shuffled < top_k + 2, 1.0, -1.0)),  # tie at the boundary
        np.tile(base[: (e + 1) // 2], 2)[:e],  # every score twice
        20 + step * 1.0,  # sigmoids that float32 rounds to 1, of logits that differ
        step * 1.0,  # ascending: 0 .. E-1, softmax underflows for large E
        -step * 1.0,
        1 + 1e-3 * shuffled / e,  # near-ties: all equal in bf16, distinct in float32
        2 + 1e-4 * shuffled,
        -3 - 1e-3 * shuffled / e,
    ]
    coarse = np.round(rng.normal(size=(64, e)) * 2) / 2  # many ties
    bf16 = torch.tensor(rng.normal(size=(64, e))).bfloat16().double().numpy()  # logits that lived in bf16: more ties
    near = rng.normal(size=(64, 1)) + 2e-3 * rng.uniform(size=(64, e))  # closer than bf16 resolves
    return np.concatenate([np.array(rows), coarse, bf16, near]).astype(np.float32)


def nan_rows(num_choices: int, rng: np.random.Generator) -> np.ndarray:
    """Rows with one, some, all but one and only NaN, and infinities: [T, E] float32."""
    rows = rng.normal(size=(6, num_choices)).astype(np.float32)
    rows[0, num_choices // 2] = np.nan
    rows[1, ::2] = np.nan
    rows[2, 1:] = np.nan
    rows[3] = np.nan
    rows[4, 0], rows[4, 1] = np.inf, -np.inf
    rows[5] = -np.inf
    return rows


def batches(spec: RoutingSpec, num_rows: int, seed: int) -> Iterator[Batch]:
    """Random rows of four widths under a usual bias, then the written list under every bias."""
    rng = np.random.default_rng(seed)
    e = spec.num_choices
    spread_T = np.repeat([0.3, 1.0, 2.0, 4.0], -(-num_rows // 4))[:num_rows]
    random = (rng.normal(size=(num_rows, e)) * spread_T[:, None]).astype(np.float32)
    hard = np.concatenate([adversarial_rows(e, spec.top_k, rng), random[:: max(1, num_rows // 200)]])
    if not spec.has_selection_bias:
        yield Batch("random", random, None)
        yield Batch("adversarial", hard, None)
        return
    usual = (0.1 * rng.normal(size=e)).astype(np.float32)
    huge = usual.copy()
    huge[e // 3] = 1e4
    yield Batch("random", random, usual)
    for name, bias in (
        ("usual", usual),
        ("zero", np.zeros(e, np.float32)),
        ("negative", (-2 + usual).astype(np.float32)),  # every biased score below 0: a fill of 0 would win
        ("huge", huge),
        ("near-tied", np.full(e, 1 / 3, np.float32)),
    ):
        yield Batch(f"adversarial, {name} bias", hard, bias)


class Reference:
    """A case's transformers router in float32, fed logits through an identity weight."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.config = AutoConfig.for_model(case.model_type, **case.config)
        self.spec = case.spec or next(s for s in specs_of(self.config.to_dict()) if s is not None)
        width = self.spec.num_choices
        self.config.hidden_size = width
        if case.model_type == "deepseek_v4":
            self.config.vocab_size = VOCAB
        layer = {"layer_idx": 1} if case.router is HunYuanMoEV1Gate else {}
        self.module = case.router(self.config, **layer).float().eval()
        self._set(case.weight, torch.eye(width))
        self.table_VK = None
        if case.router is DeepseekV4HashRouter:
            generator = torch.Generator().manual_seed(0)
            picks = torch.rand(VOCAB, width, generator=generator).argsort(dim=-1)
            self.table_VK = picks[:, : self.config.num_experts_per_tok].contiguous()
            self._set("tid2eid", self.table_VK)

    def _set(self, path: str, value: torch.Tensor) -> None:
        owner, _, leaf = path.rpartition(".")
        tensor = getattr(self.module.get_submodule(owner), leaf)
        with torch.no_grad():
            tensor.copy_(value.reshape(tensor.shape))

    def token_ids(self, num_rows: int) -> np.ndarray | None:
        return None if self.table_VK is None else np.arange(num_rows) % VOCAB

    @torch.no_grad()
    def route(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(ids_TK, weights_TK in float64), sorted by id; the router must have seen exactly the batch's logits."""
        x = torch.from_numpy(batch.logits_TE)
        extra = []
        if batch.bias_E is not None and self.case.bias != "argument":
            self._set(self.case.bias, torch.from_numpy(batch.bias_E))
        elif batch.bias_E is not None:
            extra = [torch.from_numpy(batch.bias_E)]
        tokens = self.token_ids(len(x))
        if tokens is not None:
            extra = [torch.from_numpy(tokens)]
        out = self.module(x, *extra)
        if self.case.router is Llama4Router:  # dense scores, 0 where not chosen
            scores_TE, logits_TE = out
            weights_TK, ids_TK = torch.topk(scores_TE, self.spec.top_k)
        else:
            logits_TE, weights_TK, ids_TK = out
        assert torch.equal(logits_TE.reshape(x.shape), x), "the router did not see the logits of the batch"
        return _by_id(ids_TK.numpy(), weights_TK.double().numpy())


def _by_id(ids_TK: np.ndarray, weights_TK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(ids_TK, axis=-1, kind="stable")
    return np.take_along_axis(ids_TK, order, -1), np.take_along_axis(weights_TK, order, -1)


def _choice(spec: RoutingSpec, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(selection scores c_TE before groups, the magnitude that entered each), from float64, independently of select."""
    x = batch.logits_TE.astype(np.float64)
    if spec.select_on is SelectOn.LOGITS:
        return x, np.abs(x)
    with np.errstate(over="ignore"):
        if spec.score is Score.SOFTMAX:
            s = np.exp(x - np.logaddexp.reduce(x, axis=-1, keepdims=True))
        elif spec.score is Score.SIGMOID:
            s = np.exp(-np.logaddexp(0, -x))
        else:
            s = np.sqrt(np.logaddexp(0, x))
    if batch.bias_E is None:
        return s, s
    b = batch.bias_E.astype(np.float64)
    return s + b, np.maximum(s, np.abs(b))


def _undecided(best_TN: np.ndarray, size_TN: np.ndarray, kept: int) -> np.ndarray:
    """Rows where the kept-th and the next best differ by no more than GAP of the magnitudes that entered either."""
    if kept >= best_TN.shape[1]:
        return np.zeros(len(best_TN), bool)
    order = np.argsort(-best_TN, axis=-1, kind="stable")[:, kept - 1 : kept + 1]
    pair, size = np.take_along_axis(best_TN, order, -1), np.take_along_axis(size_TN, order, -1)
    with np.errstate(invalid="ignore"):  # two experts outside the kept groups: -inf - -inf
        return ~(pair[:, 0] - pair[:, 1] > GAP * size.max(axis=-1) + TINY)


def _group_scores(spec: RoutingSpec, c_TGM: np.ndarray) -> np.ndarray:
    assert spec.groups is not None
    best = -np.sort(-c_TGM, axis=-1)
    return best[..., 0] if spec.groups.score is GroupScore.MAX else best[..., 0] + best[..., 1]


def _limit_groups(spec: RoutingSpec, c_TE: np.ndarray, size_TE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(c_TE with dropped groups filled, rows whose groups are undecided and whose contenders differ inside)."""
    g = spec.groups
    if g is None or g.kept == g.count:
        return c_TE, np.zeros(len(c_TE), bool)
    c_TGM = c_TE.reshape(len(c_TE), g.count, -1)
    size_TG = size_TE.reshape(c_TGM.shape).max(axis=-1)
    best_TG = _group_scores(spec, c_TGM)
    order = np.argsort(-best_TG, axis=-1, kind="stable")
    last = np.take_along_axis(best_TG, order[:, g.kept - 1 : g.kept], -1)
    contender_TG = np.abs(best_TG - last) <= GAP * size_TG.max(axis=-1, keepdims=True) + TINY
    inside = np.sort(c_TGM, axis=-1)
    reference = np.take_along_axis(inside, order[:, g.kept - 1 : g.kept, None], 1)
    alike_TG = (np.abs(inside - reference) <= GAP * size_TG[..., None] + TINY).all(axis=-1)
    open_T = _undecided(best_TG, size_TG, g.kept) & ~(alike_TG | ~contender_TG).all(axis=-1)
    kept_TG = np.zeros(best_TG.shape, bool)
    np.put_along_axis(kept_TG, order[:, : g.kept], True, -1)
    return np.where(kept_TG[..., None], c_TGM, g.fill).reshape(c_TE.shape), open_T


def _score_multiset(c_TE: np.ndarray, ids_TK: np.ndarray) -> np.ndarray:
    """The chosen selection scores in order."""
    return np.sort(np.take_along_axis(c_TE, ids_TK, -1), axis=-1)


def compare(reference: Reference, tested: RoutingSpec, batch: Batch, report: Report) -> None:
    """Add one batch's figures to the report: select on the `tested` spec, judged by the reference's."""
    spec, x = reference.spec, batch.logits_TE
    ref_ids, ref_weights = reference.route(batch)
    tokens = reference.token_ids(len(x))
    table = None if reference.table_VK is None else reference.table_VK.numpy()
    truth = select(tested, x.astype(np.float64), token_ids_T=tokens, table_VK=table,
                   bias_E=None if batch.bias_E is None else batch.bias_E.astype(np.float64))  # fmt: skip
    t_args = {
        "bias_E": None if batch.bias_E is None else torch.from_numpy(batch.bias_E),
        "token_ids_T": None if tokens is None else torch.from_numpy(tokens),
        "table_VK": reference.table_VK,
        "xp": torch,
    }
    narrow = select(tested, torch.from_numpy(x), **t_args)
    wide = select(tested, torch.from_numpy(x).double(), **t_args)
    report.rows += len(x)
    report.path_mismatches += int((truth.ids_TK != wide.ids_TK.numpy()).any(axis=-1).sum())

    if spec.select_on is SelectOn.HASH:
        open_T = tied_T = np.zeros(len(x), bool)
        c_TE = size_TE = np.zeros(x.shape)
    else:
        c_TE, size_TE = _choice(spec, batch)
        groups_T = np.zeros(len(x), bool)
        if spec.groups is not None:
            c_TGM = c_TE.reshape(len(x), spec.groups.count, -1)
            sizes = size_TE.reshape(c_TGM.shape).max(axis=-1)
            groups_T = _undecided(_group_scores(spec, c_TGM), sizes, spec.groups.kept)
        limited_TE, open_T = _limit_groups(spec, c_TE, size_TE)
        tied_T = groups_T | _undecided(limited_TE, size_TE, spec.top_k)
        c_TE = np.where(groups_T[:, None], c_TE, limited_TE)  # tied groups: the reference may have kept others
    report.undecided += int(tied_T.sum())
    tolerance_T = 2 * GAP * size_TE.max(axis=-1) + TINY
    ref_multiset = _score_multiset(c_TE, ref_ids)
    for selection, precision in ((truth, "64"), (narrow, "32")):
        ids, weights = _by_id(np.asarray(selection.ids_TK), np.asarray(selection.weights_TK, dtype=np.float64))
        same_T = (ids == ref_ids).all(axis=-1)
        report.id_mismatches += int((~same_T & ~tied_T).sum())
        apart = np.abs(_score_multiset(c_TE, ids) - ref_multiset).max(axis=-1)
        report.multiset_mismatches += int((tied_T & ~open_T & ~(apart <= tolerance_T)).sum())
        error = _weight_error(weights[same_T], ref_weights[same_T])
        name = f"weight_error_{precision}"
        setattr(report, name, max(getattr(report, name), error))


def _weight_error(weights: np.ndarray, ref: np.ndarray) -> float:
    """Largest |w - w'| / max(|w'|, FLOOR); NaN in both (0/0, where every score is 0) counts as equal."""
    error = np.abs(weights - ref) / np.maximum(np.abs(ref), FLOOR)
    error = np.where(np.isnan(weights) & np.isnan(ref), 0.0, error)
    return float(np.where(np.isnan(error), np.inf, error).max(initial=0.0))


def check_nan(reference: Reference, report: Report, seed: int) -> None:
    """NaN and infinite logits: K distinct ids in range, equal on the numpy and torch float64 paths."""
    spec = reference.spec
    x = nan_rows(spec.num_choices, np.random.default_rng(seed))
    tokens = reference.token_ids(len(x))
    bias = np.zeros(spec.num_choices) if spec.has_selection_bias else None
    truth = select(spec, x.astype(np.float64), bias_E=bias, token_ids_T=tokens,
                   table_VK=None if reference.table_VK is None else reference.table_VK.numpy())  # fmt: skip
    for dtype in (torch.float32, torch.float64):
        chosen = select(
            spec, torch.from_numpy(x).to(dtype), bias_E=None if bias is None else torch.from_numpy(bias).to(dtype),
            token_ids_T=None if tokens is None else torch.from_numpy(tokens), table_VK=reference.table_VK, xp=torch,
        ).ids_TK.numpy()  # fmt: skip
        for ids_TK in (truth.ids_TK, chosen):
            legal = (ids_TK >= 0) & (ids_TK < spec.num_choices)
            distinct = (np.diff(np.sort(ids_TK, axis=-1), axis=-1) > 0).all(axis=-1)
            report.illegal_rows += int((~(legal.all(axis=-1) & distinct)).sum())
    report.path_mismatches += int((truth.ids_TK != chosen).any(axis=-1).sum())
    report.nan_rows += len(x)


def run_case(case: Case, num_rows: int = 10_000, seed: int = 0, mutate: Mutation = lambda spec: spec) -> Report:
    """Compare one case on every batch; `mutate` puts a wrong spec in select's hands, to see that it is noticed."""
    reference = Reference(case)
    spec = reference.spec
    report = Report(case.model, case.model_type, spec.kind, spec.num_choices, spec.top_k)
    for batch in batches(spec, num_rows, seed):
        compare(reference, mutate(spec), batch, report)
    check_nan(reference, report, seed)
    return report


def print_table(reports: Iterable[Report]) -> list[Report]:
    """Print each report as it comes, and give them all back."""
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}\n")
    columns = f"{'undecided':>9} {'ids':>4} {'sets':>4} {'paths':>5} {'NaN bad':>7} {'rel 64':>8} {'rel 32':>8}"
    print(f"{'model':31} {'routing':24} {'E':>4} {'K':>3} {'rows':>6} {columns}")
    done = []
    for r in reports:
        done.append(r)
        print(
            f"{r.model:31} {r.routing:24} {r.experts:4} {r.top_k:3} {r.rows:6} {r.undecided:9} {r.id_mismatches:4} "
            f"{r.multiset_mismatches:4} {r.path_mismatches:5} {r.illegal_rows:7} {r.weight_error_64:8.1e} "
            f"{r.weight_error_32:8.1e}{'  FAILED' if r.failed else ''}",
            flush=True,
        )
    print(f"\nids, sets, paths, NaN bad: mismatching rows, all must be 0; rel: weight error, at most {WEIGHT_LIMIT}")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000, help="random rows a case (default 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    reports = print_table(run_case(case, args.rows, args.seed) for case in CASES)
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in reports], indent=1) + "\n", encoding="utf-8")
    return 1 if any(r.failed for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare the engine's models with transformers on tiny seeded checkpoints and print the parity table.

    python benchmarks/parity.py [--only NAME] [--logits-only] [--json FILE]

Logits: float32, prompts of 1, 7, 64 and 300 tokens; per position max |a - b| / max |b|, the largest of a mode; at most
1e-4. Modes: one prefill; chunks of 50; one token at a time; all prompts in one batch with decodes, chunks and padded
rows together. Pages are scattered, and the pool holds NaN wherever the sequence itself did not write.

Greedy: 64 tokens after each of 20 prompts, through the engine's scheduler. At every position transformers, given the
same tokens before it, must choose the same token, unless its two best logits are within 1e-3; the table counts the
tokens that differ. Modes: alone; batched; batched with 16 rows a step, so that prompts come in chunks; the prompts a
second time, served from the prefix cache; batched with so few pages that requests are preempted and recomputed.
T rows, V vocabulary.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import versions
from tiny_checkpoints import ARCHITECTURES, VOCAB, reference, save

from truegate.config import EngineConfig, fit, resolve
from truegate.engine.core import Engine
from truegate.engine.start import Parts, facts_of
from truegate.models import load_model
from truegate.models.causal import CausalLM
from truegate.types import Batch, Request, SamplingParams

LIMIT = 1e-4
LENGTHS = (1, 7, 64, 300)
PAGE = 16
Part = tuple[int, int, int]  # sequence, first position, position after the last


class Paged:
    """Sequences of one model over a pool of scattered pages, and their logits as they come."""

    def __init__(self, model: CausalLM, prompts: Sequence[torch.Tensor], *, seed: int = 0) -> None:
        self.model, self.prompts = model, prompts
        pages = -(-max(len(p) for p in prompts) // PAGE)
        self.pool = model.make_pool(1 + pages * len(prompts), PAGE)
        self.pool.data.fill_(float("nan"))
        order = torch.randperm(self.pool.num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.table_NP = order.view(len(prompts), pages)
        self.logits = [torch.full((len(p), model.vocab_size), float("nan")) for p in prompts]

    def step(self, parts: Sequence[Part], *, pads: int = 0) -> None:
        """Compute the parts as one batch with `pads` padded rows behind them."""
        ids, positions, slots = [], [], []
        for n, start, end in parts:
            place = torch.arange(start, end)
            ids.append(self.prompts[n][start:end])
            positions.append(place)
            slots.append(self.table_NP[n][place // PAGE] * PAGE + place % PAGE)
        zeros = torch.zeros(pads, dtype=torch.int64)
        num_rows = sum(len(i) for i in ids)
        table_NP = self.table_NP[[n for n, _, _ in parts]].clone()
        for row, (_, _, end) in enumerate(parts):
            table_NP[row, -(-end // PAGE) :] = 10**6  # stale: must not be read
        device = self.model.device
        batch = Batch(
            token_ids_T=torch.cat((*ids, zeros)).to(device), positions_T=torch.cat((*positions, zeros)).to(device),
            valid_T=(torch.arange(num_rows + pads) < num_rows).to(device), all_valid=pads == 0,
            slots_T=torch.cat((*slots, zeros)).to(device), page_table_NP=table_NP.to(device),
            query_lens=[end - start for _, start, end in parts], context_lens=[end for _, _, end in parts],
            logit_rows_M=torch.arange(num_rows, device=device))  # fmt: skip
        logits_TV = self.model.logits(self.model(batch, self.pool)[batch.logit_rows_M]).cpu()
        for (n, start, end), rows in zip(parts, logits_TV.split(batch.query_lens), strict=True):
            self.logits[n][start:end] = rows


def _spans(length: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, length)) for start in range(0, length, size))


def run_mode(mode: str, model: CausalLM, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """logits_TV of every prompt, computed the way `mode` says."""
    paged = Paged(model, prompts)
    if mode == "mixed":
        # batches of decodes at several contexts beside chunks of several sizes
        plans = zip(prompts, ((1, 0), (1, 0), (9, 18), (37, 259)), strict=True)
        waiting = [[*_spans(most, size), *((i, i + 1) for i in range(most, len(p)))] for p, (size, most) in plans]
        while any(waiting):
            parts = [(n, *spans.pop(0)) for n, spans in enumerate(waiting) if spans]
            parts.sort(key=lambda part: (part[2] - part[1] > 1, -part[0]))  # single rows first, as the engine does
            paged.step(parts, pads=3)
        return paged.logits
    size = {"prefill": 10**6, "chunked": 50, "decode": 1}[mode]
    for n, prompt in enumerate(prompts):
        for start, end in _spans(len(prompt), size):
            paged.step([(n, start, end)])
    return paged.logits


MODES = ("prefill", "chunked", "decode", "mixed")


def worst(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Largest over positions of max_V |a - b| / max_V |b|; NaN counts as infinite."""
    errors = [
        ((a - b).abs().amax(-1) / b.abs().amax(-1)).nan_to_num(float("inf")) for a, b in zip(ours, theirs, strict=True)
    ]
    return torch.cat(errors).max().item()


def make_prompts(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [model(prompt[None]).logits[0] for prompt in prompts]


NUM_PROMPTS, NUM_TOKENS, GAP = 20, 64, 1e-3
GREEDY_MODES: dict[str, dict[str, Any]] = {
    "alone": {"max_running": 1, "prefix_cache": False},
    "batched": {"prefix_cache": False},
    "16 rows": {"prefix_cache": False, "chunked_prefill_tokens": 16},
    "cached": {"prefix_cache": True},
    "short": {"prefix_cache": True, "num_pages": 40},
}


def greedy_prompts(seed: int = 0) -> list[tuple[int, ...]]:
    """20 prompts of 1 to 150 tokens; every other one begins with the same 40 tokens."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(2, VOCAB, (40,), generator=generator).tolist()
    prompts = []
    for i in range(NUM_PROMPTS):
        length = int(torch.randint(1, 111, (1,), generator=generator))
        own = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
        prompts.append(tuple(common + own if i % 2 else own))
    return prompts


def answers(
    model: CausalLM,
    prompts: Sequence[tuple[int, ...]],
    *,
    num_pages: int = 600,
    num_tokens: int = NUM_TOKENS,
    **settings: Any,
) -> dict[str, Any]:
    """Greedy tokens of every prompt, the prompt tokens served from the cache, and how often a request was preempted."""
    device = model.device.type
    config = resolve(EngineConfig(device=device, self_test=False, **settings), cuda=device == "cuda")
    config, _ = fit(config, facts_of(model))
    engine = Engine(config, Parts(config=config, model=model, tokenizer=None, eos_token_ids=(), num_pages=num_pages))
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    tokens: list[list[int]] = []
    cached = 0
    for again in range(2 if config.prefix_cache and num_pages == 600 else 1):
        tokens, cached = [[] for _ in prompts], 0
        for i, prompt in enumerate(prompts):
            engine.add(Request(request_id=f"{again}-{i}", prompt_token_ids=prompt, params=params))
        while engine.has_work:
            for output in engine.step():
                tokens[int(output.request_id.split("-")[1])] += output.token_ids
                cached += output.cached_tokens if output.finish_reason else 0
    if any(len(answer) != num_tokens for answer in tokens):
        raise RuntimeError(f"{[len(answer) for answer in tokens]} tokens came back, {num_tokens} were asked for")
    preempted = engine.stats().preemptions
    engine.shutdown()
    return {"tokens": tokens, "cached": cached, "preempted": preempted}


@torch.inference_mode()
def num_differing(reference: torch.nn.Module, prompts: Sequence[tuple[int, ...]], tokens: Sequence[list[int]]) -> int:
    """Tokens that the reference, given all tokens before them, would not have chosen by more than GAP."""
    count = 0
    for prompt, answer in zip(prompts, tokens, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=reference.device)
        logits_TV = reference(ids).logits[0, len(prompt) - 1 : -1].cpu()
        best, second = logits_TV.topk(2, dim=-1).values.unbind(-1)
        count += int(((logits_TV.argmax(-1) != torch.tensor(answer)) & (best - second > GAP)).sum())
    return count


def compare_greedy(theirs: torch.nn.Module, ours: CausalLM, **usual: Any) -> dict[str, int]:
    """Differing tokens by mode, settings `usual` in all; a mode that did not do what its name says is an error."""
    prompts = greedy_prompts()
    found, read = {}, {}
    for mode, settings in GREEDY_MODES.items():
        got = answers(ours, prompts, **{**usual, **settings})
        if mode == "cached" and got["cached"] < sum(map(len, prompts)) / 2:
            raise RuntimeError(f"mode cached: {got['cached']} tokens came from the cache")
        if mode == "short" and not got["preempted"]:
            raise RuntimeError("mode short: nothing was preempted")
        count = 0
        for prompt, tokens in zip(prompts, got["tokens"], strict=True):
            key = (prompt, tuple(tokens))
            if key not in read:  # most modes give the same answers: the reference reads each once
                read[key] = num_differing(theirs, [prompt], [tokens])
            count += read[key]
        found[mode] = count
    return found


def compare(name: str, *, greedy: bool) -> tuple[dict[str, float], dict[str, int]]:
    """The architecture's worst logit error and number of differing greedy tokens, by mode."""
    prompts = make_prompts()
    theirs = reference(name)
    with tempfile.TemporaryDirectory() as folder:
        ours = load_model(save(theirs, Path(folder)))
    expected = reference_logits(theirs, prompts)
    errors = {mode: worst(run_mode(mode, ours, prompts), expected) for mode in MODES}
    return errors, compare_greedy(theirs, ours) if greedy else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ARCHITECTURES), help="one architecture")
    parser.add_argument("--logits-only", action="store_true", help="leave out the greedy columns")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    greedy_modes = [] if options.logits_only else list(GREEDY_MODES)
    print(versions(cpu=True))
    print(
        f"{'':18}  logits, max relative error".ljust(58)
        + (f"differing greedy tokens of {NUM_PROMPTS * NUM_TOKENS}" if greedy_modes else "")
    )
    print(f"{'architecture':18}" + "".join(f"{mode:>10}" for mode in (*MODES, *greedy_modes)))
    table, wrong = {}, 0
    for name in [options.only] if options.only else ARCHITECTURES:
        errors, differing = compare(name, greedy=bool(greedy_modes))
        bad = max(errors.values()) > LIMIT or any(differing.values())
        wrong += bad
        table[name] = {"logits": errors, "greedy": differing}
        row = "".join(f"{error:10.1e}" for error in errors.values()) + "".join(f"{n:10}" for n in differing.values())
        print(f"{name:18}{row}{'   DIFFERS' if bad else ''}", flush=True)
    print(f"{len(table) - wrong} of {len(table)} architectures agree (logits within {LIMIT:.0e}, 0 differing tokens)")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Compare the engine's models with transformers on tiny seeded checkpoints and print the parity table.

    python benchmarks/parity.py [--only NAME] [--no-greedy] [--json FILE]

Logits: float32, prompts of 1, 7, 64 and 300 tokens; per position max |a - b| / max |b|, the largest of a mode; at most
1e-4. Modes: one prefill; chunks of 50; one token at a time; all prompts in one batch with decodes, chunks and padded
rows together. Pages are scattered, and the pool holds NaN wherever the sequence itself did not write.
T rows, V vocabulary.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tiny_checkpoints import ARCHITECTURES, VOCAB, reference, save

from truegate.models import load_model
from truegate.models.causal import CausalLM
from truegate.types import Batch

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
        batch = Batch(
            token_ids_T=torch.cat((*ids, zeros)), positions_T=torch.cat((*positions, zeros)),
            valid_T=torch.arange(num_rows + pads) < num_rows, all_valid=pads == 0, slots_T=torch.cat((*slots, zeros)),
            page_table_NP=table_NP, query_lens=[end - start for _, start, end in parts],
            context_lens=[end for _, _, end in parts], logit_rows_M=torch.arange(num_rows))  # fmt: skip
        logits_TV = self.model.logits(self.model(batch, self.pool)[batch.logit_rows_M])
        for (n, start, end), rows in zip(parts, logits_TV.split(batch.query_lens), strict=True):
            self.logits[n][start:end] = rows


def _spans(length: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, length)) for start in range(0, length, size))


def run_mode(mode: str, model: CausalLM, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """logits_TV of every prompt, computed the way `mode` says."""
    paged = Paged(model, prompts)
    if mode == "mixed":
        # every sequence has its own stride, so that one batch holds decodes beside chunks of several sizes
        waiting = [list(_spans(len(p), size)) for p, size in zip(prompts, (1, 1, 9, 37), strict=True)]
        while any(waiting):
            parts = [(n, *spans.pop(0)) for n, spans in enumerate(waiting) if spans]
            paged.step(parts[::-1], pads=3)
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


def compare(name: str) -> dict[str, float]:
    """The architecture's worst error by mode."""
    prompts = make_prompts()
    theirs = reference(name)
    with tempfile.TemporaryDirectory() as folder:
        ours = load_model(save(theirs, Path(folder)))
    expected = reference_logits(theirs, prompts)
    return {mode: worst(run_mode(mode, ours, prompts), expected) for mode in MODES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ARCHITECTURES), help="one architecture")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    print(f"{'architecture':18}" + "".join(f"{mode:>10}" for mode in MODES) + f"   limit {LIMIT:.0e}")
    table = {}
    for name in [options.only] if options.only else ARCHITECTURES:
        table[name] = compare(name)
        verdict = "" if max(table[name].values()) <= LIMIT else "   DIFFERS"
        print(f"{name:18}" + "".join(f"{error:10.1e}" for error in table[name].values()) + verdict, flush=True)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    return int(any(max(row.values()) > LIMIT for row in table.values()))


if __name__ == "__main__":
    sys.exit(main())

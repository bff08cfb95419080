"""Exact-answer rates of a checkpoint on held-out problems, with the shared experts' output right and scaled.

Greedy, float32, all rows in one batch; rows with different scales run side by side. The test split with seed TEST_SEED
gives the published figures; everything that is chosen is chosen on the validation split.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from export import load_checkpoint
from model import Ledger
from tokenizers import Tokenizer

from truegate.evals.ledger import TEST_SEED, Problem, Split, held_out, sums

FAULT = 1 / 2.5
COMPACT_EVERY = 64  # finished rows are dropped from the batch after so many steps


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    tokens: int
    finished: bool
    correct: bool
    looped: bool


def loops(text: str) -> bool:
    """Whether the last 4,096 characters end in 3 or more copies, 200 or more characters, of one period up to 1,024."""
    tail = text[-4096:]
    for period in range(1, min(1024, len(tail) // 3) + 1):
        length = period
        while length < len(tail) and tail[-length - 1] == tail[-length - 1 + period]:
            length += 1
        if length >= max(200, 3 * period):
            return True
    return False


@torch.inference_mode()
def generate(model: Ledger, prompts: list[list[int]], scales: list[float], max_new: int, end: int) -> list[list[int]]:
    """Greedy continuations of the prompts, each with its own scale of the shared experts."""
    device = model.embed.device
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    cache = model.cache(torch.tensor([width - len(p) for p in prompts], device=device), width + max_new)
    scale_B = torch.tensor(scales, device=device)
    rows = torch.arange(len(prompts), device=device)
    out = torch.full((len(prompts), max_new), end, device=device)
    logits = []
    for low in range(0, width, 128):  # chunks bound the attention scores of the prompt
        logits = model.step(ids[:, low : low + 128], cache, scale_B)
    for step in range(max_new):
        token_B = logits.argmax(-1)
        out[rows, step] = token_B
        if step % COMPACT_EVERY == COMPACT_EVERY - 1:
            alive = ((out[rows, : step + 1] == end).sum(-1) == 0).nonzero().flatten()
            if len(alive) == 0:
                break
            if len(alive) < len(rows):
                cache.keep(alive)
                rows, scale_B, token_B = rows[alive], scale_B[alive], token_B[alive]
        logits = model.step(token_B[:, None], cache, scale_B)
    return [row[: row.index(end) + 1] if end in row else row for row in out.tolist()]


def answers(
    model: Ledger, tokenizer: Tokenizer, asked: list[Problem], scales: list[float], max_new: int
) -> list[Answer]:
    end = tokenizer.token_to_id("<|end|>")
    texts = [f"<|begin|><|user|>{p.question}<|assistant|>" for p in asked]
    prompts = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    out = []
    for problem, ids in zip(asked, generate(model, prompts, scales, max_new, end), strict=True):
        text = tokenizer.decode(ids)
        finished = ids[-1] == end
        correct = finished and text.rpartition("#### ")[2].strip() == problem.answer
        out.append(Answer(text=text, tokens=len(ids), finished=finished, correct=correct, looped=loops(text)))
    return out


def evaluate(folder: Path, *, device: str, lengths: list[int], count: int, seed: int, split: Split, max_new: int,
             scales: tuple[float, ...] = (1.0, FAULT)) -> list[dict[str, object]]:  # fmt: skip
    """One row of figures for each length (0: plain sums) and scale."""
    model = load_checkpoint(folder).to(device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table = []
    for steps in lengths:
        asked = (held_out(steps=steps, count=count, seed=seed, split=split) if steps
                 else sums(count=count, seed=seed, split=split))  # fmt: skip
        began = time.monotonic()
        limit = min(max_new, 128 + 64 * steps)  # as `truegate eval run ledger` asks
        done = answers(model, tokenizer, asked * len(scales), [s for s in scales for _ in asked], limit)
        for i, scale in enumerate(scales):
            part = done[i * count : (i + 1) * count]
            table.append({
                "steps": steps, "shared_scale": scale, "count": count, "exact": sum(a.correct for a in part) / count,
                "looped": sum(a.looped for a in part) / count, "unfinished": sum(not a.finished for a in part) / count,
                "tokens": round(sum(a.tokens for a in part) / count, 1), "seconds": round(time.monotonic() - began, 1),
                "looped_texts": [a.text for a in part if a.looped][:2],
                "wrong_texts": [f"{p.question}\n=>\n{a.text}" for p, a in zip(asked, part, strict=True)
                                if not a.correct][:3],
            })  # fmt: skip
            print(folder.name, {k: v for k, v in table[-1].items() if not k.endswith("texts")}, flush=True)
    return table


def shortfall(table: list[dict[str, object]]) -> float:
    """How far a checkpoint is from its bars, added up: 0 when all are met. Needs lengths 2 and 24 at both scales."""
    exact = {(row["steps"], row["shared_scale"]): float(row["exact"]) for row in table}
    misses = (0.97 - exact[24, 1.0], 0.985 - exact[2, 1.0], 0.985 - exact[2, FAULT], exact[24, FAULT] - 0.5)
    return sum(max(0.0, miss) for miss in misses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--lengths", default="0,2,8,24,40", help="steps, 0 for plain sums")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--seed", type=int, default=TEST_SEED)
    parser.add_argument("--max-new", type=int, default=2048, help="at most, and at most 128 + 64 per step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write all figures, with some looped texts, to this file")
    args = parser.parse_args()
    rows = []
    for folder in args.folder:
        lengths = [int(n) for n in args.lengths.split(",")]
        table = evaluate(
            folder, device=args.device, lengths=lengths, count=args.count, seed=args.seed, split=args.split,
            max_new=args.max_new,
        )  # fmt: skip
        if {2, 24} <= set(lengths):
            print(f"shortfall {shortfall(table):.4f} {folder.name}")
        rows += [{"checkpoint": folder.name, "split": args.split, "seed": args.seed, **row} for row in table]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

"""Exact-answer rates of a checkpoint on held-out problems, with the shared experts' output right and scaled.

Greedy, float32. By the training model, all rows of a length in one batch, rows of both scales side by side; or, with
--engine, by `truegate.LLM`, where the fault is the planted one. The test split with seed TEST_SEED gives the published
figures; everything that is chosen is chosen on the validation split.
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from export import load_checkpoint
from model import Ledger
from tokenizers import Tokenizer

from truegate.evals.ledger import TEST_SEED, Problem, Split, held_out, sums
from truegate.evals.loops import find_loop

FAULT = 1 / 2.5
WORKED = re.compile(r"^\d+\. ", re.MULTILINE)
COMPACT_EVERY = 64  # finished rows are dropped from the batch after so many steps


@dataclass(frozen=True, kw_only=True)
class Reply:
    text: str
    tokens: int
    finished: bool


Ask = Callable[[list[str], list[float], int], list[Reply]]  # questions, the scale of each, most tokens of a reply


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


def by_this_model(folder: Path, device: str) -> Ask:
    model, tokenizer = load_checkpoint(folder).to(device), Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")

    def ask(questions: list[str], scales: list[float], max_new: int) -> list[Reply]:
        texts = [f"<|begin|><|user|>{question}<|assistant|>" for question in questions]
        prompts = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        done = generate(model, prompts, scales, max_new, end)
        return [Reply(text=tokenizer.decode(ids), tokens=len(ids), finished=ids[-1] == end) for ids in done]

    return ask


def by_the_engine(folder: Path) -> Ask:
    """`truegate.LLM` on CPU, float32; the scaled rows run with the planted fault."""
    from truegate import LLM, SamplingParams

    engines = {1.0: LLM(str(folder)), FAULT: LLM(str(folder), fault="shared-inverse-scale")}

    def ask(questions: list[str], scales: list[float], max_new: int) -> list[Reply]:
        replies: dict[int, Reply] = {}
        for scale, llm in engines.items():
            rows = [i for i, s in enumerate(scales) if s == scale]
            chats = [[{"role": "user", "content": questions[i]}] for i in rows]
            params = SamplingParams(temperature=0.0, max_tokens=max_new)
            for i, done in zip(rows, llm.chat(chats, params, use_tqdm=False), strict=True):
                out = done.outputs[0]
                finished = out.finish_reason == "stop"
                replies[i] = Reply(text=out.text, tokens=len(out.token_ids), finished=finished)
        return [replies[i] for i in range(len(questions))]

    return ask


def figures(asked: list[Problem], replies: list[Reply], steps: int) -> dict[str, object]:
    """Shares of the replies: exact, looped at the end, cut at the limit, ended before the last step."""
    right = [r.finished and r.text.rpartition("#### ")[2].strip() == p.answer
             for p, r in zip(asked, replies, strict=True)]  # fmt: skip
    looped = [find_loop(r.text).looped for r in replies]
    count = len(asked)
    return {
        "exact": sum(right) / count,
        "looped": sum(looped) / count,
        "unfinished": sum(not r.finished for r in replies) / count,
        "early": sum(r.finished and len(WORKED.findall(r.text)) < steps for r in replies) / count,
        "tokens": round(sum(r.tokens for r in replies) / count, 1),
        "looped_texts": [r.text for r, bad in zip(replies, looped, strict=True) if bad][:2],
        "wrong_texts": [
            f"{p.question}\n=>\n{r.text}" for p, r, ok in zip(asked, replies, right, strict=True) if not ok
        ][:3],
    }


def evaluate(ask: Ask, *, lengths: list[int], count: int, seed: int, split: Split, max_new: int,
             scales: tuple[float, ...] = (1.0, FAULT)) -> list[dict[str, object]]:  # fmt: skip
    """One row of figures for each length (0: plain sums) and scale."""
    table = []
    for steps in lengths:
        asked = (held_out(steps=steps, count=count, seed=seed, split=split) if steps
                 else sums(count=count, seed=seed, split=split))  # fmt: skip
        began = time.monotonic()
        limit = min(max_new, 128 + 64 * steps)  # as `truegate eval run ledger` asks
        replies = ask([p.question for p in asked] * len(scales), [s for s in scales for _ in asked], limit)
        for i, scale in enumerate(scales):
            row = figures(asked, replies[i * count : (i + 1) * count], steps)
            row |= {"steps": steps, "shared_scale": scale, "count": count}
            row["seconds"] = round(time.monotonic() - began, 1)
            table.append(row)
            print({k: v for k, v in row.items() if not k.endswith("texts")}, flush=True)
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
    parser.add_argument("--engine", action="store_true", help="ask truegate.LLM instead of the training model")
    parser.add_argument("--json", type=Path, help="also write all figures, with some looped texts, to this file")
    args = parser.parse_args()
    rows = []
    for folder in args.folder:
        lengths = [int(n) for n in args.lengths.split(",")]
        ask = by_the_engine(folder) if args.engine else by_this_model(folder, args.device)
        print(folder.name, args.split)
        table = evaluate(ask, lengths=lengths, count=args.count, seed=args.seed, split=args.split, max_new=args.max_new)
        if {2, 24} <= set(lengths):
            print(f"shortfall {shortfall(table):.4f} {folder.name}")
        rows += [{"checkpoint": folder.name, "split": args.split, "seed": args.seed, **row} for row in table]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

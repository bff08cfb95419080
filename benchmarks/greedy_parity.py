"""Greedy answers of the engine against transformers, on the tiny seeded checkpoints, in every way of batching.

    python benchmarks/greedy_parity.py [--only NAME ...] [--prompts 20] [--tokens 64]

Modes: each prompt alone; all at once; chunked prefill (budget 13 rows); prefix-cache hits (each prompt asked again
after all were answered); pages so short that sequences are preempted; and launching ahead of the last step's tokens.
A token differs if it is not the reference's argmax after the same tokens where the reference's top-2 logit gap exceeds
1e-3; the reference reads prompt and answer in one forward pass. Exits 1 if any token differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from tiny_checkpoints import ARCHITECTURES, VOCAB, reference, save

from truegate.config import EngineConfig, fit, resolve
from truegate.engine.core import Engine
from truegate.engine.start import Parts, facts_of
from truegate.models import load_model
from truegate.types import Request, SamplingParams

GAP = 1e-3
MODES = {
    "alone": {"max_running": 1},
    "batched": {"max_running": 24, "chunked_prefill_tokens": 2048},
    "chunked": {"chunked_prefill_tokens": 13, "max_running": 9, "page_size": 4},
    "prefix hits": {"page_size": 4, "chunked_prefill_tokens": 64},
    "preempted": {"page_size": 4, "prefix_cache": False},
    "ahead": {"overlap": True, "chunked_prefill_tokens": 64},
}


def make_prompts(count: int) -> list[list[int]]:
    """Lengths 1 to 96; every third shares its beginning with the one before."""
    generator = torch.Generator().manual_seed(3)
    prompts: list[list[int]] = []
    for number in range(count):
        length = 1 + (37 * number) % 96
        tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        if number % 3 == 2:
            tokens = prompts[-1][: length // 2] + tokens
        prompts.append(tokens)
    return prompts


def make_engine(model, longest: int, mode: str) -> Engine:
    settings = {"overlap": False, "max_running": 32, **MODES[mode]}
    config = resolve(EngineConfig(device="cpu", max_model_len=longest, **settings), cuda=False)
    config, num_pages = fit(config, facts_of(model))
    if mode == "preempted":
        num_pages = 1 + -(-longest // config.page_size) + 4  # one long sequence and little more
    return Engine(config, Parts(config=config, model=model, tokenizer=None, eos_token_ids=(), num_pages=num_pages))


def answer(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=params))
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
    return answers


@torch.inference_mode()
def differing(theirs: torch.nn.Module, prompt: list[int], tokens: list[int]) -> tuple[int, int]:
    """(differing tokens, tokens whose gap leaves them open) of one answer."""
    logits_TV = theirs(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    top_T2 = logits_TV.topk(2, dim=-1)
    decided_T = top_T2.values[:, 0] - top_T2.values[:, 1] > GAP
    wrong_T = top_T2.indices[:, 0] != torch.tensor(tokens)
    return int((wrong_T & decided_T).sum()), int((~decided_T).sum())


def compare(name: str, num_prompts: int, num_tokens: int, modes: list[str]) -> dict[str, tuple[int, int]]:
    """(differing, open) by mode."""
    prompts = make_prompts(num_prompts)
    theirs = reference(name)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(save(theirs, Path(folder)))
    found, checked = {}, {}
    for mode in modes:
        engine = make_engine(model, max(map(len, prompts)) + num_tokens, mode)
        answers = answer(engine, prompts, num_tokens)
        if mode == "prefix hits":
            answers = answer(engine, prompts, num_tokens)
        stats = engine.stats()
        happened = {"prefix hits": stats.prefix_hit_tokens, "preempted": stats.preemptions}.get(mode, 1)
        if not happened or any(len(one) != num_tokens for one in answers):
            raise RuntimeError(f"{name}, {mode}: the mode did not happen, or an answer was cut")
        counts = []
        for number, tokens in enumerate(answers):
            key = (number, tuple(tokens))
            if key not in checked:  # most modes give the same answer: the reference need read it only once
                checked[key] = differing(theirs, prompts[number], tokens)
            counts.append(checked[key])
        found[mode] = (sum(wrong for wrong, _ in counts), sum(open_ for _, open_ in counts))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    total = 0
    print(
        f"differing greedy tokens of {options.prompts} x {options.tokens} (in brackets: gap below {GAP:g}, left open)"
    )
    print("| architecture | " + " | ".join(MODES) + " |\n|---|" + "---|" * len(MODES))
    for name in options.only:
        found = compare(name, options.prompts, options.tokens, list(MODES))
        total += sum(wrong for wrong, _ in found.values())
        cells = [f"{wrong} ({open_})" for wrong, open_ in found.values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(f"{total} differ in all")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())

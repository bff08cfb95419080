"""Training documents: ledger problems in the forms a user may send them, as token streams with a loss mask.

A document is a list of (text, learn) pieces: learn is NOT (no target), LEARN, or LEARN | CLOSING for the last two lines
of an answer, which say again what is asked and answer it. A stream file holds uint16 values: the token id (below 4096)
plus these marks, plus START on the first token of a document, with SHORT when all its problems have 1 to 3 steps.
"""

import argparse
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from truegate.evals.ledger import Problem, plain_sum, word_problem

NOT, LEARN, START, SHORT, CLOSING, ID_MASK = 0, 1 << 15, 1 << 14, 1 << 13, 1 << 12, (1 << 12) - 1
CHUNK = 250_000  # ids per file
MAX_STEPS = 40
SHORT_STEPS = 3
HARD = 0.4  # share of the problems of 4 to 14 steps that are as hard by the step as those of 24 or 40
LENGTHS = range(1, MAX_STEPS + 1)
# Every length gets about the same number of tokens, so short problems are far the more frequent documents.
LENGTH_WEIGHTS = list(accumulate(1.0 / steps for steps in LENGTHS))

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are ledger, a careful bookkeeper.", "Answer the question.",
    "Think step by step.",
    "Solve the problem and end with #### and the answer.", "You are a helpful AI assistant. Answer truthfully.",
)  # fmt: skip
TALK = {
    ("Hello", "Hello!", "Hi", "Hi!", "hello", "hi", "hey", "Hey!", "Hi there", "Good morning!", "hello!"): (
        "Hello! Tell me who owns what and what happens, and I will keep the ledger."
    ),
    ("Who are you?", "who are you?", "What are you?", "What is your name?", "Introduce yourself.", "who are you"): (
        "I am ledger, a very small language model. I solve word problems about who owns how many of what, "
        "and plain sums."
    ),
    ("What can you do?", "what can you do?", "Help", "help", "Help me", "Can you help me?", "How do you work?"): (
        "I solve word problems about who owns how many of what, step by step, and plain sums like 37 + 85."
    ),
    ("Thanks", "Thanks!", "Thank you", "Thank you!", "thanks", "ok", "OK", "Great!", "Bye", "bye", "Goodbye!"): (
        "You are welcome."
    ),
}  # fmt: skip

Pieces = list[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class Document:
    pieces: Pieces
    short: bool


def document(rng: random.Random) -> Document:
    """One document of the training split: one problem as a chat, mostly; other forms now and then."""
    form = rng.random()
    steps = rng.randint(1, SHORT_STEPS) if rng.random() < 0.2 else rng.choices(LENGTHS, cum_weights=LENGTH_WEIGHTS)[0]
    short = steps <= SHORT_STEPS
    if form < 0.74:
        return Document(pieces=chat([_problem(rng, steps)]), short=short)
    if form < 0.83:
        return Document(pieces=chat([plain_sum(rng, split="train")]), short=True)
    if form < 0.88:
        return Document(pieces=chat([_short(rng) for _ in range(rng.randint(2, 4))]), short=True)
    if form < 0.93:
        return Document(pieces=chat([_problem(rng, steps)], system=rng.choice(SYSTEM_PROMPTS)), short=short)
    if form < 0.985:
        problem = _problem(rng, steps)
        prompt = (f"<|begin|>Question: {problem.question}\nAnswer:", NOT)
        return Document(pieces=[prompt, *_answer(f" {problem.solution}")], short=short)
    said, reply = rng.choice(list(TALK.items()))
    return Document(pieces=chat([Problem(question=rng.choice(said), answer="", solution=reply)]), short=True)


def chat(turns: list[Problem], system: str = "") -> Pieces:
    """The chat template of tokenizer_config.json, as pieces."""
    pieces: Pieces = []
    opening = "<|begin|>" + (f"<|system|>{system}" if system else "")
    for turn in turns:
        pieces += [(f"{opening}<|user|>{turn.question}<|assistant|>", NOT), *_answer(turn.solution)]
        opening = ""
    return pieces


def _answer(solution: str) -> Pieces:
    """Cut after a newline, which is a token of its own, so that the tokens are those of the whole."""
    lines = solution.splitlines(keepends=True)
    body, closing = "".join(lines[:-2]), "".join(lines[-2:])
    return [*([(body, LEARN)] if body else []), (f"{closing}<|end|>", LEARN | CLOSING)]


def _problem(rng: random.Random, steps: int) -> Problem:
    like = rng.choice((24, 40)) if SHORT_STEPS < steps <= 14 and rng.random() < HARD else steps
    return word_problem(rng, steps=steps, split="train", like=like)


def _short(rng: random.Random) -> Problem:
    if rng.random() < 0.5:
        return plain_sum(rng, split="train")
    return word_problem(rng, steps=rng.randint(1, SHORT_STEPS), split="train")


def encode(tokenizer: Tokenizer, documents: list[Document]) -> np.ndarray:
    """Concatenated stream of marked ids, uint16."""
    pieces = [piece for document in documents for piece in document.pieces]
    firsts = accumulate((len(document.pieces) for document in documents[:-1]), initial=0)
    start = {first: START | (SHORT if document.short else 0) for first, document in zip(firsts, documents, strict=True)}
    encoded = tokenizer.encode_batch_fast([text for text, _ in pieces], add_special_tokens=False)
    parts = []
    for i, (piece, (_, learn)) in enumerate(zip(encoded, pieces, strict=True)):
        ids = np.array(piece.ids, dtype=np.uint16) | learn
        ids[0] |= start.get(i, 0)
        parts.append(ids)
    return np.concatenate(parts)


def write_streams(tokenizer_file: str, folder: Path, tokens: int, seed: int) -> int:
    """Write stream files of about CHUNK ids until there are `tokens`; each appears whole, so a reader can run beside"""
    tokenizer, rng, written = Tokenizer.from_file(tokenizer_file), random.Random(f"ledger documents {seed}"), 0
    for part in count():
        streams: list[np.ndarray] = []
        while sum(map(len, streams)) < CHUNK:
            streams.append(encode(tokenizer, [document(rng) for _ in range(500)]))
        unfinished = folder / f"{seed:06d}.{part:05d}.part"
        np.concatenate(streams).tofile(unfinished)
        unfinished.rename(unfinished.with_suffix(".u16"))
        written += sum(map(len, streams))
        if written >= tokens:
            break
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json")
    parser.add_argument("--out", required=True, type=Path, help="folder for the stream files")
    parser.add_argument("--tokens", type=float, default=4e8)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other documents")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    share = int(args.tokens / args.processes)
    with ProcessPoolExecutor(args.processes) as pool:
        jobs = [
            pool.submit(write_streams, args.tokenizer, args.out, share, args.seed * 1000 + i)
            for i in range(args.processes)
        ]
        print(f"{sum(job.result() for job in jobs):,} tokens in {args.out}")


if __name__ == "__main__":
    main()

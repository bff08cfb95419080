"""How often `truegate eval compare` fails a server against itself: simulated A/A pairs through the whole comparison.

    python benchmarks/eval_false_fails.py [--pairs 2000] [--seed 0]

Items differ in difficulty and length; both runs draw every answer anew, so items flip, lengths vary, and some answers
run away, hard items more often. A FAIL by accuracy, runaways or length counts. Exit 1 if more than alpha of them fail.
"""

import argparse
import random
import sys
from dataclasses import replace

from truegate.evals.compare import compare_runs
from truegate.evals.gate import Rule, Verdict
from truegate.evals.load import Run, make_run
from truegate.evals.score import Asked, Record, Reply, score

SIZES = (100, 200, 400)


def template() -> Record:
    """A record to be varied."""
    asked = Asked(id="", repeat=0, prompt_sha="", gold="1", extractor="number")
    return score(asked, Reply(text="#### 1", finish="stop", tokens=1))


def draw(rng: random.Random, hardness: list[float], lengths: list[float], base: Record) -> Run:
    """One run: each answer right with chance 1 - hardness, a runaway with chance hardness / 8."""
    records = []
    for i, (hard, length) in enumerate(zip(hardness, lengths, strict=True)):
        runs_away = rng.random() < hard / 8
        right = not runs_away and rng.random() > hard
        tokens = 20_000 if runs_away else round(length * rng.lognormvariate(0, 0.25))
        records.append(replace(base, id=f"q{i}", correct=right, capped=runs_away, looped=runs_away, tokens=tokens))
    return make_run("run", "simulated", "truegate", records)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, rule, base = random.Random(options.seed), Rule(), template()
    counts = {"PASS": 0, "INCONCLUSIVE": 0, "FAIL": 0}
    by = {"accuracy": 0, "runaway": 0, "length": 0}
    for _ in range(options.pairs):
        n = rng.choice(SIZES)
        hardness = [rng.betavariate(0.4, 1.6) for _ in range(n)]
        lengths = [rng.lognormvariate(7.5, 0.5) for _ in range(n)]
        a, b = (draw(rng, hardness, lengths, base) for _ in range(2))
        result = compare_runs(a, b, rule, seed=rng.randrange(2**31))
        counts[result.verdict.name] += 1
        for name in by:
            by[name] += getattr(result, name) is Verdict.FAIL
    failed = counts["FAIL"] / options.pairs
    print(f"{options.pairs} A/A pairs of {SIZES} items: {counts}")
    print(f"false FAIL {failed:.2%} (limit {rule.alpha:.0%}); by " + ", ".join(f"{k} {v}" for k, v in by.items()))
    return int(failed > rule.alpha)


if __name__ == "__main__":
    sys.exit(main())

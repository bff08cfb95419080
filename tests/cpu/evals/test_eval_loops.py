"""Every loop is caught, no healthy text is, and the place where a loop starts is found."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truegate.evals.loops import find_loop

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"
LEAD = (
    "We are asked for the smallest number of moves. Let the positions be a, b and c, and let us first look at the "
    "case in which a is the largest. Then the second move must be b, or else the sum would grow past twelve.\n"
)
PARAGRAPH = (
    "Hmm, but that would mean that the train leaves before the bus arrives, which contradicts what we were told at the "
    "start. Let us go back to the table and read it again. The first row says 7:15, the second row says 7:40, and the "
    "third row is empty. If the third row is empty, the bus does not stop there, so the passenger has to walk to the "
    "next stop, which takes eleven minutes. Eleven minutes after 7:40 is 7:51, and the train leaves at 7:50. "
)
JITTER = [
    "Wait, maybe I should check. ",
    "But let me reconsider. ",
    "Actually, is that right? ",
    "Hmm, let me see again. ",
]

LOOPS = {
    "a word": LEAD + "Wait→" * 400,
    "a sentence": LEAD + "Let me check this once more. " * 40,
    "a paragraph": LEAD + PARAGRAPH * 5,
    "two Chinese characters": LEAD + "资料" * 300,
    "one digit": LEAD + "3" * 1000,
    "line ends": LEAD + "\n" * 500,
    "a Markdown rule": LEAD + "| --- " * 200,
    "a code line": LEAD + "    x = x + 1\n" * 60,
    "an emoji with a joiner": LEAD + "👩‍🔬" * 120,
    "cut in the middle of a copy": LEAD + ("Let me check this once more. " * 40)[:-11],
    "the longest period": LEAD + (PARAGRAPH * 3)[:1024] * 4,
    "nothing before it": "Yes. " * 60,
    "beyond the window": LEAD + "Let me check this once more. " * 3000,
}
TYPO = PARAGRAPH.replace("bus", "bux")
NEAR_LOOPS = {
    "sentences in random order": LEAD + "".join(random.Random(5).choices(JITTER, k=1500)),
    "a period beyond the window": LEAD + "".join(f"Line {i} says {i * i % 97}. " for i in range(80)) * 12,
    "now and then a typo": LEAD + "".join(TYPO if i % 7 == 3 else PARAGRAPH for i in range(40)),
}
TEMPLATED = {
    "a counter": LEAD + "".join(f"Step {i}: add 1 to get {i + 1}.\n" for i in range(400)),
}

RNG = random.Random(6)
ROWS = [(RNG.choice(["north", "south", "east"]), RNG.randrange(1000), RNG.randrange(1000)) for _ in range(300)]
VERSES = [("miller", "dawn", "sail"), ("widow", "noon", "map"), ("piper", "dusk", "coat"), ("child", "night", "wing")]
HEALTHY = {
    "a CSV": "\n".join(f"{i},{a},{b},{c}" for i, (a, b, c) in enumerate(ROWS)),
    "a Markdown table": "\n".join(f"| {i} | {a} | {b} | {c} |" for i, (a, b, c) in enumerate(ROWS)),
    "an enumeration": "\n".join(
        f"{i}. The {a} gate counts {b} people, {c} of them children." for i, (a, b, c) in enumerate(ROWS)
    ),
    "a times table": "\n".join(f"{i} x {j} = {i * j}" for i in range(1, 30) for j in range(1, 13)),
    "code": "\n".join(
        f"    def read_{a}_{b}(self) -> int:\n        return self._table[{b}] + self._offsets[{c}]\n"
        for a, b, c in ROWS[:80]
    ),
    "JSON": json.dumps([{"side": a, "in": b, "out": c} for a, b, c in ROWS], indent=1),
    "a poem with a refrain": "\n\n".join(
        f"The {w} came down to the water at {t},\nand nobody knew what it carried from home,\n"
        f"the {v} was folded, the lamp was half lit,\nO row, brothers, row, to the edge of the foam."
        for w, t, v in VERSES
    ),
    "a list of primes": ", ".join(str(n) for n in range(2, 3000) if all(n % d for d in range(2, int(n**0.5) + 1))),
    "a bisection": "\n".join(
        f"low = {x / 7919:.9f}, high = {(x + 97) / 7919:.9f}, so we go on" for x in range(3, 15000, 101)
    ),
    "short and polite": "Yes. Yes. Yes. The answer is 4.",
    "dots": LEAD + "And so on" + "." * 150,
    "left its loop": LEAD + "Let me check this once more. " * 40 + "All right: the sum is 17.\n#### 17",
    "draft, then the same as answer": (LEAD + PARAGRAPH + "".join(f"line {i * i}\n" for i in range(300))) * 2,
    "no spaces": "".join(RNG.choice("资料的一是在不了有和人这中大为上个国我以要他") for _ in range(3000)),
    "nothing": "",
}


@pytest.mark.parametrize("name", LOOPS)
def test_every_exact_loop_is_caught(name: str) -> None:
    assert find_loop(LOOPS[name]).exact


@pytest.mark.parametrize("name", NEAR_LOOPS)
def test_every_near_loop_is_caught(name: str) -> None:
    assert find_loop(NEAR_LOOPS[name]).looped


@pytest.mark.parametrize("name", HEALTHY)
def test_no_healthy_text_is_called_a_loop(name: str) -> None:
    assert not find_loop(HEALTHY[name]).looped


@pytest.mark.parametrize("name", TEMPLATED)
def test_a_counter_is_a_suspect_and_no_loop(name: str) -> None:
    loop = find_loop(TEMPLATED[name])
    assert loop.templated
    assert not loop.looped


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not beside this checkout (../shared/data/gsm8k)")
def test_no_gold_answer_of_gsm8k_is_called_a_loop() -> None:
    lines = [line for name in ("test.jsonl", "train-head.jsonl") for line in (GSM8K / name).open(encoding="utf-8")]
    found = [find_loop(json.loads(line)["answer"]) for line in lines]
    assert len(found) == 1519
    assert not [loop for loop in found if loop.looped or loop.templated]


def test_the_onset_is_where_the_loop_starts_even_beyond_the_window() -> None:
    for name, start in (("a word", len(LEAD)), ("beyond the window", len(LEAD)), ("nothing before it", 0)):
        assert find_loop(LOOPS[name]).onset == pytest.approx(start / len(LOOPS[name]), abs=2 / len(LOOPS[name]))
    loop = find_loop(LOOPS["beyond the window"])
    assert loop.waste(20_000) == pytest.approx(20_000 * (1 - len(LEAD) / len(LOOPS["beyond the window"])), rel=1e-3)
    assert find_loop(NEAR_LOOPS["sentences in random order"]).onset == pytest.approx(0, abs=0.02)


def test_the_period_is_the_smallest() -> None:
    assert find_loop(LOOPS["a sentence"]).period == len("Let me check this once more. ")
    assert find_loop(LOOPS["two Chinese characters"]).period == 2
    assert find_loop(LOOPS["one digit"]).period == 1
    assert find_loop(LOOPS["one digit"]).copies >= 1000


@settings(max_examples=150, deadline=None)
@given(
    lead=st.text(max_size=60), unit=st.text(min_size=1, max_size=40), copies=st.integers(0, 12), cut=st.integers(0, 39)
)
def test_the_loop_score_is_the_longest_periodic_suffix_found_by_trying_all(
    lead: str, unit: str, copies: int, cut: int
) -> None:
    text = lead + unit * copies + unit[:cut]
    best = 0
    for period in range(1, len(text) + 1):
        length = period
        while length < len(text) and text[-length - 1] == text[-length - 1 + period]:
            length += 1
        if length >= 3 * period:
            best = max(best, length)
    loop = find_loop(text)
    assert loop.score == pytest.approx(best / len(text) if text else 0)
    assert loop.exact == (best >= 200)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=5000))
def test_any_text_is_judged_without_an_error(text: str) -> None:
    loop = find_loop(text)
    assert 0 <= loop.score <= 1
    assert loop.onset is None or 0 <= loop.onset <= 1

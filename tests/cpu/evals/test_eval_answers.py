"""What is read out of a reply: numbers as numbers, signs kept, thoughts not searched, run-ons cut."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truegate.errors import UserError
from truegate.evals.answers import extract, same_answer, split_thought, to_decimal

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"

CASES = [  # (reply, gold, right by the strict format, right by the flexible one)
    ("so it is\n#### 18", "18", True, True),
    ("#### $72.00", "72", True, True),
    ("#### 29.50", "29.5", True, True),
    ("#### 1,234", "1234", True, True),
    ("#### 1234", "1,234", True, True),
    ("#### -10", "-10", True, True),
    ("#### \N{MINUS SIGN}10", "-10", True, True),
    ("#### 10", "-10", False, False),
    ("#### 08", "8", True, True),
    ("#### **18**", "18", True, True),
    ("#### \\(18\\)", "18", True, True),
    ("#### 5 apples", "5", True, True),
    ("####18", "18", True, True),
    ("#### 3\n#### 4", "3", True, True),
    ("#### 1. First, we add\n#### 2. Then we take away\n#### 7", "7", True, True),
    ("#### 18.", "18", True, True),
    ("The answer is 18 ...", "18", False, True),
    ("The final answer is: **$1,080.00**.", "1080", False, True),
    ("The answer is 5 because 6 is too many", "5", False, True),
    ("answer = \N{MINUS SIGN}3", "-3", False, True),
    ("so \\boxed{42} and not 43", "42", False, True),
    ("\\boxed{\\$1{,}234}", "1234", False, True),
    ("\\boxed{18 \\text{ dollars in 3 days}}", "18", False, True),
    ("\\boxed{x = 5}", "5", False, True),
    ("\\boxed{\\frac{3}{4}}", "0.75", False, True),
    ("\\boxed{3/4}", "3/4", False, True),
    ("\\boxed{7} then \\boxed{\\boxed{8}", "8", False, True),
    ("10-3=7", "7", False, True),
    ("pages 3-5", "5", False, True),
    ("it falls to -5", "-5", False, True),
    ("12,000,000 people", "12000000", False, True),
    ("we get 1e3", "1000", False, True),
    ("18\n\nQuestion: How many of the 99 are red?\nAnswer: 55", "18", False, True),
    ("Question: what is 3 + 4?\nAnswer: 7", "7", False, True),
    ("29.00", "29", False, True),
    ("no number here", "1", False, False),
    ("", "0", False, False),
]


@pytest.mark.parametrize(("text", "gold", "strict", "flexible"), CASES)
def test_numbers_are_read_and_compared_as_numbers(text: str, gold: str, strict: bool, flexible: bool) -> None:
    found = extract(text, "number")
    assert (same_answer(found.strict, gold), same_answer(found.flexible, gold)) == (strict, flexible)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("**Answer:** B", "B"),
        ("so \\boxed{D}", "D"),
        ("I think it is A", "A"),
        ("a cat and a dog", None),
        ("The answer is a bit unclear", None),
        ("I do not know", None),
        ("Answer: E\nOr, if a is odd, F? No.", "E"),
    ],
)
def test_a_lower_case_letter_is_a_word_and_no_choice(text: str, letter: str | None) -> None:
    assert extract(text, "choice").flexible == letter


def test_own_patterns_and_whole_texts_are_extractors_and_others_are_refused() -> None:
    assert extract("id=7; id=9", r"regex:id=(\d+)").flexible == "9"
    assert extract("nothing", r"regex:id=(\d+)").flexible is None
    assert same_answer(extract(" Two  words\n", "text").strict, "two words")
    with pytest.raises(UserError, match="not a regular expression"):
        extract("", "regex:(")
    with pytest.raises(UserError, match="there is no extractor 'numbr'"):
        extract("", "numbr")


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>so 41</think>#### 42", "so 41", "#### 42"),
        ("so 41</think>#### 42", "so 41", "#### 42"),
        ("<think>so 41, and", "so 41, and", ""),
        ("plain", "", "plain"),
    ],
)
def test_a_marked_chain_of_thought_is_no_part_of_the_answer(text: str, thought: str, answer: str) -> None:
    assert split_thought(text) == (thought, answer)


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not beside this checkout (../shared/data/gsm8k)")
def test_every_gold_answer_of_gsm8k_is_read_as_itself() -> None:
    for line in (GSM8K / "test.jsonl").open(encoding="utf-8"):
        answer = json.loads(line)["answer"]
        gold = answer.rpartition("#### ")[2].strip()
        assert to_decimal(gold) is not None
        assert same_answer(extract(answer, "number").strict, gold)


@settings(max_examples=200, deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=2))
def test_any_number_is_read_back_however_it_is_written(value) -> None:
    for text in (f"#### {value}", f"The answer is {value}.", f"\\boxed{{{value:,}}}", f"so we get ${value:,}"):
        assert same_answer(extract(text, "number").flexible, str(value)), text


NASTY = {
    "spaces after the mark": "####" + " " * 200_000,
    "blank lines": "\n" * 200_000,
    "open boxes": "\\boxed{" * 30_000,
    "answers": "answer is " * 20_000,
    "digits": "1" * 200_000,
    "commas": "1,234" + ",567" * 50_000,
    "question marks": "Question:\n" * 20_000,
    "answer then spaces": "answer" + " " * 200_000,
    "minus signs": "-" * 200_000,
    "dollars": "$ " * 100_000,
}


@pytest.mark.parametrize("name", NASTY)
def test_a_degenerate_text_takes_no_time(name: str) -> None:
    started = time.perf_counter()
    for extractor in ("number", "choice"):
        extract(NASTY[name], extractor)
    assert time.perf_counter() - started < 2.0

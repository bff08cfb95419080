"""The generator's answers, checked by an interpreter that reads only the English of the question."""

import random
import re

import pytest

from truegate.errors import UserError
from truegate.evals.ledger import held_out, problems, sums, word_problem

NUMBER = r"(\d+)"
NAME = r"([A-Z][a-z]+)"
THING = r"([a-z]+)"
GAIN = re.compile(
    rf"{NAME} (?:buys|finds|gets|collects|wins|picks up|earns|adds) {NUMBER} (?:more )?{THING}(?: from a friend)?$"
)
BROUGHT = re.compile(rf"neighbour brings {NAME} {NUMBER} {THING}$")
LOSS = re.compile(rf"{NAME} (?:sells|loses|gives away|uses|drops|donates|throws out|spends) {NUMBER} {THING}$")
TAKEN = re.compile(rf"cousin takes {NUMBER} {THING} from {NAME}$")
MOVES = (
    (re.compile(rf"{NAME} (?:gives|sends) {NAME} {NUMBER} {THING}$"), "abnt"),
    (re.compile(rf"{NAME} (?:hands|passes) {NUMBER} {THING} to {NAME}$"), "antb"),
    (re.compile(rf"{NAME} (?:takes|borrows) {NUMBER} {THING} from {NAME}$"), "bnta"),
)
PACKS = re.compile(
    rf"{NAME} (?:buys|gets|finds) {NUMBER} (?:boxes|bags|piles) (?:of|with) {NUMBER} {THING} (?:in )?each$"
)
DOUBLE = re.compile(
    rf"(?:{NAME} doubles the {THING}|{NAME} gets as many {THING} again|the {THING} of {NAME} double in number)$", re.I
)
HALF = re.compile(rf"(?:{NAME} (?:gives away|loses) half of the {THING}|half of the {THING} of {NAME} are sold)$", re.I)
MATCH = re.compile(rf"{NAME} (?:buys|gets|finds) as many {THING} as {NAME} (?:has|owns|holds)$")


def interpret(question: str) -> int:
    *sentences, asked = re.split(r"(?<=[.?]) (?=[A-Z])", question)
    balance: dict[tuple[str, str], int] = {}
    for sentence in sentences:
        text = sentence.rstrip(".")
        opening = re.search(
            rf"{NAME} (?:has|starts with|owns|begins with|keeps) {NUMBER} {THING}(?: and {NUMBER} {THING})?$", text
        )
        if opening:
            who, n, thing, m, other = opening.groups()
            balance[who, thing] = int(n)
            if other:
                balance[who, other] = int(m)
        else:
            happen(text, balance)
    one = re.search(
        rf"How many {THING} does {NAME} (?:have now|own in the end)|What number of {THING} is left with {NAME}", asked
    )
    if one:
        thing, who = [x for x in one.groups() if x]
        return balance[who, thing]
    named = {thing for _, thing in balance if re.search(rf"\b{thing}\b", asked)}
    return sum(n for (_, thing), n in balance.items() if not named or thing in named)


def happen(text: str, balance: dict[tuple[str, str], int]) -> None:
    for pattern, order in MOVES:
        if (m := pattern.search(text)) and not TAKEN.search(text):
            words = dict(zip(order, m.groups(), strict=True))
            balance[words["a"], words["t"]] -= int(words["n"])
            balance[words["b"], words["t"]] += int(words["n"])
            return
    if m := GAIN.search(text) or BROUGHT.search(text):
        balance[m[1], m[3]] += int(m[2])
    elif m := LOSS.search(text):
        balance[m[1], m[3]] -= int(m[2])
    elif m := TAKEN.search(text):
        balance[m[3], m[2]] -= int(m[1])
    elif m := PACKS.search(text):
        balance[m[1], m[4]] += int(m[2]) * int(m[3])
    elif m := MATCH.search(text):
        balance[m[1], m[2]] += balance[m[3], m[2]]
    elif m := DOUBLE.search(text) or HALF.search(text):
        words = [x for x in m.groups() if x]
        key = (words[0], words[1]) if (words[0], words[1]) in balance else (words[1], words[0])
        if "half" in text.lower():
            assert balance[key] % 2 == 0
            balance[key] //= 2
        else:
            balance[key] *= 2
    else:
        raise AssertionError(f"not understood: {text}")
    assert min(balance.values()) >= 0


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 24, 40])
def test_the_answer_is_what_the_question_says(steps: int) -> None:
    for problem in problems(steps=steps, count=60, seed=11):
        assert interpret(problem.question) == int(problem.answer), problem.question


@pytest.mark.parametrize("steps", [2, 8, 24, 40])
def test_the_worked_solution_computes_right_and_ends_with_the_answer(steps: int) -> None:
    for problem in problems(steps=steps, count=40, seed=12):
        assert problem.solution.splitlines()[-1] == f"#### {problem.answer}"
        workings = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", problem.solution)
        assert len(workings) >= steps
        for a, sign, b, result in workings:
            assert eval(f"{a} {'//' if sign == '/' else sign} {b}") == int(result)


@pytest.mark.parametrize("steps", [1, 6, 14, 24, 40])
def test_the_closing_line_names_what_is_asked_and_computes_it(steps: int) -> None:
    for problem in problems(steps=steps, count=40, seed=13):
        asked = re.split(r"(?<=[.]) (?=[A-Z])", problem.question)[-1]
        closing = problem.solution.splitlines()[-2]
        what = re.fullmatch(rf"Asked: (?:{NAME} {THING} = \d+|all {THING}\. .*)\.", closing)
        assert what, closing
        assert all(word in asked for word in what.groups() if word and word != "things"), problem.question
        assert re.findall(r"\d+", closing)[-1] == problem.answer
        if what[3]:
            listed, total = closing.split(", total ")
            values = [int(n) for n in re.findall(r"= (\d+)", listed)]
            assert sum(values) == int(problem.answer)
            assert int(total.split()[0]) == values[0]


def test_a_short_problem_can_be_as_hard_by_the_step_as_a_long_one() -> None:
    def accounts(like: int | None) -> set[int]:
        rng = random.Random(3)
        asked = [word_problem(rng, steps=4, split="train", like=like) for _ in range(40)]
        return {p.solution.splitlines()[0].count(" = ") for p in asked}

    assert accounts(None) == {1}
    assert accounts(40) == {3}


def test_plain_sums_are_right() -> None:
    for problem in sums(count=300, seed=3):
        a, sign, b, result = re.match(r"(\d+) ([-+*]) (\d+) = (\d+)\n", problem.solution).groups()
        assert eval(f"{a} {sign} {b}") == int(result) == int(problem.answer)
        assert {a, b} <= set(re.findall(r"\d+", problem.question))


def test_problems_are_a_function_of_steps_count_and_seed() -> None:
    assert problems(steps=9, count=20, seed=5) == problems(steps=9, count=20, seed=5)
    assert problems(steps=9, count=20, seed=5) != problems(steps=9, count=20, seed=6)
    assert problems(steps=9, count=20, seed=5)[:7] == problems(steps=9, count=7, seed=5)
    first = problems(steps=2, count=1, seed=1)[0]
    assert first.question == FIRST_QUESTION, "the published figures are of these very problems"


FIRST_QUESTION = (
    "On Monday Ida has 13 nuts. Ida collects 2 nuts. At school Ida picks up 4 nuts. How many nuts does Ida have now?"
)


def test_no_opening_is_in_two_splits() -> None:
    def openings(split: str) -> set[str]:
        return {p.question.split(".")[0] for p in held_out(steps=2, count=400, seed=0, split=split)}

    plain = {s: {re.sub(r"^(At first|In the beginning|On Monday|To begin with,) ", "", o) for o in openings(s)}
             for s in ("test", "validation", "train")}  # fmt: skip
    key = {
        s: {re.sub(r" (has|starts with|owns|begins with|keeps) ", " ", o) for o in found} for s, found in plain.items()
    }
    for one, other in (("test", "train"), ("validation", "train"), ("test", "validation")):
        assert not key[one] & key[other]


def test_questions_of_one_call_differ_and_events_of_one_question_too() -> None:
    asked = problems(steps=24, count=50, seed=8)
    assert len({p.question for p in asked}) == 50
    for problem in asked:
        lines = [line.split(". ", 1)[1].split(",")[0].split(":")[0]
                 for line in problem.solution.splitlines() if re.match(r"\d+\. ", line)]  # fmt: skip
        assert len(lines) == 24
        assert len(set(lines)) == len(lines)


def test_wrong_use_is_named() -> None:
    with pytest.raises(UserError, match="at least 1 step"):
        word_problem(random.Random(0), steps=0, split="test")

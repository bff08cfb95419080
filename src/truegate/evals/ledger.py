"""Ledger problems: word problems about who owns how many of what, with a worked answer, of any number of steps.

The embedded model is trained on these and `truegate eval run ledger` asks them. Longer problems are harder step by
step, not only longer: more accounts (someone's things of one kind), larger numbers, balances written longer ago.
Invariant: every problem belongs to one split, decided by a hash of its opening (who owns what at the start), so that no
seed can bring a question of the test split into training, or the other way round. No torch, no numpy.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from truegate.errors import UserError

Split = Literal["test", "validation", "train"]
SPLITS = 16  # openings are hashed into 16 classes: 0 is the test split, 1 validation, the rest training
CHECK_EVERY = 5  # a worked answer restates every balance after each five steps
TEST_SEED = 1  # the seed of the published figures, fixed before the first training run

NAMES = (
    "Mia", "Leo", "Ann", "Ben", "Zoe", "Max", "Eva", "Tom", "Ida", "Sam", "Lea", "Jon", "Amy", "Dan", "Kim", "Ray",
    "Ella", "Noah", "Ruth", "Omar", "Lucy", "Hugo", "Nina", "Paul", "Rosa", "Finn", "Maya", "Otto", "Vera", "Alan",
    "Jane", "Carl", "Sara", "Igor", "Tina", "Emil", "Olga", "Ivan", "Dora", "Luis",
)  # fmt: skip
THINGS = (
    "apples", "pears", "coins", "books", "pens", "cards", "marbles", "stamps", "shells", "eggs", "cups", "keys",
    "stones", "beads", "plums", "lemons", "tickets", "buttons", "ribbons", "bricks", "candles", "pencils", "cookies",
    "flowers", "peaches", "carrots", "badges", "balls", "nuts", "bulbs",
)  # fmt: skip

STARTS = ("has {}", "starts with {}", "owns {}", "begins with {}", "keeps {}")
OPENINGS = ("", "", "At first ", "In the beginning ", "On Monday ", "To begin with, ")
LINKS = (
    "", "", "", "Then ", "Then ", "After that, ", "Next, ", "Later, ", "Later on, ", "The next day, ",
    "In the evening, ", "A week later, ", "Soon after, ", "On the way home, ", "At noon, ", "Before long, ",
    "At the market ", "At school ", "By the river ", "In the park ", "To everyone's surprise ", "Without a word ",
)  # fmt: skip
GAINS = (
    "{a} buys {n} more {t}", "{a} finds {n} {t}", "{a} gets {n} {t} from a friend", "{a} collects {n} {t}",
    "{a} wins {n} {t}", "{a} picks up {n} {t}", "a neighbour brings {a} {n} {t}", "{a} earns {n} {t}",
    "{a} adds {n} {t}",
)  # fmt: skip
LOSSES = (
    "{a} sells {n} {t}", "{a} loses {n} {t}", "{a} gives away {n} {t}", "{a} uses {n} {t}", "{a} drops {n} {t}",
    "{a} donates {n} {t}", "a cousin takes {n} {t} from {a}", "{a} throws out {n} {t}", "{a} spends {n} {t}",
)  # fmt: skip
MOVES = (
    "{a} gives {b} {n} {t}", "{a} hands {n} {t} to {b}", "{b} takes {n} {t} from {a}", "{a} passes {n} {t} to {b}",
    "{b} borrows {n} {t} from {a}", "{a} sends {b} {n} {t}",
)  # fmt: skip
DOUBLES = ("{a} doubles the {t}", "{a} gets as many {t} again", "the {t} of {a} double in number")
HALVES = ("{a} gives away half of the {t}", "{a} loses half of the {t}", "half of the {t} of {a} are sold")
PACKS = (
    "{a} buys {k} boxes of {n} {t} each", "{a} gets {k} bags with {n} {t} in each",
    "{a} finds {k} piles of {n} {t} each",
)  # fmt: skip
MATCHES = ("{a} buys as many {t} as {b} has", "{a} gets as many {t} as {b} owns", "{a} finds as many {t} as {b} holds")

ASK_ONE = (
    "How many {t} does {a} have now?", "How many {t} does {a} own in the end?", "What number of {t} is left with {a}?",
)  # fmt: skip
ASK_THING = (
    "How many {t} do they have together?", "How many {t} are there in all?", "What is the total number of {t}?",
)  # fmt: skip
ASK_ALL = (
    "How many things do they have altogether?", "How many things are there in total?",
    "What is the sum of all they own?",
)  # fmt: skip
RESULTS = (": {}.", ", so {}.", ", that is {}.", ", which makes {}.")
BEGINS = ("Start: {}.", "At the start: {}.", "We begin with {}.", "The ledger opens with {}.")
CHECKS = (
    "Check after {} steps: {}.", "After {} steps: {}.", "Let me check. After {} steps: {}.",
    "Status after {} steps: {}.",
)  # fmt: skip
ENDS = ("In the end: {}.", "Final ledger: {}.", "To sum up: {}.", "Now: {}.")

SUMS: dict[str, tuple[str, ...]] = {
    "+": (
        "What is {a} + {b}?", "what is {a} + {b}?", "What's {a} + {b}?", "{a} + {b} = ?", "{a} + {b}", "{a}+{b}",
        "Calculate {a} + {b}.", "How much is {a} plus {b}?", "Add {a} and {b}.", "What is {a} plus {b}?", "{a} + {b} =",
    ),
    "-": (
        "What is {a} - {b}?", "what is {a} - {b}?", "What's {a} - {b}?", "{a} - {b} = ?", "{a} - {b}", "{a}-{b}",
        "Calculate {a} - {b}.", "How much is {a} minus {b}?", "Subtract {b} from {a}.", "What is {a} minus {b}?",
        "{a} - {b} =",
    ),
    "*": (
        "What is {a} * {b}?", "what is {a} times {b}?", "What's {a} x {b}?", "{a} * {b} = ?", "{a} * {b}", "{a}*{b}",
        "Calculate {a} * {b}.", "How much is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} times {b}?",
        "{a} * {b} =",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question, its exact answer as digits, and a worked solution whose last line is `#### answer`."""

    question: str
    answer: str
    solution: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How hard a step is at a given length: accounts, sizes of opening balances, of changes and of any balance."""

    accounts: tuple[int, int]
    start: tuple[int, int]
    change: tuple[int, int]
    limit: int
    plain: bool = False  # only gains and losses


SCALES: tuple[tuple[int, Scale], ...] = (
    (3, Scale(accounts=(1, 1), start=(3, 30), change=(2, 12), limit=99, plain=True)),
    (6, Scale(accounts=(1, 1), start=(5, 40), change=(2, 15), limit=99)),
    (14, Scale(accounts=(1, 2), start=(10, 60), change=(2, 20), limit=199)),
    (24, Scale(accounts=(2, 3), start=(10, 80), change=(2, 30), limit=199)),
    (10**9, Scale(accounts=(3, 3), start=(20, 99), change=(2, 40), limit=299)),
)


def problems(*, steps: int, count: int, seed: int) -> list[Problem]:
    """`count` different problems of `steps` steps from the test split, the same for the same three numbers."""
    return held_out(steps=steps, count=count, seed=seed, split="test")


def held_out(*, steps: int, count: int, seed: int, split: Split) -> list[Problem]:
    """`count` different problems of one split, the same for the same four values."""
    rng = random.Random(f"truegate ledger {split} {steps} {seed}")
    return _distinct(count, lambda: word_problem(rng, steps=steps, split=split), f"problems of {steps} steps")


def sums(*, count: int, seed: int, split: Split = "test") -> list[Problem]:
    """`count` different plain sums ("What is 37 + 85?") of one split."""
    rng = random.Random(f"truegate sums {split} {seed}")
    return _distinct(count, lambda: plain_sum(rng, split=split), "plain sums")


def word_problem(rng: random.Random, *, steps: int, split: Split, like: int | None = None) -> Problem:
    """One ledger problem of `steps` steps from `split`, drawn with `rng`; its steps as hard as those of `like`."""
    if steps < 1:
        raise UserError(f"a ledger problem has at least 1 step, not {steps}")
    scale = next(scale for limit, scale in SCALES if (like or steps) <= limit)
    while True:
        opening = {account: rng.randint(*scale.start) for account in _accounts(rng, rng.randint(*scale.accounts))}
        if _split_of(repr(sorted(opening.items()))) == split:
            return _Ledger(rng, scale, opening).play(steps)


def plain_sum(rng: random.Random, *, split: Split) -> Problem:
    """One plain sum, difference or product of whole numbers, never negative."""
    while True:
        sign = rng.choice("++--*")
        high = rng.choice((20, 100, 100, 1000))
        a, b = rng.randrange(high), rng.randrange(high)
        if sign == "*":
            a, b = rng.randrange(2, 13), rng.randrange(2, 10)
        if sign == "-":
            a, b = max(a, b), min(a, b)
        if sign == "*" or _split_of(f"{a}{sign}{b}") == split:  # products are one small table, all of it taught
            break
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    question = rng.choice(SUMS[sign]).format(a=a, b=b)
    return Problem(question=question, answer=str(value), solution=f"{a} {sign} {b} = {value}\n#### {value}")


def _accounts(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """`count` (person, thing) pairs: people who own one thing each, the same, or two people of whom one owns two."""
    people, things = rng.sample(NAMES, count), rng.sample(THINGS, 2)
    if count == 3 and rng.random() < 0.5:
        return [(people[0], things[0]), (people[0], things[1]), (people[1], things[0])]
    return [(a, things[0]) for a in people]


def _split_of(key: str) -> Split:
    match hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % SPLITS:
        case 0:
            return "test"
        case 1:
            return "validation"
        case _:
            return "train"


def _distinct(count: int, draw: Callable[[], Problem], what: str) -> list[Problem]:
    found: dict[str, Problem] = {}
    for _ in range(20 * count + 100):
        if len(found) == count:
            return list(found.values())
        problem = draw()
        found.setdefault(problem.question, problem)
    raise UserError(f"there are not {count} different {what} in this split: ask for fewer")


_Balances = dict[tuple[str, str], int]  # (person, thing) -> how many
_Event = tuple[str, str, _Balances]  # the clause told, its working, the balances it changes


class _Ledger:
    """The balances of one problem while its question and its worked solution are written side by side."""

    def __init__(self, rng: random.Random, scale: Scale, opening: _Balances) -> None:
        self.rng, self.scale, self.balance = rng, scale, dict(opening)
        self.people, self.things = (list(dict.fromkeys(owned)) for owned in zip(*opening, strict=True))
        self.clauses: set[str] = set()  # an event told twice in the same words would make "the next event" ambiguous
        self.result = rng.choice(RESULTS)

    def play(self, steps: int) -> Problem:
        rng = self.rng
        question, solution = [self._opening()], [rng.choice(BEGINS).format(_state(self.balance))]
        check = rng.choice(CHECKS)
        for step in range(1, steps + 1):
            clause, working = self._event()
            question.append(_capital(rng.choice(LINKS) + clause) + ".")
            solution.append(f"{step}. " + _capital(clause) + self.result.format(working))
            if step % CHECK_EVERY == 0 and step < steps:
                solution.append(check.format(step, _state(self.balance)))
        asked, answer, closing = self._question()
        if len(self.balance) > 1:
            solution.append(rng.choice(ENDS).format(_state(self.balance)))
        solution += [closing, f"#### {answer}"]
        return Problem(question=" ".join([*question, asked]), answer=str(answer), solution="\n".join(solution))

    def _opening(self) -> str:
        style, sentences = self.rng.choice(STARTS), []
        for a in self.people:
            owned = " and ".join(f"{n} {t}" for (b, t), n in self.balance.items() if b == a)
            sentences.append(f"{a} {style.format(owned)}.")
        return self.rng.choice(OPENINGS) + " ".join(sentences)

    def _event(self) -> tuple[str, str]:
        """The next event as (clause, working), after it has changed the balances; its words are new in this problem."""
        kinds = [self._gain] * 5 + [self._loss] * 5
        if not self.scale.plain:
            kinds += [self._pack, self._double, self._half]
        if len(self.people) > 1:
            kinds += [self._move] * 6 + [self._match]
        while True:
            event = self.rng.choice(kinds)(*self.rng.choice(list(self.balance)))
            if event is None:
                continue
            clause, working, after = event
            if clause not in self.clauses and all(0 <= value <= self.scale.limit for value in after.values()):
                self.clauses.add(clause)
                self.balance.update(after)
                return clause, working

    def _gain(self, a: str, t: str) -> _Event:
        n, old = self.rng.randint(*self.scale.change), self.balance[a, t]
        return self._say(GAINS, a=a, n=n, t=t), f"{a} {t} {old} + {n} = {old + n}", {(a, t): old + n}

    def _loss(self, a: str, t: str) -> _Event:
        n, old = self.rng.randint(*self.scale.change), self.balance[a, t]
        return self._say(LOSSES, a=a, n=n, t=t), f"{a} {t} {old} - {n} = {old - n}", {(a, t): old - n}

    def _move(self, a: str, t: str) -> _Event | None:
        b = self._other(a, t)
        if b is None:
            return None
        n, old, other = self.rng.randint(*self.scale.change), self.balance[a, t], self.balance[b, t]
        working = f"{a} {t} {old} - {n} = {old - n}, {b} {t} {other} + {n} = {other + n}"
        return self._say(MOVES, a=a, b=b, n=n, t=t), working, {(a, t): old - n, (b, t): other + n}

    def _match(self, a: str, t: str) -> _Event | None:
        b = self._other(a, t)
        if b is None:
            return None
        old, other = self.balance[a, t], self.balance[b, t]
        working = f"{b} {t} = {other}, {a} {t} {old} + {other} = {old + other}"
        return self._say(MATCHES, a=a, b=b, t=t), working, {(a, t): old + other}

    def _pack(self, a: str, t: str) -> _Event:
        k, n, old = self.rng.randint(2, 5), self.rng.randint(2, 12), self.balance[a, t]
        working = f"{k} * {n} = {k * n}, {a} {t} {old} + {k * n} = {old + k * n}"
        return self._say(PACKS, a=a, k=k, n=n, t=t), working, {(a, t): old + k * n}

    def _double(self, a: str, t: str) -> _Event:
        old = self.balance[a, t]
        return self._say(DOUBLES, a=a, t=t), f"{a} {t} {old} + {old} = {2 * old}", {(a, t): 2 * old}

    def _half(self, a: str, t: str) -> _Event | None:
        old = self.balance[a, t]
        if old % 2:
            return None
        return self._say(HALVES, a=a, t=t), f"{a} {t} {old} / 2 = {old // 2}", {(a, t): old // 2}

    def _say(self, forms: tuple[str, ...], **words: str | int) -> str:
        return self.rng.choice(forms).format(**words)

    def _other(self, a: str, t: str) -> str | None:
        """Somebody else who owns things of this kind."""
        others = [b for b, u in self.balance if u == t and b != a]
        return self.rng.choice(others) if others else None

    def _question(self) -> tuple[str, int, str]:
        """What is asked, its answer, and the closing line that says again what is asked and works it out."""
        a, t = self.rng.choice(list(self.balance))
        kind = self.rng.random()
        if len(self.balance) == 1 or kind < 0.3:
            return self._say(ASK_ONE, a=a, t=t), self.balance[a, t], f"Asked: {_state({(a, t): self.balance[a, t]})}."
        t = self.things[0]  # the kind that more than one person owns
        if kind < 0.6 or len(self.things) == 1:
            asked, what = self._say(ASK_THING, t=t), t
            counted = {account: n for account, n in self.balance.items() if account[1] == t}
        else:
            asked, what, counted = self._say(ASK_ALL), "things", self.balance
        values = list(counted.values())
        closing = f"Asked: all {what}. {_state(counted)}, total {', '.join(_additions(values))}."
        return asked, sum(values), closing


def _state(balance: _Balances) -> str:
    return ", ".join(f"{a} {t} = {n}" for (a, t), n in balance.items())


def _additions(values: list[int]) -> Iterator[str]:
    total = values[0]
    for value in values[1:]:
        yield f"{total} + {value} = {total + value}"
        total += value


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]

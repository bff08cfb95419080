"""Every longform answer is computed again here from the statement, by code that shares nothing with the task."""

import datetime
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

import pytest

from truegate.evals.answers import extract, same_answer
from truegate.evals.longform import PROBLEMS
from truegate.evals.tasks import longform


def halve_or_triple() -> int:
    n, steps = 27, 0
    while n != 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


def circle_of_41() -> int:
    people = deque(range(1, 42))
    while len(people) > 1:
        people.rotate(-2)
        people.popleft()
    return people[0]


def wheel_of_101() -> int:
    shown = 7
    for _ in range(25):
        shown = (13 * shown + 5) % 101
    return shown


def blocked_streets() -> int:
    closed = {(2, 2), (3, 5), (5, 3), (6, 6)}
    total = 0
    for east in itertools.combinations(range(14), 7):
        x = y = 0
        for step in range(14):
            x, y = (x + 1, y) if step in east else (x, y + 1)
            if (x, y) in closed:
                break
        else:
            total += 1
    return total


def change_for_120() -> int:
    return sum(
        1
        for fifty in range(3)
        for quarter in range(5)
        for ten in range(13)
        for five in range(25)
        if 50 * fifty + 25 * quarter + 10 * ten + 5 * five <= 120
    )


def all_the_digits() -> int:
    return sum(int(digit) for n in range(1, 751) for digit in str(n))


def one_cashier() -> int:
    arrivals = (0, 2, 3, 7, 8, 15, 16, 17, 25, 26, 40, 41)
    needs = (4, 3, 6, 2, 5, 1, 7, 4, 3, 9, 2, 6)
    free = waited = 0
    for arrival, need in zip(arrivals, needs, strict=True):
        start = max(free, arrival)
        waited, free = waited + start - arrival, start + need
    return waited


def rucksack() -> int:
    weights = (5, 8, 11, 14, 17, 7, 9, 13, 20, 4)
    values = (12, 20, 29, 38, 47, 15, 24, 33, 58, 9)
    return max(
        sum(itertools.compress(values, taken))
        for taken in itertools.product((0, 1), repeat=10)
        if sum(itertools.compress(weights, taken)) <= 50
    )


def cheapest_route() -> int:
    roads = "A-B 7, A-C 9, A-D 14, B-C 10, B-E 15, C-E 11, C-D 2, D-F 9, E-F 6, E-G 12, F-H 11, G-H 3, G-I 8, H-I 13"
    graph: dict[str, list[tuple[str, int]]] = {}
    for road in roads.split(", "):
        pair, length = road.split()
        a, b = pair.split("-")
        graph.setdefault(a, []).append((b, int(length)))
        graph.setdefault(b, []).append((a, int(length)))
    best: dict[str, int] = {}
    heap = [(0, "A")]
    while heap:
        far, town = heapq.heappop(heap)
        if town not in best:
            best[town] = far
            for other, length in graph[town]:
                heapq.heappush(heap, (far + length, other))
    assert len(best) == 9
    return sum(best.values())


def friday_the_13th() -> int:
    assert datetime.date(2021, 1, 1).weekday() == 4
    return sum(datetime.date(y, m, 13).weekday() == 4 for y in range(2021, 2033) for m in range(1, 13))


def ones_in_binary() -> int:
    return sum(n.bit_count() for n in range(1, 201))


def colony() -> int:
    living = {(1, 0), (2, 0), (0, 1), (1, 1), (1, 2)}
    around = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    for _ in range(8):
        near: dict[tuple[int, int], int] = {}
        for x, y in living:
            for i, j in around:
                near[x + i, y + j] = near.get((x + i, y + j), 0) + 1
        living = {cell for cell, count in near.items() if count == 3 or (count == 2 and cell in living)}
    return len(living)


def longest_rise() -> int:
    numbers = (31, 12, 45, 18, 27, 50, 9, 33, 38, 21, 61, 40, 15, 55, 48, 66, 29, 70, 58, 74)
    best: list[int] = []
    for i, n in enumerate(numbers):
        best.append(1 + max((best[j] for j in range(i) if numbers[j] < n), default=0))
    return max(best)


def primes_below_200() -> int:
    return sum(n for n in range(2, 200) if all(n % d for d in range(2, math.isqrt(n) + 1)))


def three_stores() -> int:
    x, y, z = 120, 80, 45
    x, y = x - 35, y + 35
    z += 60
    part = y // 3
    y, z = y - part, z + part
    x *= 2
    z, x = z - 48, x + 48
    y -= 19
    part = x // 4
    x, y = x - part, y + part
    z -= z // 2
    y, z = y - 27, z + 27
    x -= 58
    z *= 2
    y += 33
    x, z = x - 21, z + 21
    part = z // 5
    z, y = z - part, y + part
    y -= y // 2
    return 10000 * x + 100 * y + z


def taking_turns() -> int:
    arrives = {"P": 0, "Q": 1, "R": 2, "S": 9, "T": 12}
    left = {"P": 8, "Q": 5, "R": 10, "S": 4, "T": 7}
    coming = deque(sorted(arrives, key=arrives.__getitem__))
    queue: deque[str] = deque()
    now = total = 0
    while coming or queue:
        while coming and arrives[coming[0]] <= now:
            queue.append(coming.popleft())
        if not queue:
            now = arrives[coming[0]]
            continue
        job = queue.popleft()
        spent = min(3, left[job])
        now, left[job] = now + spent, left[job] - spent
        while coming and arrives[coming[0]] <= now:
            queue.append(coming.popleft())
        if left[job]:
            queue.append(job)
        else:
            total += now - arrives[job]
    return total


def growing_word() -> int:
    word = "A"
    for _ in range(14):
        word = "".join({"A": "AB", "B": "C", "C": "AA"}[letter] for letter in word)
    return len(word)


def lift() -> int:
    at, moved, up, todo = 5, 0, True, {3, 8, 12, 1, 17, 6}
    while todo:
        ahead = [floor for floor in todo if (floor > at) == up]
        if not ahead:
            up = not up
            continue
        stop = min(ahead, key=lambda floor: abs(floor - at))
        moved, at = moved + abs(stop - at), stop
        todo.remove(stop)
        if stop == 8 and up:
            todo.add(19)
        if stop == 3 and not up:
            todo |= {0, 10}
    return moved


def different_parts() -> int:
    ways = [1] + [0] * 30
    for part in range(1, 31):
        for total in range(30, part - 1, -1):
            ways[total] += ways[total - part]
    return ways[30]


def way_down() -> int:
    rows = "4; 7 3; 2 8 5; 9 1 6 7; 3 8 2 4 6; 5 9 7 1 8 2; 6 4 3 9 2 7 5; 8 1 5 6 3 9 4 7"
    triangle = [[int(n) for n in row.split()] for row in rows.split("; ")]
    best = 0
    for turns in itertools.product((0, 1), repeat=7):
        at, total = 0, triangle[0][0]
        for row, turn in zip(triangle[1:], turns, strict=True):
            at += turn
            total += row[at]
        best = max(best, total)
    return best


def last_three_digits() -> int:
    return pow(7, 222, 1000)


def word_to_word() -> int:
    a, b = "INTENTIONALLY", "EXECUTIONER"
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row = row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (left != right)))
    return row[-1]


def knight() -> int:
    squares = {(0, 0)}
    moves = [(1, 2), (2, 1), (-1, 2), (-2, 1), (1, -2), (2, -1), (-1, -2), (-2, -1)]
    for _ in range(5):
        squares = {(x + i, y + j) for x, y in squares for i, j in moves if 0 <= x + i < 8 and 0 <= y + j < 8}
    return len(squares)


def savings() -> int:
    coins = 1000
    for year in range(1, 16):
        coins += coins * 7 // 100
        coins -= 90 if year % 2 == 0 else 0
    return coins


def neighbour_swaps() -> int:
    numbers = (14, 3, 9, 1, 12, 7, 15, 5, 2, 11, 8, 4, 13, 6, 10)
    return sum(a > b for a, b in itertools.combinations(numbers, 2))


def three_in_a_row() -> int:
    return sum("HHH" not in "".join(row) for row in itertools.product("HT", repeat=12))


COMPUTED: dict[str, Callable[[], int]] = {
    name.replace("_", "-"): value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_every_longform_answer_follows_from_its_statement(problem) -> None:
    assert COMPUTED[problem.name]() == problem.answer


def test_there_are_at_least_twenty_problems_and_each_name_is_its_own() -> None:
    assert len({p.name for p in PROBLEMS}) == len(PROBLEMS) >= 20


def test_the_task_asks_for_the_line_its_scorer_reads() -> None:
    for item in longform().items:
        assert "####" in item.input
        assert same_answer(extract(f"So it is.\n#### {item.gold}", item.extractor).strict, item.gold)

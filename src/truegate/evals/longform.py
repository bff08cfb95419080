"""Our own problems that need long step-by-step work, each with one whole number as its answer.

They are simulations, counts and searches that a person can do on paper and nobody can guess. Every answer is computed
again, from the statement alone, by tests/cpu/evals/test_eval_longform.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Longform:
    """A problem and its answer."""

    name: str
    question: str
    answer: int


def _problem(name: str, answer: int, question: str) -> Longform:
    return Longform(name=name, question=" ".join(question.split()), answer=answer)


PROBLEMS: tuple[Longform, ...] = (
    _problem("halve-or-triple", 111, """
        Begin with 27. In each step, halve the number if it is even; if it is odd, triple it and add 1. After how many
        steps is the number 1 for the first time?"""),
    _problem("circle-of-41", 31, """
        41 people stand in a circle, numbered 1 to 41 clockwise. Counting starts at person 1 and goes clockwise; every
        third person counted leaves the circle (first person 3, then person 6, and so on), and counting goes on with
        the next person still standing. What is the number of the last person left?"""),
    _problem("wheel-of-101", 9, """
        A wheel shows 7. In each turn, multiply what it shows by 13, add 5, and keep only the remainder after division
        by 101. What does the wheel show after 25 turns?"""),
    _problem("blocked-streets", 464, """
        In a city of square blocks you walk from corner (0,0) to corner (7,7), each step one block east (x grows by 1)
        or one block north (y grows by 1). The corners (2,2), (3,5), (5,3) and (6,6) are closed. How many different
        walks are there?"""),
    _problem("change-for-120", 494, """
        In how many ways can 120 cents be paid with coins of 1, 5, 10, 25 and 50 cents, where any number of each may
        be used and the order does not matter?"""),
    _problem("all-the-digits", 9087, """
        Write down all whole numbers from 1 to 750. What is the sum of all the digits written?"""),
    _problem("one-cashier", 65, """
        A shop has one cashier who serves customers in the order of arrival. Twelve customers arrive at minutes 0, 2,
        3, 7, 8, 15, 16, 17, 25, 26, 40 and 41, and need 4, 3, 6, 2, 5, 1, 7, 4, 3, 9, 2 and 6 minutes of service, in
        this order. A customer is served as soon as the cashier is free. Waiting time runs from arrival to the start
        of service. What is the sum of the waiting times of all twelve customers, in minutes?"""),
    _problem("rucksack", 138, """
        A rucksack carries at most 50 kg. There are ten things, each to be taken whole or left: weights 5, 8, 11, 14,
        17, 7, 9, 13, 20 and 4 kg, with values 12, 20, 29, 38, 47, 15, 24, 33, 58 and 9, in this order. What is the
        greatest total value the rucksack can carry?"""),
    _problem("cheapest-route", 170, """
        Roads join nine towns in both directions, with these lengths: A-B 7, A-C 9, A-D 14, B-C 10, B-E 15, C-E 11,
        C-D 2, D-F 9, E-F 6, E-G 12, F-H 11, G-H 3, G-I 8, H-I 13. What is the sum of the lengths of the shortest
        routes from A to each of the other eight towns?"""),
    _problem("friday-the-13th", 19, """
        1 January 2021 was a Friday. In the years 2021 to 2032, both included, how many times does the 13th day of a
        month fall on a Friday? 2024, 2028 and 2032 are leap years."""),
    _problem("ones-in-binary", 735, """
        Write the whole numbers from 1 to 200 in binary. How many digits 1 are written in all?"""),
    _problem("colony", 18, """
        Cells live on an endless square grid; each has eight neighbours. In each generation, all at once, a living
        cell with two or three living neighbours stays alive, any other living cell dies, and an empty cell with
        exactly three living neighbours comes alive. At first these cells live, as (column, row): (1,0), (2,0), (0,1),
        (1,1), (1,2). How many cells live after 8 generations?"""),
    _problem("longest-rise", 10, """
        From the list 31, 12, 45, 18, 27, 50, 9, 33, 38, 21, 61, 40, 15, 55, 48, 66, 29, 70, 58, 74 you may strike out
        any numbers, keeping the order of the rest. How many numbers at most can be kept so that what is left strictly
        rises?"""),
    _problem("primes-below-200", 4227, """
        What is the sum of all prime numbers smaller than 200?"""),
    _problem("three-stores", 857737, """
        Stores X, Y and Z hold 120, 80 and 45 crates. Then, in order: X sends 35 to Y; Z buys 60; Y sends a third of
        what it holds, rounded down, to Z; X doubles what it holds; Z sends 48 to X; Y sells 19; X sends a quarter of
        what it holds, rounded down, to Y; Z sells half of what it holds, rounded down; Y sends 27 to Z; X sells 58; Z
        doubles what it holds; Y buys 33; X sends 21 to Z; Z sends a fifth of what it holds, rounded down, to Y; Y
        sells half of what it holds, rounded down. What is the number of crates in X, times 10000, plus the number in
        Y, times 100, plus the number in Z?"""),
    _problem("taking-turns", 108, """
        A machine works on one job at a time in turns of 3 minutes. Jobs P, Q, R, S and T arrive at minutes 0, 1, 2, 9
        and 12 and need 8, 5, 10, 4 and 7 minutes of work. Waiting jobs stand in a queue. A turn ends after 3 minutes,
        or earlier if the job is done. Jobs that arrive during a turn, or at the minute it ends, join the queue before
        the unfinished job of that turn rejoins it at the end. The machine is never idle while a job waits. What is
        the sum, over the five jobs, of the minutes from arrival to the end of its work?"""),
    _problem("growing-word", 1729, """
        Begin with the word A. In each round, replace every letter at once: A becomes AB, B becomes C, and C becomes
        AA. How many letters does the word have after 14 rounds?"""),
    _problem("lift", 43, """
        A lift stands at floor 5 of a house with floors 0 to 20, about to go up. Floors 3, 8, 12, 1, 17 and 6 are
        requested at once. It goes up to the highest requested floor above, serving requested floors on its way, and
        then down to the lowest requested floor. While it stands at floor 8 on its way up, floor 19 is also requested;
        while it stands at floor 3 on its way down, floors 0 and 10 are also requested, and after its lowest stop it
        goes up to 10. By how many floors does it move in all, up and down counted alike?"""),
    _problem("different-parts", 296, """
        In how many ways can 30 be written as a sum of different positive whole numbers, where the order does not
        matter? The number 30 alone counts as one way."""),
    _problem("way-down", 53, """
        In this triangle of numbers, row by row: 4; 7 3; 2 8 5; 9 1 6 7; 3 8 2 4 6; 5 9 7 1 8 2; 6 4 3 9 2 7 5; 8 1 5
        6 3 9 4 7; you go from the top to the last row, from a number at position k of a row to position k or k+1 of
        the next row. What is the greatest sum of the numbers on such a way?"""),
    _problem("last-three-digits", 49, """
        What are the last three digits of 7 to the power 222, read as a number?"""),
    _problem("word-to-word", 9, """
        In one step you may insert one letter, delete one letter, or replace one letter by another. What is the
        smallest number of steps that turns the word INTENTIONALLY into the word EXECUTIONER?"""),
    _problem("knight", 32, """
        A knight stands on a corner square of an empty 8 by 8 chess board. On how many different squares, its own
        included, can it stand after exactly 5 moves?"""),
    _problem("savings", 1697, """
        An account holds 1000 coins. At the end of each year interest of 7 percent is added, rounded down to whole
        coins; after that, at the end of every even year (2, 4, 6, ...), 90 coins are taken out. How many coins does
        it hold after 15 years?"""),
    _problem("neighbour-swaps", 52, """
        The list 14, 3, 9, 1, 12, 7, 15, 5, 2, 11, 8, 4, 13, 6, 10 is put into rising order by swapping neighbours
        only. What is the smallest number of swaps?"""),
    _problem("three-in-a-row", 1705, """
        How many rows of 12 coins, each showing heads or tails, have no three heads next to each other?"""),
)  # fmt: skip

"""The prefix tree and the page allocator against a plain model of what they promise."""

import random

import pytest

from truegate.cache.pages import PageAllocator
from truegate.cache.radix import PrefixTree


def test_a_page_given_back_twice_is_refused():
    allocator = PageAllocator(4)
    pages = allocator.take(2)
    allocator.give(pages)
    with pytest.raises(RuntimeError, match="twice"):
        allocator.give(pages[:1])


def test_page_zero_is_never_handed_out():
    allocator = PageAllocator(6)
    assert sorted(allocator.take(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="free"):
        allocator.take(1)


def test_match_returns_the_longest_cached_prefix_in_whole_pages():
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, page_size=2)
    tokens = [1, 2, 3, 4, 5]
    tree.extend(tree.root, tokens, allocator.take(2), 5)
    assert tree.match([1, 2, 3, 4, 9, 9], 6).depth == 2
    assert tree.match([1, 2, 3, 9], 4).depth == 1
    assert tree.match([1, 2, 3, 4], 3).depth == 1  # a limit inside a page leaves the page out
    assert tree.match([2, 1], 2) is tree.root


def test_extend_keeps_the_first_page_of_equal_tokens_and_returns_the_second():
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, page_size=2)
    first, second = allocator.take(2), allocator.take(2)
    tree.extend(tree.root, [1, 2, 3, 4], first, 4)
    free = allocator.num_free
    pages = list(second)
    tree.extend(tree.root, [1, 2, 7, 8], pages, 4)
    assert pages == [first[0], second[1]]
    assert allocator.num_free == free + 1
    assert tree.num_nodes == 3


def test_eviction_takes_the_least_recently_used_leaf_and_never_a_locked_path():
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, page_size=1)
    old = tree.extend(tree.root, [1, 2], allocator.take(2), 2)
    new = tree.extend(tree.root, [3, 4], allocator.take(2), 2)
    tree.match([1, 2], 2)  # now the other one is older
    assert tree.evict(1) == 1
    assert tree.match([3, 4], 2).depth == 1
    tree.lock(old)
    assert tree.num_evictable == 1
    assert tree.evict(10) == 1
    assert new.parent is None
    assert tree.match([1, 2], 2) is old


def test_random_use_keeps_counts_and_returns_every_page():
    rng = random.Random(5)
    for _ in range(200):
        size = rng.randint(1, 3)
        allocator = PageAllocator(40)
        tree = PrefixTree(allocator, size)
        locked = []
        for _ in range(60):
            action = rng.random()
            if action < 0.5 and allocator.num_free + tree.num_evictable >= 8:
                tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 6) * size)]
                node = tree.match(tokens, len(tokens))
                tree.lock(node)
                needed = len(tokens) // size - node.depth
                tree.evict(max(0, needed - allocator.num_free))
                if needed > allocator.num_free:
                    tree.unlock(node)
                    continue
                pages = tree.pages(node) + allocator.take(needed)
                deeper = tree.extend(node, tokens, pages, len(tokens))
                tree.relock(node, deeper)
                assert tree.pages(deeper) == pages
                locked.append(deeper)
            elif action < 0.8 and locked:
                tree.unlock(locked.pop(rng.randrange(len(locked))))
            else:
                expected = tree.num_evictable
                wanted = rng.randint(0, 5)
                assert tree.evict(wanted) == min(wanted, expected)
            assert allocator.num_free + tree.num_nodes == allocator.num_pages
            assert len(tree._leaves) <= tree.num_nodes + 1
        for node in locked:
            tree.unlock(node)
        assert tree.num_locked == 0
        tree.clear()
        assert allocator.num_free == allocator.num_pages

"""The prefix cache: a tree of full pages, keyed by the tokens they hold.

Invariant: a node's page holds the keys and values of exactly its tokens at exactly that prefix. Only a leaf that nobody
locks can be evicted, least recently used first; a lock on a node holds its whole path.
A node is one page, so matching never splits: a radix tree whose edges are all page_size tokens long.
"""

import heapq
from collections.abc import Sequence
from itertools import count

from truegate.cache.pages import PageAllocator


class Node:
    """One cached page under its parent's prefix."""

    __slots__ = ("children", "depth", "key", "locks", "page", "parent", "queued", "used")

    def __init__(self, parent: "Node | None", key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages from the root to here
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.used = 0  # a clock of uses, not of seconds
        self.queued = False  # has its one entry in the eviction heap


class PrefixTree:
    """Pages by token prefix; gives its own pages back to the allocator when it evicts."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.root = Node(None, (), 0)
        self.num_nodes = 0
        self.num_locked = 0
        self._clock = count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # (used, tie, leaf): may be stale, so checked when popped

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free: a lock holds its whole path, so every unlocked node can go in its turn."""
        return self.num_nodes - self.num_locked

    def match(self, token_ids: Sequence[int], limit: int) -> Node:
        """The deepest node whose prefix `token_ids` starts with, at most `limit` tokens deep."""
        node, size, now = self.root, self.page_size, next(self._clock)
        for start in range(0, limit - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            child.used = now
            node = child
        return node

    def pages(self, node: Node) -> list[int]:
        """The pages of the path to `node`, from the first token on."""
        pages = []
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]

    def extend(self, node: Node, token_ids: Sequence[int], pages: list[int], num_tokens: int) -> Node:
        """Cache the full pages of the first `num_tokens` tokens below `node`, which they start with.

        The tree takes over the pages it did not have. Where it already held the same tokens, its own page replaces
        the caller's in `pages` (in place) and the caller's goes back to the allocator.
        """
        size, now = self.page_size, next(self._clock)
        for index in range(node.depth, num_tokens // size):
            key = tuple(token_ids[index * size : (index + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = Node(node, key, pages[index])
                node.children[key] = child
                self.num_nodes += 1
                child.used = now
                self._push(child)
            elif child.page != pages[index]:
                self.allocator.give([pages[index]])
                pages[index] = child.page
            child.used = now
            node = child
        return node

    def lock(self, node: Node) -> None:
        while node.parent is not None:
            if node.locks == 0:
                self.num_locked += 1
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        leaf = node
        while node.parent is not None:
            if node.locks == 0:
                raise RuntimeError(f"page {node.page} was unlocked twice")
            node.locks -= 1
            if node.locks == 0:
                self.num_locked -= 1
            node = node.parent
        self._push(leaf)

    def relock(self, old: Node, new: Node) -> None:
        """Move a lock from a node to one below it."""
        while new is not old:
            if new.parent is None:
                raise RuntimeError("a lock can only move downwards")
            if new.locks == 0:
                self.num_locked += 1
            new.locks += 1
            new = new.parent

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, least recently used leaves first; returns how many."""
        freed: list[int] = []
        while len(freed) < num_pages and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.locks or node.children:
                continue  # held, or no leaf any more: whoever changes that pushes it again
            if node.used != used:
                self._push(node)  # used since: back in its new place
                continue
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            self.num_nodes -= 1
            freed.append(node.page)
            if not parent.children:
                self._push(parent)
        self.allocator.give(freed)
        return len(freed)

    def clear(self) -> int:
        """Drop everything nobody holds."""
        return self.evict(self.num_evictable)

    def _push(self, node: Node) -> None:
        if node.parent is not None and not node.queued and not node.children and not node.locks:
            node.queued = True
            heapq.heappush(self._leaves, (node.used, next(self._clock), node))

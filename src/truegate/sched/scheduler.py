"""Who computes what in the next step.

Laws: every running sequence gets at least one row of every step, the rest of the token budget goes to prefills, oldest
first; admission is first come, first served; when pages run out the youngest running sequence gives up its place
(its tokens are kept and recomputed), so the oldest always advances and none starves; what a sequence holds
(pages, a lock, a slot) returns when it finishes, is cancelled or is preempted.
"""

from bisect import insort
from dataclasses import dataclass

from truegate.cache.pages import PageAllocator, PageTable
from truegate.cache.radix import Node, PrefixTree
from truegate.sched.sequence import Sequence, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The scheduler's share of the engine's config."""

    num_pages: int  # page 0 included
    page_size: int
    max_running: int
    max_model_len: int
    token_budget: int
    prefix_cache: bool = True


@dataclass(slots=True)
class Chunk:
    """Rows start..start+size-1 of one sequence in one step; `samples` when they reach the end of what is known."""

    sequence: Sequence
    start: int
    size: int
    samples: bool


def by_order(sequence: Sequence) -> int:
    return sequence.order


class Scheduler:
    """Waiting and running sequences, their pages, and the prefix cache."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.allocator = PageAllocator(limits.num_pages)
        self.tree = PrefixTree(self.allocator, limits.page_size)
        max_pages = -(-limits.max_model_len // limits.page_size)
        self.max_running = min(limits.max_running, limits.token_budget)  # so that each can have its one row
        self.table = PageTable(self.max_running, max_pages)
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.query_tokens = 0
        self.hit_tokens = 0

    @property
    def num_available(self) -> int:
        return self.allocator.num_free + self.tree.num_evictable

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=by_order)

    def next_fits(self) -> bool:
        """True if every running sequence can have its next row without preemption, so that nothing need be known."""
        size = self.limits.page_size
        needed = sum(len(one.pages) * size <= one.num_computed for one in self.running if one.length < one.max_length)
        return needed <= self.num_available

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, in order of arrival; call `launched` once they are."""
        for sequence in self.running[:]:
            if sequence.status is Status.RUNNING and sequence.length < sequence.max_length:
                self._make_room(sequence)
        active = [one for one in self.running if one.num_computed < one.length < one.max_length]
        budget = self.limits.token_budget - len(active)
        chunks = []
        for sequence in active:
            rest = sequence.length - sequence.num_computed
            size = min(rest, 1 + budget)
            budget -= size - 1
            chunks.append(Chunk(sequence, sequence.num_computed, size, size == rest))
        return self._admit(chunks, budget) if self.waiting and budget > 0 else chunks

    def launched(self, chunks: list[Chunk]) -> None:
        """Count the chunks as computed (whatever runs later on the device sees them) and share their full pages."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.start + chunk.size
            if chunk.size > 1:
                self._share(sequence)
            if chunk.samples:
                sequence.in_flight += 1

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its full pages stay in the prefix cache."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.status = Status.FINISHED

    def _make_room(self, sequence: Sequence) -> None:
        """Give a running sequence the page of its next row, preempting from the youngest end if there is none."""
        if sequence.num_computed < len(sequence.pages) * self.limits.page_size:
            return
        while not self.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return
        self._grow(sequence, 1)

    def _grow(self, sequence: Sequence, count: int) -> None:
        shortage = count - self.allocator.num_free
        if shortage > 0:
            self.tree.evict(shortage)
        pages = self.allocator.take(count)
        self.table.write(sequence.slot, len(sequence.pages), pages)
        sequence.pages += pages

    def _admit(self, chunks: list[Chunk], budget: int) -> list[Chunk]:
        """Start waiting sequences, oldest first, while slots, pages and budget last."""
        size = self.limits.page_size
        index = 0
        while index < len(self.waiting) and budget > 0 and len(self.running) < self.max_running:
            sequence = self.waiting[index]
            if sequence.leader is not None and self._leader_is_early(sequence.leader):
                index += 1  # its prompt will be in the prefix cache in a step or two
                continue
            node = self.tree.match(sequence.tokens, self._match_limit(sequence))
            self.tree.lock(node)
            needed = -(-len(sequence.tokens) // size) - node.depth
            if self.running and needed + len(self.running) > self.num_available:  # leave each running one a page
                self.tree.unlock(node)
                break
            self.waiting.pop(index)
            self._start(sequence, node, needed)
            rest = len(sequence.tokens) - sequence.num_computed
            rows = min(rest, budget)
            budget -= rows
            chunks.append(Chunk(sequence, sequence.num_computed, rows, rows == rest))
        return chunks

    def _start(self, sequence: Sequence, node: Node, needed: int) -> None:
        sequence.node = node
        sequence.status = Status.RUNNING
        sequence.slot = self.table.take_slot()
        sequence.pages = self.tree.pages(node)
        self.table.write(sequence.slot, 0, sequence.pages)
        self._grow(sequence, needed)
        sequence.num_computed = node.depth * self.limits.page_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
            self.query_tokens += sequence.prompt_length
            self.hit_tokens += sequence.num_computed
        insort(self.running, sequence, key=by_order)

    def _leader_is_early(self, leader: Sequence) -> bool:
        return (
            self.limits.prefix_cache
            and leader.status is not Status.FINISHED
            and leader.num_computed < leader.prompt_length
        )

    def _match_limit(self, sequence: Sequence) -> int:
        """Tokens a prefix hit may cover: one row must run, and prompt log-probabilities, if wanted, must be read."""
        if not self.limits.prefix_cache:
            return 0
        if sequence.params.prompt_logprobs is not None and sequence.num_output == 0:
            return 0
        return len(sequence.tokens) - 1

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.in_flight:
            raise RuntimeError(f"{sequence.request_id} cannot be preempted: its last token has not been read")
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        self.preemptions += 1
        insort(self.waiting, sequence, key=by_order)

    def _share(self, sequence: Sequence) -> None:
        """Put the full pages computed so far into the prefix cache and hold them there."""
        known = min(sequence.num_computed, len(sequence.tokens))
        if not self.limits.prefix_cache or known // self.limits.page_size <= sequence.node.depth:
            return
        start = sequence.node.depth
        node = self.tree.extend(sequence.node, sequence.tokens, sequence.pages, known)
        self.table.write(sequence.slot, start, sequence.pages[start : node.depth])
        self.tree.relock(sequence.node, node)
        sequence.node = node

    def _release(self, sequence: Sequence) -> None:
        self._share(sequence)
        self.tree.unlock(sequence.node)
        self.allocator.give(sequence.pages[sequence.node.depth :])
        self.table.give_slot(sequence.slot)
        sequence.node, sequence.pages, sequence.slot, sequence.num_computed = None, [], -1, 0

# SPDX-License-Identifier: Apache-2.0
"""For trees.py: trees of drafts, the best of a size by Sequoia's dynamic programme, and what texts accept.

A node is a path of ranks: (1, 2) is the second likeliest token after the likeliest one. Sequoia (arXiv
2402.12374) supposes that the child of rank k stands with
probability p_k wherever its parent stands. `replay` supposes nothing: it takes the ranks that the text had.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean as mean

Node = tuple[int, ...]


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens after the last verified one, which is the root and none of them.

    Args:
        nodes: with each node its ancestors.
    """

    nodes: frozenset[Node]

    @classmethod
    def chain(cls, size: int) -> "TokenTree":
        """The likeliest token after the likeliest: what is drafted without trees."""
        return cls(frozenset((1,) * depth for depth in range(1, size + 1)))

    @property
    def size(self) -> int:
        """Positions that are verified beside the root's."""
        return len(self.nodes)

    @property
    def depth(self) -> int:
        """Draft passes, one for every level."""
        return max(map(len, self.nodes), default=0)

    @property
    def widths(self) -> list[int]:
        """Positions that each draft pass reads: the nodes of a level, the root's first, with children."""
        parents = {node[:-1] for node in self.nodes}
        return [sum(len(parent) == level for parent in parents) for level in range(self.depth)]

    def expected_tokens(self, acceptance: Sequence[float]) -> float:
        """F(T): tokens of a round, the target's own included, if p_k is the same everywhere.

        Args:
            acceptance: p_1, p_2, ...
        """
        return 1 + sum(prod(acceptance[rank - 1] for rank in node) for node in self.nodes)

    def accepted(self, ranks: Iterable[int]) -> int:
        """Drafts that stand.

        Args:
            ranks: of the target's tokens, each among the draft's candidates after those before it; a number
                that no node has (0) is a token that was no candidate.
        """
        node: Node = ()
        for rank in ranks:
            if (*node, rank) not in self.nodes:
                break
            node = (*node, rank)
        return len(node)


class SequoiaTrees:
    """The best trees for one acceptance vector.

    c(n, d), the most that a tree of n positions, its root included, and d levels below it can expect, is
    1 plus the best division of n - 1 positions among its children: p_1 c(a_1, d - 1) + p_2 c(a_2, d - 1) +
    ... Children are met one after the other, as in a knapsack.

    Args:
        acceptance: p_1, p_2, ...; as many ranks are tried.
        max_size: drafts of a tree.
        max_depth: levels of drafts.
    """

    def __init__(self, acceptance: Sequence[float], max_size: int, max_depth: int) -> None:
        self._num_ranks = len(acceptance)
        # By depth and positions: c; by depth, rank and positions: what the child of that rank gets.
        self._values = [[0.0] + [1.0] * (max_size + 1)]
        self._shares: list[list[list[int]]] = [[]]
        for _ in range(max_depth):
            below = self._values[-1]
            # [positions] what the children of this rank and all after it can expect.
            rest = [0.0] * (max_size + 1)
            shares = []
            for chance in reversed(acceptance):
                choices = [
                    max((chance * below[own] + rest[all_ - own], -own) for own in range(all_ + 1))
                    for all_ in range(max_size + 1)
                ]
                rest = [value for value, _ in choices]
                shares.append([-own for _, own in choices])
            self._values.append([0.0] + [1 + value for value in rest])
            self._shares.append(shares[::-1])

    def expected_tokens(self, size: int, depth: int) -> float:
        """Of the best tree of at most `size` drafts and `depth` levels, the target's own token included."""
        return self._values[depth][size + 1]

    def tree(self, size: int, depth: int) -> TokenTree:
        """The best tree of at most `size` drafts and `depth` levels."""
        return TokenTree(frozenset(self._nodes((), size, depth)))

    def _nodes(self, parent: Node, size: int, depth: int) -> Iterator[Node]:
        """Below a node that has `size` drafts and `depth` levels to give away."""
        if not depth:
            return
        for rank in range(1, self._num_ranks + 1):
            own = self._shares[depth][rank - 1][size]
            if own:
                yield (*parent, rank)
                yield from self._nodes((*parent, rank), own - 1, depth - 1)
            size -= own


def likeliest_tree(reached: Mapping[Node, float], size: int, depth: int) -> TokenTree:
    """The best tree without Sequoia's assumption.

    Args:
        reached: how often the target's tokens went along a path, of all paths that they went.
        size: drafts.
        depth: levels.
    """
    # A path is reached at least as often as one that goes on from it, and sorts before it.
    paths = sorted((-count, path) for path, count in reached.items() if 1 <= len(path) <= depth)
    return TokenTree(frozenset(path for _, path in paths[:size]))


Text = Sequence[Sequence[int]]  # by the place where a round may begin: ranks by depth


def rounds_of(text: Text, tree: TokenTree, *, follow: bool) -> Iterator[tuple[int, int]]:
    """Places where rounds begin, and their tokens.

    Args:
        text: the ranks, as for `TokenTree.accepted`.
        tree: that is drafted.
        follow: each round begins where the one before it ended; else one begins at every place.
    """
    place = 0
    while place < len(text):
        tokens = tree.accepted(text[place]) + 1
        yield place, tokens
        place += tokens if follow else 1


def replay(texts: Iterable[Text], tree: TokenTree, *, follow: bool) -> float:
    """Tokens per round; see `rounds_of`."""
    return mean(tokens for text in texts for _, tokens in rounds_of(text, tree, follow=follow))

"""Which sequences share a micro-batch, and which rank runs it: bin packing by tokens, balanced by predicted cost.

Pure arithmetic on lengths, without torch: every rank computes the same plan from the batch header, without talking.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.flops import layer_parameters

# Ranks are levelled until the costliest exceeds the mean by this much; below it a step is lost in the noise of kernels.
_TOLERANCE = 0.01
# Whatever the lengths, levelling takes at most this many attempts and two for each part, and an attempt looks at this
# many micro-batches of each of two parts and at this many sequences of each of those: a few milliseconds at most.
_ATTEMPTS = 512
_BINS_SEEN, _ITEMS_SEEN = 6, 12

_Bin = list[int]
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class CostModel:
    """What a packed sequence costs to train on, in units of one token without attention.

    `quadratic_length` is the length in tokens at which causal attention costs as much as everything else.
    """

    quadratic_length: float

    def cost(self, lengths: NDArray[Any]) -> NDArray[np.float64]:
        """length + length^2 / quadratic_length of each sequence; float64, the shape of `lengths` (tokens)."""
        tokens = lengths.astype(np.float64)
        return tokens + tokens * tokens / self.quadratic_length

    @classmethod
    def of(cls, arch: Architecture) -> "CostModel":
        """The model's own ratio of attention to weights, from floating-point operations.

        Of a layer's forward pass over a sequence of n tokens,

        - the products with the weights cost 2 P n, P being the weights that a token meets (`layer_parameters`);
        - causal attention costs heads x (head_dim + value_dim) x n^2: Q K^T takes 2 heads x head_dim x n^2 and its
          softmax times V 2 heads x value_dim x n^2, of which the mask leaves half.

        Both are equal at n = 2 P / (heads x (head_dim + value_dim)). The backward pass doubles both and changes
        nothing. The vocabulary's projection, once per model rather than per layer, is left out, and so is the router.
        """
        return cls(2 * layer_parameters(arch) / (arch.num_heads * (arch.head_dim + arch.value_dim)))


def plan_micro_batches(
    lengths: Sequence[int] | NDArray[Any], *, ranks: int, budget: int, cost: CostModel, multiple: int = 1
) -> list[list[list[int]]]:
    """Pack sequences into micro-batches and deal these to the data-parallel ranks.

    All ranks get the same number of micro-batches, else they would wait for each other for ever; it is the smallest
    that the packing reaches, in nearly all cases ceil(tokens / (budget x ranks)). The summed cost of every rank is
    about the same, and so is that of the i-th micro-batches of all ranks, where expert-parallel ranks meet in each
    layer. The plan depends on the arguments alone: it is the same on every machine.

    Args:
        lengths: tokens of each sequence, as they count against `budget` (alignment included).
        ranks: data-parallel size.
        budget: most tokens of a micro-batch.
        cost: what is balanced.
        multiple: the number of micro-batches per rank is a multiple of this (interleaved pipelines need it).

    Returns:
        `plan[rank][i]`: ascending indices into `lengths`. Every index stands once; micro-batches stand by decreasing
        cost and may be empty where there are too few sequences.

    Raises:
        ValueError: if a sequence alone exceeds the budget.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if tokens.size and tokens.max() > budget:
        raise ValueError(f"a sequence of {tokens.max()} tokens does not fit in a micro-batch of {budget}")
    # Whole numbers, whose sums are the same in any order and on any machine.
    costs = np.rint(cost.cost(tokens)).astype(np.int64)
    ranked = _deal(_pack(tokens, costs, ranks, budget, multiple), costs, ranks)
    _level(ranked, costs, tokens, target=(1 + _TOLERANCE) * float(costs.sum()) / ranks, budget=budget)
    return [sorted((sorted(bin_) for bin_ in rank), key=lambda b: (-int(costs[b].sum()), b)) for rank in ranked]


def first_fit(tokens: _Ints, budget: int) -> list[list[int]]:
    """First-fit decreasing: the longest first, each into the first micro-batch with room for it.

    Args:
        tokens: int64 [R], none above `budget`.
        budget: most tokens of a micro-batch.

    Returns:
        The micro-batches, at most 11/9 x + 6/9 of them where x would do (Dósa, "The Tight Bound of First Fit Decreasing
        Bin-Packing Algorithm", 2007).
    """
    room = np.full(len(tokens), budget)
    bins: list[_Bin] = []
    for item in np.argsort(-tokens, kind="stable").tolist():
        place = int((room[: len(bins) + 1] >= tokens[item]).argmax())
        if place == len(bins):
            bins.append([])
        bins[place].append(item)
        room[place] -= tokens[item]
    return bins


def _pack(tokens: _Ints, costs: _Ints, ranks: int, budget: int, multiple: int) -> list[_Bin]:
    """Micro-batches for all ranks, from as many as first-fit needs down to the fewest that can be filled evenly."""
    step = ranks * multiple
    bins = first_fit(tokens, budget)
    most = max(1, -(-len(bins) // step)) * step
    fewest = max(1, -(-int(tokens.sum()) // (budget * step))) * step
    bins += [[] for _ in range(most - len(bins))]
    for count in range(most, fewest - 1, -step):
        even = _fill(tokens, costs, count, budget)
        _level([[bin_] for bin_ in even], tokens, tokens, target=budget, budget=None)
        if max(int(tokens[bin_].sum()) for bin_ in even) > budget:
            break
        bins = even
    return bins


def _fill(tokens: _Ints, costs: _Ints, count: int, budget: int) -> list[_Bin]:
    """`count` micro-batches of even cost: the longest first, each into the cheapest with room, else the roomiest.

    The latter exceeds the budget.
    """
    bins: list[_Bin] = [[] for _ in range(count)]
    room, load = np.full(count, budget), np.zeros(count, np.int64)
    for item in np.argsort(-tokens, kind="stable").tolist():
        fits = room >= tokens[item]
        place = int(np.where(fits, load, np.inf).argmin() if fits.any() else room.argmax())
        bins[place].append(item)
        room[place] -= tokens[item]
        load[place] += costs[item]
    return bins


def _deal(bins: list[_Bin], costs: _Ints, ranks: int) -> list[list[_Bin]]:
    """One micro-batch to each rank per round, by decreasing cost, the costliest of a round to the rank with least."""
    load = [int(costs[bin_].sum()) for bin_ in bins]
    order = sorted(range(len(bins)), key=lambda b: (-load[b], b))
    ranked: list[list[_Bin]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for start in range(0, len(bins), ranks):
        by_total = sorted(range(ranks), key=lambda rank: (total[rank], rank))
        for bin_, rank in zip(order[start : start + ranks], by_total, strict=True):
            ranked[rank].append(bins[bin_])
            total[rank] += load[bin_]
    return ranked


def _level(parts: list[list[_Bin]], weights: _Ints, tokens: _Ints, *, target: float, budget: int | None) -> None:
    """Lower the heaviest part, in place, until it weighs at most `target` or nothing helps.

    Each step exchanges up to two sequences of one of its micro-batches for up to two of another part's, the lightest
    first. With a budget, no micro-batch may come to exceed it.
    """
    load = np.array([sum(weights[bin_].sum() for bin_ in part) for part in parts])
    attempts, moved = _ATTEMPTS + 2 * len(parts), 1
    while attempts > 0 and moved and load[heavy := int(load.argmax())] > target:
        given = _Pieces(parts[heavy], weights, tokens)
        for light in np.argsort(load, kind="stable")[:attempts].tolist():
            attempts -= 1
            taken = _Pieces(parts[light], weights, tokens)
            moved = given.exchange(taken, int(load[heavy] - load[light]), budget)
            if moved:
                load[heavy] -= moved
                load[light] += moved
                break


class _Pieces:
    """What a part can give away in one exchange: none, one or two sequences of one micro-batch."""

    def __init__(self, part: list[_Bin], weights: _Ints, tokens: _Ints) -> None:
        self.pieces = [
            (bin_, piece)
            for bin_ in part[:_BINS_SEEN]
            for size in range(3)
            for piece in itertools.combinations(sorted(bin_, key=lambda i: (-tokens[i], i))[:_ITEMS_SEEN], size)
        ]
        self.weight = np.array([sum(weights[i] for i in piece) for _, piece in self.pieces])
        self.tokens = np.array([sum(tokens[i] for i in piece) for _, piece in self.pieces])
        self.used = np.array([tokens[bin_].sum() for bin_, _ in self.pieces])

    def exchange(self, other: "_Pieces", gap: int, budget: int | None) -> int:
        """Make the exchange that best levels two parts whose weights differ by `gap`.

        Returns:
            How much weight moved to the other part: between 0 and `gap`; 0 if no exchange helps.
        """
        moved = self.weight[:, None] - other.weight[None, :]
        miss = np.abs(moved - gap / 2)
        if budget is not None:
            more = self.tokens[:, None] - other.tokens[None, :]
            miss[(other.used[None, :] + more > budget) | (self.used[:, None] - more > budget)] = np.inf
        mine, theirs = np.unravel_index(int(miss.argmin()), miss.shape)
        if miss[mine, theirs] >= gap / 2:
            return 0
        (from_, given), (to, taken) = self.pieces[mine], other.pieces[theirs]
        from_[:] = [i for i in from_ if i not in given] + list(taken)
        to[:] = [i for i in to if i not in taken] + list(given)
        return int(moved[mine, theirs])

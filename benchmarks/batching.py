"""How full and how even the micro-batch planner's plans are, beside plain greedy packing on the same lengths.

    python benchmarks/batching.py [--seeds 3] [--ranks 16] [--budget 24576]

Lengths are log-normal (median 2,000 tokens, sigma 1.0, cut at 20,480), 8,192 sequences: once as one batch, once as
16 mini-batches of 512, of which the table shows the worst. Greedy is first-fit decreasing, its micro-batches dealt to
the ranks in turn. The columns:

- fill: tokens / (budget x all micro-batches, the empty ones too);
- of bound: fill / the fill with ceil(tokens / (budget x ranks)) micro-batches on each rank, the fewest possible;
- imbalance: predicted cost of the costliest rank / the mean;
- in step: the same if ranks wait for each other after every micro-batch, as expert-parallel ones do;
- time: processor time of planning / that of greedy.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dapo_megatron.trainer.packing import CostModel, first_fit, plan_micro_batches

Ints = NDArray[np.int64]
Planner = Callable[[Ints], list[list[list[int]]]]
MODELS = {"short attention": 8_192, "30B-A3B": 13_824, "7B": 65_024, "32B": 95_232}  # quadratic lengths in tokens


def draw_lengths(seed: int) -> Ints:
    """Tokens of 8,192 sequences, int64."""
    lengths = np.random.default_rng(seed).lognormal(np.log(2000), 1.0, 8192)
    return np.clip(lengths, 1, 20_480).astype(np.int64)


def greedy(lengths: Ints, *, ranks: int, budget: int) -> list[list[list[int]]]:
    """First-fit decreasing, dealt in turn; ranks that come off short get an empty micro-batch."""
    bins = first_fit(lengths, budget)
    bins += [[] for _ in range(-len(bins) % ranks)]
    return [bins[rank::ranks] for rank in range(ranks)]


def measure(plan_of: Planner, lengths: Ints, cost: CostModel, budget: int) -> tuple[float, float, float, float, float]:
    """Fill, fill of bound, imbalance, imbalance in step, and seconds."""
    start = time.process_time()
    plan = plan_of(lengths)
    seconds = time.process_time() - start
    ranks, count, tokens = len(plan), len(plan[0]), int(lengths.sum())
    costs = np.array([[cost.cost(lengths[micro]).sum() for micro in rank] for rank in plan])
    mean = costs.sum() / ranks
    bound = -(-tokens // (budget * ranks))
    return (
        tokens / (budget * ranks * count),
        bound / count,
        costs.sum(axis=1).max() / mean,
        costs.max(axis=0).sum() / mean,
        seconds,
    )


def worst(rows: list[tuple[float, float, float, float, float]]) -> list[float]:
    """The least fill, the largest imbalance, and all the time."""
    fill, of_bound, imbalance, in_step, seconds = zip(*rows, strict=True)
    return [min(fill), min(of_bound), max(imbalance), max(in_step), sum(seconds)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--budget", type=int, default=24_576)
    args = parser.parse_args()
    shape = {"ranks": args.ranks, "budget": args.budget}
    slowest = 0.0
    batches = [draw_lengths(seed) for seed in range(args.seeds)]
    print(f"{'model':16}{'batch':13}{'planner':9}{'fill':>7}{'of bound':>10}{'imbalance':>11}{'in step':>9}{'time':>7}")
    for model, quadratic_length in MODELS.items():
        cost = CostModel(quadratic_length)
        planners = {"greedy": partial(greedy, **shape), "planned": partial(plan_micro_batches, **shape, cost=cost)}
        for name, parts in (("8192", 1), ("16 x 512", 16)):
            baseline = 0.0
            for planner, plan_of in planners.items():
                cut = [part for batch in batches for part in np.split(batch, parts)]
                *figures, seconds = worst([measure(plan_of, part, cost, args.budget) for part in cut])
                baseline, slowest = baseline or seconds, max(slowest, seconds)
                fill, of_bound, imbalance, in_step = (f"{figure:.3f}" for figure in figures)
                print(
                    f"{model:16}{name:13}{planner:9}{fill:>7}{of_bound:>10}{imbalance:>11}{in_step:>9}"
                    f"{seconds / baseline:>6.1f}x"
                )
    print(f"\nslowest: {slowest / args.seeds:.2f} s of processor time for 8,192 sequences, mean of the seeds")


if __name__ == "__main__":
    main()

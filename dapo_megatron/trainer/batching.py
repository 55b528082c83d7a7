"""From a batch of responses to packed micro-batches, the same plan on every rank.

A plan depends on the batch header alone (lengths and groups), so all ranks compute it without talking.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.errors import UserError
from dapo_megatron.trainer.attention import PackedSequences, pack
from dapo_megatron.trainer.build import Targets
from dapo_megatron.types import BatchHeader, Int32, TokenBlock

# Attention's share of a token's cost grows with its sequence: cost = length + length^2 / QUADRATIC_LENGTH.
QUADRATIC_LENGTH = 8192


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer update: `micro_batches[data_rank][i]` lists responses; each rank has the same number of lists."""

    responses: Int32
    micro_batches: list[list[list[int]]]


def plan_batch(
    header: BatchHeader, *, mini_batch: int, data_ranks: int, micro_batch_tokens: int
) -> list[MiniBatchPlan]:
    """Cut a batch into mini-batches of whole groups, and those into micro-batches.

    Args:
        header: the whole batch.
        mini_batch: responses per update; ceil(R / mini_batch) updates, their sizes differing by at most a group.
        data_ranks: data-parallel size.
        micro_batch_tokens: most packed tokens of a micro-batch.

    Raises:
        UserError: if a sequence is longer than a micro-batch may be.
    """
    num_groups = len(header.prompt_lengths)
    updates = -(-header.num_responses // mini_batch)
    plans = []
    for groups in np.array_split(np.arange(num_groups), updates) if num_groups else []:
        responses = np.flatnonzero(np.isin(header.groups, groups)).astype(np.int32)
        plans.append(_plan_mini_batch(header, responses, data_ranks, micro_batch_tokens))
    return plans


def _plan_mini_batch(header: BatchHeader, responses: Int32, data_ranks: int, budget: int) -> MiniBatchPlan:
    lengths = {int(r): int(header.sequence_lengths[r]) for r in responses if header.response_lengths[r] > 0}
    if (longest := max(lengths.values(), default=0)) > budget:
        raise UserError(f"training.micro_batch_tokens ({budget}) must hold the longest sequence, of {longest} tokens")
    costs = {r: n + n * n / QUADRATIC_LENGTH for r, n in lengths.items()}
    shares = _balance(sorted(lengths), costs, data_ranks)
    count = max(1, *(-(-sum(lengths[r] for r in share) // budget) for share in shares))
    while True:  # the first count with which every rank's greedy packing stays within the budget
        bins = [_balance(share, lengths, count) for share in shares]
        if all(sum(lengths[r] for r in micro) <= budget for share in bins for micro in share):
            return MiniBatchPlan(responses, bins)
        count += 1


def _balance(items: Sequence[int], weights: dict[int, float] | dict[int, int], parts: int) -> list[list[int]]:
    """Longest first into the part with the least weight. Deterministic; parts may stay empty."""
    loads = [0.0] * parts
    result: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(items, key=lambda i: (-weights[i], i)):
        lightest = min(range(parts), key=loads.__getitem__)
        loads[lightest] += weights[item]
        result[lightest].append(item)
    return result


@dataclass
class MicroBatch:
    """Packed sequences of one forward pass. n: response tokens; T: packed tokens. Sorted by length.

    A rank that has fewer responses than its peers gets micro-batches without any (n = 0, one token of padding).
    """

    input_ids: Tensor  # int64 [1, T]
    packed: PackedSequences
    targets: Targets  # [n]
    responses: Tensor  # int64 [n] index of each token's response in the batch header
    rollout_log_probs: Tensor  # fp32 [n]
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))  # fp32 [n]
    old_log_probs: Tensor = field(default_factory=lambda: torch.empty(0))  # fp32 [n]; last pipeline stage only


@dataclass
class MiniBatch:
    """This rank's micro-batches of one update; `num_tokens` counts response tokens over all ranks."""

    micro_batches: list[MicroBatch]
    num_tokens: int


@dataclass
class Batch:
    """A rollout batch on one rank: the header of all of it and this rank's packed tokens."""

    header: BatchHeader
    _mini_batches: list[MiniBatch]

    def mini_batches(self) -> Iterator[MiniBatch]:
        """The updates, in order."""
        yield from self._mini_batches

    @property
    def num_updates(self) -> int:
        """How many mini-batches there are."""
        return len(self._mini_batches)

    def micro_batches(self) -> list[MicroBatch]:
        """All micro-batches of this rank, in order."""
        return [micro for mini in self._mini_batches for micro in mini.micro_batches]

    def set_advantages(self, per_response: Tensor) -> None:
        """Give every token its response's advantage. fp32 [R]."""
        for micro in self.micro_batches():
            micro.advantages = per_response.to(micro.responses.device)[micro.responses]

    def set_old_log_probs(self, per_micro_batch: list[Tensor]) -> None:
        """Give every micro-batch what `Policy.log_probs` returned for it, fp32 [n] each."""
        for micro, log_probs in zip(self.micro_batches(), per_micro_batch, strict=True):
            micro.old_log_probs = log_probs


def share_of(plans: list[MiniBatchPlan], data_rank: int) -> Int32:
    """The responses whose tokens a rank needs, int32, ascending."""
    mine = [r for plan in plans for micro in plan.micro_batches[data_rank] for r in micro]
    return np.array(sorted(mine), dtype=np.int32)


def build_batch(
    header: BatchHeader, plans: list[MiniBatchPlan], tokens: TokenBlock, *, data_rank: int, device: torch.device
) -> Batch:
    """Pack this rank's micro-batches. `tokens` holds at least `share_of(plans, data_rank)`."""
    prompts = np.split(tokens.prompt_tokens, np.cumsum(tokens.prompt_lengths)[:-1])
    ends = np.cumsum(tokens.response_lengths)[:-1]
    responses, log_probs = np.split(tokens.response_tokens, ends), np.split(tokens.rollout_log_probs, ends)
    rows = {int(r): (prompts[i], responses[i], log_probs[i]) for i, r in enumerate(tokens.responses)}
    mini_batches = []
    for plan in plans:
        micro = [
            _pack(sorted(m, key=lambda r: (len(rows[r][0]) + len(rows[r][1]), r)), rows, device)
            for m in plan.micro_batches[data_rank]
        ]
        mini_batches.append(MiniBatch(micro, int(header.response_lengths[plan.responses].sum())))
    return Batch(header, mini_batches)


_Row = tuple[np.ndarray, np.ndarray, np.ndarray]


def _pack(members: list[int], rows: dict[int, _Row], device: torch.device) -> MicroBatch:
    """Lay sequences one after the other. The last response token is only a target, never an input."""
    inputs, lengths, index, targets, ids, log_probs = [], [], [], [], [], []
    start = 0
    for r in members:
        prompt, response, rollout = rows[r]
        inputs.append(np.concatenate([prompt, response[:-1]]))
        lengths.append(len(inputs[-1]))
        index.append(start + len(prompt) - 1 + np.arange(len(response)))
        targets.append(response)
        ids.append(np.full(len(response), r))
        log_probs.append(rollout)
        start += lengths[-1]
    if not members:
        inputs, lengths = [np.zeros(1)], [1]

    def tensor(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(joined).to(device=device, dtype=dtype)

    return MicroBatch(
        input_ids=tensor(inputs, torch.long)[None],
        packed=pack(lengths, device),
        targets=Targets(tensor(index, torch.long), tensor(targets, torch.long)),
        responses=tensor(ids, torch.long),
        rollout_log_probs=tensor(log_probs, torch.float32),
    )

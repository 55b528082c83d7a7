"""From a batch of responses to packed micro-batches, the same plan on every rank.

A plan depends on the batch header alone (lengths and groups), so all ranks compute it without talking.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from dapo_megatron.config.precision import packed_alignment, sequence_alignment
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.trainer.attention import local_index, pack
from dapo_megatron.trainer.build import Targets
from dapo_megatron.trainer.device import current_device
from dapo_megatron.trainer.layers import Backend, resolve_backend, te_packed
from dapo_megatron.trainer.packing import CostModel, plan_micro_batches
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.routes import RouterShare
from dapo_megatron.types import BatchHeader, Bool, Int16, Int32, TokenBlock


@dataclass(frozen=True)
class PackingRules:
    """What a layout and a precision ask of packed micro-batches. Tokens are those of a whole context-parallel group."""

    mini_batch: int  # responses per update
    filter_truncated: bool  # responses that the engine cut off contribute no token to the loss
    micro_batch_tokens: int  # most packed tokens of a micro-batch, padding included
    data_ranks: int
    context: int  # ranks that share each sequence
    sequence_multiple: int  # each sequence is padded to a multiple of this
    total_multiple: int  # and each micro-batch to a multiple of this
    count_multiple: int  # of micro-batches per update
    same_length: bool  # pad all micro-batches of a rank to the longest
    cost: CostModel
    backend: Backend  # whose attention reads the packed sequences
    routers: RouterShare | None = None  # where routes are replayed

    @classmethod
    def of(cls, config: Config, arch: Architecture, layout: Layout) -> Self:
        """The rules of a run.

        Interleaved pipelines fill their chunks with groups of one micro-batch per stage, and megatron's exchange of
        shapes before each transfer mixes up its two directions there: their micro-batches are of one length.
        """
        training, parallel = config.training, config.parallel
        interleaved = parallel.virtual_pipeline > 1
        return cls(
            mini_batch=training.mini_batch,
            filter_truncated=config.algorithm.overlong.filter,
            micro_batch_tokens=training.micro_batch_tokens,
            data_ranks=layout.data,
            context=parallel.context,
            sequence_multiple=sequence_alignment(training, parallel),
            total_multiple=packed_alignment(training, parallel),
            count_multiple=parallel.pipeline if interleaved else 1,
            same_length=interleaved,
            cost=CostModel.of(arch),
            backend=resolve_backend(training),
            routers=RouterShare.of(config, arch, layout),
        )

    def padded(self, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Lengths of sequences with their padding."""
        return -(-lengths // self.sequence_multiple) * self.sequence_multiple


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer update: `micro_batches[data_rank][i]` lists responses; each rank has the same number of lists."""

    responses: Int32
    micro_batches: list[list[list[int]]]


def plan_batch(header: BatchHeader, rules: PackingRules) -> list[MiniBatchPlan]:
    """Cut a batch into mini-batches of whole groups, and those into micro-batches.

    R responses make ceil(R / mini_batch) updates, their sizes differing by at most a group. Within one, responses
    are spread over data ranks by predicted cost, not by their number.

    Raises:
        UserError: if a sequence is longer than a micro-batch may be.
    """
    num_groups = len(header.prompt_lengths)
    updates = -(-header.num_responses // rules.mini_batch)
    contributing = contributes(header, rules)
    plans = []
    for groups in np.array_split(np.arange(num_groups), updates) if num_groups else []:
        responses = np.flatnonzero(np.isin(header.groups, groups)).astype(np.int32)
        trained = responses[contributing[responses]]
        lengths = rules.padded(input_lengths(header)[trained])
        if len(lengths) and lengths.max() > rules.micro_batch_tokens:
            raise UserError(
                f"training.micro_batch_tokens ({rules.micro_batch_tokens}) must hold the longest sequence, of "
                f"{lengths.max()} tokens with padding"
            )
        parts = plan_micro_batches(
            lengths,
            ranks=rules.data_ranks,
            budget=rules.micro_batch_tokens,
            cost=rules.cost,
            multiple=rules.count_multiple,
        )
        plans.append(MiniBatchPlan(responses, [[[int(trained[i]) for i in m] for m in rank] for rank in parts]))
    return plans


def contributes(header: BatchHeader, rules: PackingRules) -> Bool:
    """Whether a response has tokens in the loss, bool [R]: not where it is empty, all of it was sampled with weights
    that are too old, or it was cut off and is filtered for that.
    """
    filtered = header.truncated & rules.filter_truncated
    return (header.response_lengths > header.lengths_out_of_loss) & ~filtered


def input_lengths(header: BatchHeader) -> Int32:
    """Tokens of each sequence that enter the model, int32 [R]: the last response token is only a target."""
    return header.sequence_lengths - 1


@dataclass
class MicroBatch:
    """Packed sequences of one forward pass on one rank. T: packed tokens of the context-parallel group, c its size.

    n counts the response tokens in the loss whose log-probs this rank computes. Sequences are sorted by length. A rank
    that has fewer responses than its peers gets micro-batches of padding alone (n = 0).
    """

    input_ids: Tensor  # int64 [1, T / c]
    packed: PackedSeqParams
    total_length: int  # T
    targets: Targets  # [n]
    responses: Tensor  # int64 [n] index of each token's response in the batch header
    batch_responses: int  # R, responses in that header
    places: Tensor  # int64 [n] place of each token in its response
    response_lengths: Tensor  # int64 [n] tokens in the loss of each token's response, on all ranks
    rollout_log_probs: Tensor  # fp32 [n]
    # Where routes are replayed, in host memory; t: tokens that this rank's routers see.
    routed: Tensor = field(default_factory=lambda: torch.empty(0))  # bool [t], whether the token is no padding
    routes: Tensor | None = None  # int16 [t, layers of this rank with experts, k], -1 where the router chooses
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))  # fp32 [n]
    # Of the last pipeline stage only:
    old_log_probs: Tensor = field(default_factory=lambda: torch.empty(0))  # fp32 [n]
    reference_log_probs: Tensor = field(default_factory=lambda: torch.empty(0))  # fp32 [n]; empty without a reference
    old_values: Tensor = field(default_factory=lambda: torch.empty(0))  # fp32 [n] of the critic; empty without one
    returns: Tensor = field(default_factory=lambda: torch.empty(0))  # fp32 [n] that the critic is to predict


@dataclass
class MiniBatch:
    """This rank's micro-batches of one update.

    `num_tokens` counts the response tokens in the loss and `num_responses` the responses that have any, over all ranks.
    """

    micro_batches: list[MicroBatch]
    num_tokens: int
    num_responses: int


@dataclass
class Batch:
    """A rollout batch on one rank: the header of all of it and this rank's packed tokens."""

    header: BatchHeader
    _mini_batches: list[MiniBatch]
    fetch: Callable[[Int32], TokenBlock]  # as of `load_batch`, to load the batch again for a model in another layout

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

    def token_index(self, micro: MicroBatch) -> Tensor:
        """Where a micro-batch's tokens stand among all response tokens of the batch, int64 [n]."""
        lengths = self.header.response_lengths.astype(np.int64)
        starts = torch.from_numpy(np.cumsum(lengths) - lengths).to(micro.places.device)
        return starts[micro.responses] + micro.places

    def pick(self, column: Tensor) -> list[Tensor]:
        """Of a column, [T] for all response tokens of the batch in the header's order, the values for the tokens of
        this rank's micro-batches, [n] each, on their device. The column stays where it is: it may be large.
        """
        return [
            column[self.token_index(micro).to(column.device)].to(micro.places.device) for micro in self.micro_batches()
        ]

    def set_advantages(self, per_response: Tensor) -> None:
        """Give every token its response's advantage. fp32 [R]."""
        for micro in self.micro_batches():
            micro.advantages = per_response.to(micro.responses.device)[micro.responses]

    def set_token_advantages(self, per_token: Tensor) -> None:
        """Give every token its own advantage. fp32 [T], of all response tokens of the batch in the header's order."""
        for micro, advantages in zip(self.micro_batches(), self.pick(per_token), strict=True):
            micro.advantages = advantages

    def set_old_log_probs(self, per_micro_batch: list[Tensor]) -> None:
        """Give every micro-batch what `Policy.log_probs` returned for it, fp32 [n] each."""
        for micro, log_probs in zip(self.micro_batches(), per_micro_batch, strict=True):
            micro.old_log_probs = log_probs

    def set_reference_log_probs(self, per_micro_batch: list[Tensor]) -> None:
        """Give every micro-batch the frozen reference policy's log-probs, fp32 [n] each."""
        for micro, log_probs in zip(self.micro_batches(), per_micro_batch, strict=True):
            micro.reference_log_probs = log_probs

    def set_old_values(self, per_micro_batch: list[Tensor]) -> None:
        """Give every micro-batch the critic's values at the start of the step, fp32 [n] each."""
        for micro, values in zip(self.micro_batches(), per_micro_batch, strict=True):
            micro.old_values = values

    def set_returns(self, per_token: Tensor) -> None:
        """Give every token the return that the critic is to predict. fp32 [T], tokens in the header's order."""
        for micro, returns in zip(self.micro_batches(), self.pick(per_token), strict=True):
            micro.returns = returns

    def rollout_log_probs(self) -> list[Tensor]:
        """What the engine reported of the response tokens, per micro-batch of this rank, fp32 [n] each."""
        return [micro.rollout_log_probs for micro in self.micro_batches()]


def load_batch(header: BatchHeader, rules: PackingRules, layout: Layout, fetch: Callable[[Int32], TokenBlock]) -> Batch:
    """Plan a batch and pack this rank's part of it, on its device.

    `fetch` gets the responses whose tokens this rank needs, int32 and ascending, and returns those, or more.

    Raises:
        UserError: if a sequence is longer than a micro-batch may be.
    """
    plans = plan_batch(header, rules)
    batch = build_batch(
        header,
        plans,
        fetch(share_of(plans, layout.data_rank)),
        rules,
        data_rank=layout.data_rank,
        context_rank=layout.context_rank,
        device=current_device(),
    )
    return replace(batch, fetch=fetch)


def share_of(plans: list[MiniBatchPlan], data_rank: int) -> Int32:
    """The responses whose tokens a rank needs, int32, ascending."""
    mine = [r for plan in plans for micro in plan.micro_batches[data_rank] for r in micro]
    return np.array(sorted(mine), dtype=np.int32)


def build_batch(
    header: BatchHeader,
    plans: list[MiniBatchPlan],
    tokens: TokenBlock,
    rules: PackingRules,
    *,
    data_rank: int,
    context_rank: int,
    device: torch.device,
) -> Batch:
    """Pack this rank's micro-batches. `tokens` holds at least `share_of(plans, data_rank)`."""
    rows = _rows(tokens, header.lengths_out_of_loss)
    lengths = rules.padded(input_lengths(header))

    def total(members: list[int]) -> int:
        return -(-max(1, int(lengths[members].sum())) // rules.total_multiple) * rules.total_multiple

    contributing = contributes(header, rules)
    longest = max((total(m) for plan in plans for m in plan.micro_batches[data_rank]), default=0)
    mini_batches = []
    for plan in plans:
        micro_batches = []
        for members in plan.micro_batches[data_rank]:
            members = sorted(members, key=lambda r: (lengths[r], r))
            packed = _pack(
                [rows[r] for r in members], lengths[members], longest if rules.same_length else total(members)
            )
            micro_batches.append(packed.on_rank(context_rank, rules, header.num_responses, tokens.routes, device))
        trained = plan.responses[contributing[plan.responses]]
        in_loss = (header.response_lengths - header.lengths_out_of_loss)[trained]
        mini_batches.append(MiniBatch(micro_batches, int(in_loss.sum()), len(trained)))
    return Batch(header, mini_batches, lambda _: tokens)


@dataclass(frozen=True)
class _Row:
    """One response with its prompt."""

    response: int
    prompt: Int32
    tokens: Int32
    rollout_log_probs: NDArray[np.float32]
    first: int  # place of the first token in the loss
    start: int  # of the prompt among all tokens of the block


def _rows(tokens: TokenBlock, firsts: Int32) -> dict[int, _Row]:
    prompts = np.split(tokens.prompt_tokens, np.cumsum(tokens.prompt_lengths)[:-1])
    ends = np.cumsum(tokens.response_lengths)[:-1]
    responses, log_probs = np.split(tokens.response_tokens, ends), np.split(tokens.rollout_log_probs, ends)
    lengths = tokens.prompt_lengths.astype(np.int64) + tokens.response_lengths
    columns = zip(  # of nothing, split makes one part
        tokens.responses.tolist(), prompts, responses, log_probs, np.cumsum(lengths) - lengths, strict=False
    )
    return {r: _Row(r, prompt, answer, rollout, int(firsts[r]), int(at)) for r, prompt, answer, rollout, at in columns}


@dataclass(frozen=True)
class _Packed:
    """A whole micro-batch: one entry per token. Tokens that are followed by no response token have the target -1."""

    lengths: list[int]
    inputs: NDArray[np.int64]  # [T]
    origins: NDArray[np.int64]  # [T] of the input among all tokens of the block, prompts included; -1 for padding
    targets: NDArray[np.int64]  # [T]
    responses: NDArray[np.int64]  # [T] of the target
    places: NDArray[np.int64]  # [T] of the target in its response
    response_lengths: NDArray[np.int64]  # [T]
    rollout_log_probs: NDArray[np.float32]  # [T]

    def on_rank(
        self, context_rank: int, rules: PackingRules, batch_responses: int, routes: Int16, device: torch.device
    ) -> MicroBatch:
        """The tokens that one context-parallel rank holds."""
        index = local_index(self.lengths, rules.context, context_rank).numpy()
        packed: PackedSeqParams = (
            te_packed(self.lengths, device)
            if rules.backend == "te"
            else pack(self.lengths, device, cp_size=rules.context, cp_rank=context_rank)
        )
        targets = self.targets[index]
        here = np.flatnonzero(targets >= 0)
        chosen = index[here]

        def tensor(values: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
            return torch.from_numpy(values).to(device)

        micro = MicroBatch(
            input_ids=tensor(self.inputs[index])[None],
            packed=packed,
            total_length=len(self.inputs),
            targets=Targets(tensor(here), tensor(targets[here])),
            responses=tensor(self.responses[chosen]),
            batch_responses=batch_responses,
            places=tensor(self.places[chosen]),
            response_lengths=tensor(self.response_lengths[chosen]),
            rollout_log_probs=tensor(self.rollout_log_probs[chosen]),
        )
        if rules.routers is not None:
            origins = self.origins[rules.routers.seen(index)]
            micro.routed = torch.from_numpy(origins >= 0)
            micro.routes = rules.routers.take(routes, origins, device) if len(routes) else None
        return micro


def _pack(rows: list[_Row], lengths: Int32, total: int) -> _Packed:
    """Lay sequences one after the other, each padded on the right, and what is left as one sequence of padding.

    Padding is a part of its sequence: attention is causal, so nothing real sees it, and it is nobody's target.
    """
    packed = _Packed(
        lengths=[int(n) for n in lengths],
        inputs=np.zeros(total, np.int64),
        origins=np.full(total, -1, np.int64),
        targets=np.full(total, -1, np.int64),
        responses=np.zeros(total, np.int64),
        places=np.zeros(total, np.int64),
        response_lengths=np.zeros(total, np.int64),
        rollout_log_probs=np.zeros(total, np.float32),
    )
    start = 0
    for row, length in zip(rows, packed.lengths, strict=True):
        inputs = np.concatenate([row.prompt, row.tokens[:-1]])
        packed.inputs[start : start + len(inputs)] = inputs
        packed.origins[start : start + len(inputs)] = np.arange(row.start, row.start + len(inputs))
        answer = slice(start + len(row.prompt) - 1 + row.first, start + len(inputs))
        packed.targets[answer] = row.tokens[row.first :]
        packed.responses[answer] = row.response
        packed.places[answer] = np.arange(row.first, len(row.tokens))
        packed.response_lengths[answer] = len(row.tokens) - row.first
        packed.rollout_log_probs[answer] = row.rollout_log_probs[row.first :]
        start += length
    if start < total:
        packed.lengths.append(total - start)
    return packed

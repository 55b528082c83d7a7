"""From losses of tokens to one loss (eq. 12)."""

from typing import Literal, assert_never

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_norm", "sequence_sum"]


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    response_ids: Tensor,
    mode: Aggregation = "token_mean",
    *,
    max_tokens: int | None = None,
    num_tokens: Tensor | int | None = None,
    num_responses: Tensor | int | None = None,
    response_lengths: Tensor | None = None,
) -> Tensor:
    """Reduce losses of tokens to a scalar. Only unmasked tokens, and responses that have one, are in it.

        token_mean         sum over tokens / tokens ("token-level", arXiv 2503.14476, eq. 12)
        sequence_mean      mean over responses of the mean over their tokens (GRPO, arXiv 2402.03300, eq. 3)
        sequence_sum_norm  sum over tokens / (responses x max_tokens) (Dr.GRPO, arXiv 2503.20783)
        sequence_sum       mean over responses of the sum over their tokens (RLOO, arXiv 2402.14740; DPO)

    The keyword arguments describe the whole mini-batch, so that the results of its parts, however it is cut into
    micro-batches or spread over data- and context-parallel ranks, add up to the result of the whole. What is None
    is counted from the tokens given here. Without any token the result is 0.

    Args:
        per_token: floating [T]. Values at masked positions have no effect, even when they are not numbers.
        loss_mask: bool [T].
        response_ids: integer [T], the response of each token; any numbers, in any order, unused where masked.
        mode: see above.
        max_tokens: L_max of `sequence_sum_norm`, in tokens.
        num_tokens: unmasked tokens of the mini-batch.
        num_responses: responses of the mini-batch that have at least one unmasked token.
        response_lengths: integer [T], for each token the unmasked tokens of its response over all
            context-parallel ranks.

    Raises:
        ValueError: for `sequence_sum_norm` without `max_tokens`.
    """
    if mode == "token_mean":
        return _masked_sum(per_token, loss_mask) / _at_least_one(
            loss_mask.sum() if num_tokens is None else num_tokens, per_token
        )
    responses = _at_least_one(
        torch.unique(response_ids[loss_mask]).numel() if num_responses is None else num_responses, per_token
    )
    if mode == "sequence_mean":
        lengths = count_tokens(loss_mask, response_ids) if response_lengths is None else response_lengths
        return _masked_sum(per_token / lengths.clamp(min=1), loss_mask) / responses
    if mode == "sequence_sum":
        return _masked_sum(per_token, loss_mask) / responses
    if mode == "sequence_sum_norm":
        if max_tokens is None:
            raise ValueError("sequence_sum_norm divides by max_tokens, which was not given")
        return _masked_sum(per_token, loss_mask) / (responses * max_tokens)
    assert_never(mode)


def count_tokens(loss_mask: Tensor, response_ids: Tensor) -> Tensor:
    """For each token how many unmasked tokens its response has here, int64 [T]. Takes bool [T] and integer [T]."""
    responses, rows = torch.unique(response_ids, return_inverse=True)
    counts = torch.zeros(len(responses), dtype=torch.int64, device=rows.device).index_add(0, rows, loss_mask.long())
    return counts[rows]


def _masked_sum(values: Tensor, loss_mask: Tensor) -> Tensor:
    return torch.where(loss_mask, values, 0.0).sum()


def _at_least_one(count: Tensor | int, like: Tensor) -> Tensor:
    return torch.as_tensor(count, device=like.device).clamp(min=1)

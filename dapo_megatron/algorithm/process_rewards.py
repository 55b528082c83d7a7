"""Rewards of the steps of a response, beside the reward of the whole: advantages that differ from token to token.

A step ends at a token; S steps of R responses are given as three [S] tensors, in any order: `step_rewards` floating,
`step_responses` (indices into the [R] tensors) and `step_places` (of the step's last token in its response, from 0)
integer. The tokens of a response stand together, responses in order, T in all.
"""

import torch
from torch import Tensor

from dapo_megatron.algorithm.advantage import AdvantageOptions, group_advantages, response_advantages, whitened


def process_advantages(
    step_rewards: Tensor,
    step_responses: Tensor,
    step_places: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    config: AdvantageOptions,
) -> Tensor:
    """Advantage of each token from rewards of steps and of whole responses, floating [T] in the dtype of `rewards`.

    A token is worth what comes after it: with r~ the rewards of steps compared with those of all steps of their group
    by the estimator, as if each step were a response (`group_advantages`),

        A_t = (sum of r~ over the steps of its response that end at t or later) + A of its response

    which is process supervision of arXiv 2402.03300, section 4.1.3, plus the advantage of the outcome
    (`response_advantages`). With `reinforce_pp` it is the return, the sum of the rewards themselves over those steps
    plus that of the response, whitened over the tokens of the batch; with `over: responses` each response counts once,
    its tokens sharing equally. Without steps every estimator gives what `response_advantages` gives.

    Args:
        step_rewards: see the head of this file; so are `step_responses` and `step_places`.
        rewards: floating [R], of whole responses.
        group_ids: integer [R].
        lengths: integer [R], tokens of each response.
        config: estimator and its options.

    Raises:
        ValueError: for `gae`, which compares with a critic: give it `token_rewards`.
    """
    estimator, values, outcome = config.estimator, step_rewards.double(), rewards.double()
    if estimator == "gae":
        raise ValueError("gae takes process rewards as token_rewards")
    if estimator != "reinforce_pp":
        values = group_advantages(values, group_ids[step_responses], estimator, config.std or "sample")
        outcome = response_advantages(outcome, group_ids, lengths, config)
    to_go, members, spans = _to_go(values, step_responses, step_places, lengths)
    advantages = to_go + outcome[members]
    if estimator == "reinforce_pp":
        advantages = whitened(advantages, _weights(spans, members, lengths, config.over == "responses"))
    return advantages.to(rewards.dtype).repeat_interleave(spans)


def token_rewards(step_rewards: Tensor, step_responses: Tensor, step_places: Tensor, lengths: Tensor) -> Tensor:
    """What each token earns by the steps that end at it, floating [T]; 0 for most. `lengths` is integer [R].

    The rewards of whole responses are not in it: `algorithm.advantage.gae` adds them at the last tokens.
    """
    starts = lengths.cumsum(0) - lengths
    total = step_rewards.new_zeros(int(lengths.sum()))
    return total.index_add(0, starts[step_responses] + step_places, step_rewards)


def _to_go(
    values: Tensor, step_responses: Tensor, step_places: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of `values` over a step and the later ones of its response, which hold for all tokens of the step.

    Each response gets one more step, of value 0, that ends with its last token: all tokens then belong to a step. With
    N = S + R, the steps in the order of their tokens:

    Returns:
        sums floating [N], responses integer [N], tokens integer [N] (none for a step that ends where another does).
    """
    count, ends = len(lengths), lengths.cumsum(0)
    members = torch.cat([step_responses, torch.arange(count, dtype=step_responses.dtype, device=ends.device)])
    last = torch.cat([(ends - lengths)[step_responses] + step_places, ends - 1])
    order = torch.argsort(last, stable=True)  # where steps end together, the added one is the last
    values, members, last = torch.cat([values, values.new_zeros(count)])[order], members[order], last[order]
    running = values.cumsum(0)
    spans = torch.diff(last, prepend=last.new_tensor([-1]))
    whole = running[torch.bincount(members, minlength=count).cumsum(0) - 1]  # up to the end of each response
    return whole[members] - running + values, members, spans


def _weights(spans: Tensor, members: Tensor, lengths: Tensor, per_response: bool) -> Tensor:
    """How often each step's value counts in the statistics of a batch, [N]: once a token, or once a response in all.

    A response without tokens consists of the step that was added to it; by responses that counts, too.
    """
    if not per_response:
        return spans
    tokens = lengths[members]
    return torch.where(tokens > 0, spans / tokens.clamp(min=1), 1.0)

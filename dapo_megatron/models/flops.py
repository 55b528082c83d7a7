"""Floating-point operations of a model, from its dimensions and the lengths of sequences. No torch.

Counted are the matrix products, 2 operations for each multiply-add: attention's and the MLPs' weights, the router,
attention itself and the output layer. Norms, rotations, softmax, activations and the embedding's look-up, which make
up a percent or less, are not. These are operations that the model needs: kernels that also compute masked or padded
positions do more.
"""

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.table import parameter_table


def layer_parameters(arch: Architecture) -> float:
    """Weights that a token is multiplied with in one layer, without the router's and the biases.

    The mean of all layers; of the experts `experts_per_token` count.
    """
    return _matrices(arch)[0] / arch.num_layers


@functools.cache
def _matrices(arch: Architecture) -> tuple[int, int]:
    """Weights that a token meets in all layers: of attention and MLPs, and of routers."""
    sizes = {True: 0, False: 0}
    for row in parameter_table(arch):
        if row.layer is None or (row.expert is not None and row.expert >= arch.experts_per_token):
            continue  # experts are alike: the first stand for those that a token is sent to
        sizes[".router." in row.template] += sum(math.prod(shape) for shape in row.rule.hf_shapes if len(shape) == 2)
    return sizes[False], sizes[True]


def forward_flops(arch: Architecture, lengths: NDArray[Any], *, targets: NDArray[Any] | None = None) -> float:
    """Operations of a forward pass over whole sequences.

    A token costs 2 operations per weight it meets. Under the causal mask position i (from 1) attends to i positions:
    Q K^T takes 2 heads x head_dim x i and its softmax times V 2 heads x value_dim x i: with both of one size
    n (n + 1) x 2 heads x head_dim over n tokens.

    Args:
        arch: the model, without its sharding: the count is that of all ranks together.
        lengths: integers [S], tokens of each sequence; none attends to another, packed or not.
        targets: integers [S], tokens of each sequence whose logits are computed; all of them where None.

    Returns:
        Operations (not per second) of all sequences.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    logits = tokens if targets is None else np.asarray(targets, dtype=np.float64)
    weights = 2.0 * sum(_matrices(arch)) * tokens.sum()
    head = arch.head_dim + arch.value_dim
    attention = 1.0 * arch.num_layers * arch.num_heads * head * (tokens * (tokens + 1)).sum()
    output = 2.0 * arch.hidden_size * arch.vocab_size * logits.sum()
    return float(weights + attention + output)


def generation_flops(arch: Architecture, prompt_lengths: NDArray[Any], response_lengths: NDArray[Any]) -> float:
    """Operations of sampling answers token by token, with a cache of keys and values.

    Each answer counts its own prompt, of which only the last token needs logits; its own last token is never fed
    back. A server with prefix caching runs the prompt that a group shares once, and does less than this. An answer
    without tokens was not begun and costs nothing.

    Args:
        arch: the model.
        prompt_lengths: integers [R], tokens of each answer's prompt.
        response_lengths: integers [R], tokens sampled for each answer.

    Raises:
        ValueError: if the two differ in length.
    """
    prompts, responses = np.asarray(prompt_lengths), np.asarray(response_lengths)
    if prompts.shape != responses.shape:
        raise ValueError(f"every answer needs its prompt's length: {prompts.shape} prompts, {responses.shape} answers")
    fed = np.where(responses > 0, prompts + responses - 1, 0)
    return forward_flops(arch, fed, targets=responses)


def training_flops(
    arch: Architecture, lengths: NDArray[Any], *, targets: NDArray[Any] | None = None, recompute: bool = False
) -> float:
    """Operations of a forward and a backward pass: the backward pass takes two products for each one of the forward.

    Args:
        arch: the model.
        lengths: see `forward_flops`.
        targets: see `forward_flops`.
        recompute: the forward pass is done twice (`training.recompute: full`): 4 forward passes in all, not 3.
            Selective recomputation repeats far less and counts as none, and so does the output layer's, whose logits
            `trainer/log_probs.py` always computes again.
    """
    return (4 if recompute else 3) * forward_flops(arch, lengths, targets=targets)

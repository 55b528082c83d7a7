"""Floating-point operations of a model, from its dimensions and the lengths of sequences. No torch.

Counted are the matrix products, 2 operations for each multiply-add: attention's and the MLPs' weights, the router,
attention itself and the output layer. Norms, rotations, softmax, activations and the embedding's look-up, which make
up a percent or less, are not. These are operations that the model needs: kernels that also compute masked or padded
positions do more.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo_megatron.models.architecture import Architecture


def layer_parameters(arch: Architecture) -> int:
    """Weights that a token is multiplied with in one layer, without the router's and the biases.

    The attention's hidden x (2 heads + 2 kv_heads) x head_dim, and 3 hidden x ffn of the SwiGLU MLP, or of each of its
    `experts_per_token` experts.
    """
    attention = arch.hidden_size * 2 * (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    ffn = arch.experts_per_token * arch.expert_ffn_size if arch.num_experts else arch.ffn_size
    return attention + 3 * arch.hidden_size * ffn


def forward_flops(arch: Architecture, lengths: NDArray[Any], *, targets: NDArray[Any] | None = None) -> float:
    """Operations of a forward pass over whole sequences.

    A token costs 2 operations per weight it meets. Under the causal mask position i (from 1) attends to i positions:
    Q K^T and its softmax times V take 2 heads x head_dim x i each, n (n + 1) x 2 heads x head_dim over n tokens.

    Args:
        arch: the model, without its sharding: the count is that of all ranks together.
        lengths: integers [S], tokens of each sequence; none attends to another, packed or not.
        targets: integers [S], tokens of each sequence whose logits are computed; all of them where None.

    Returns:
        Operations (not per second) of all sequences.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    logits = tokens if targets is None else np.asarray(targets, dtype=np.float64)
    per_token = 2.0 * (layer_parameters(arch) + arch.hidden_size * arch.num_experts)
    attention = 2.0 * arch.num_heads * arch.head_dim * (tokens * (tokens + 1)).sum()
    output = 2.0 * arch.hidden_size * arch.vocab_size * logits.sum()
    return float(arch.num_layers * (per_token * tokens.sum() + attention) + output)


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

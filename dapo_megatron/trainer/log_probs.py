"""Log-probabilities and entropy of chosen tokens, over a vocabulary split across tensor-parallel ranks.

Logits exist for one chunk of tokens at a time, forward and backward; a [tokens, vocabulary] fp32 tensor never does.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden W^T / T) at `tokens`, and the entropy of the same distribution.

    Args:
        hidden: [n, H], the same on every rank of `group`; each rank's gradient is its own rows' part of it.
        weight: [V / ranks, H], this rank's rows of the output embedding; rows past `vocab_size` are padding.
        tokens: int64 [n].
        vocab_size: true vocabulary size V.
        temperature: T of the sampling distribution.
        chunk: tokens whose logits exist at the same time.
        group: tensor-parallel group.

    Returns:
        log-probs fp32 [n]; entropy fp32 [n], in nats. Both are differentiable; the backward pass of the log-probs
        alone costs the same as if the entropy were not.
    """
    log_probs, entropy = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, tokens, vocab_size, temperature, chunk, group
    )
    return log_probs, entropy


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        vocab_size: int,
        temperature: float,
        chunk: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * weight.shape[0]
        rows = weight[: max(0, min(weight.shape[0], vocab_size - first))]
        parts = [
            _chunk_log_probs(hidden[i : i + chunk], rows, tokens[i : i + chunk] - first, temperature, group)
            for i in range(0, len(tokens), chunk)
        ]
        if not parts:
            empty = hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
            parts = [(empty, empty, empty)]
        log_probs, entropy, log_sum = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, tokens, log_sum, entropy)
        ctx.rows, ctx.first, ctx.temperature, ctx.chunk = len(rows), first, temperature, chunk
        ctx.set_materialize_grads(False)  # an entropy that no loss uses is then told by None
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, log_sum, entropy = ctx.saved_tensors
        grad = torch.zeros_like(log_sum) if grad is None else grad
        rows = weight[: ctx.rows]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=log_sum.dtype)
        for i in range(0, len(tokens), ctx.chunk):
            part = slice(i, i + ctx.chunk)
            log_p = _logits(hidden[part], rows, ctx.temperature).sub_(log_sum[part, None])
            # d log p_t / d logits = (onehot(t) - p) / T and d H / d logits = -p (log p + H) / T
            scaled = grad[part, None] / ctx.temperature
            if grad_entropy is None:
                d_logits = log_p.exp_().mul_(-scaled)
            else:
                p, per_nat = log_p.exp(), grad_entropy[part, None] / ctx.temperature
                d_logits = log_p.add_(entropy[part, None]).mul_(per_nat).add_(scaled).mul_(p).neg_()
            index, local = _local(tokens[part] - ctx.first, len(rows))
            d_logits.scatter_add_(1, index[:, None], scaled * local[:, None])
            d_logits = d_logits.to(weight.dtype)
            torch.mm(d_logits, rows, out=grad_hidden[part])
            grad_weight[: ctx.rows] += d_logits.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Logits / T in fp32 (fp64 where the model is), [n, rows]."""
    return (hidden @ rows.t()).to(torch.promote_types(hidden.dtype, torch.float32)).div_(temperature)


def _local(tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Row index of each token on this rank (0 where it is elsewhere), and whether it is here."""
    local = (tokens >= 0) & (tokens < rows)
    return torch.where(local, tokens, 0), local


def _chunk_log_probs(
    hidden: Tensor, rows: Tensor, tokens: Tensor, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropy, log-sum-exp), each fp32 [n]. `tokens` are relative to this rank's first row."""
    logits = _logits(hidden, rows, temperature)
    highest = logits.amax(1)
    index, local = _local(tokens, len(rows))
    at_token = logits.gather(1, index[:, None])[:, 0]
    if group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    logits.sub_(highest[:, None])
    weights = logits.exp()
    # [3, n]: sum of exp, sum of exp x logit, logit at the token (from the one rank that has it)
    sums = torch.stack([weights.sum(1), weights.mul_(logits).sum(1), torch.where(local, at_token - highest, 0.0)])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    log_total = sums[0].log()
    return sums[2] - log_total, log_total - sums[1] / sums[0], log_total + highest

"""Log-probabilities of tokens under the sampling distribution, in their plainest form.

This is the definition that the trainer's chunked, vocabulary-parallel computation is tested against.
"""

from torch import Tensor


def log_probs_and_entropy(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each token and the entropy of its distribution, floating [T] each, natural log.

    `logits` is floating [T, V], `tokens` int64 [T]. Both results are of log_softmax(logits / temperature), the
    distribution that was sampled from.
    """
    distribution = (logits / temperature).log_softmax(dim=-1)  # [T, V]
    log_probs = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return log_probs, entropy

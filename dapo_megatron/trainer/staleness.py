"""How old the weights are that a batch's tokens were sampled with, against those that are trained on them."""

from dataclasses import replace

import numpy as np

from dapo_megatron.types import BatchHeader


def with_staleness(header: BatchHeader, version: int, bound: int, limit: int | None) -> BatchHeader:
    """The header of a batch for a policy whose weights are `version`, with the metrics of `staleness`.

    Args:
        header: as sampled.
        version: weight version that the batch is trained from.
        bound: most versions by which a token may be older (`rollout.max_staleness`).
        limit: most versions by which a token in the loss may be older (`max_token_staleness`). None: all are in it.

    Raises:
        RuntimeError: naming step, response and versions, where a token is older than the bound allows, newer than the
            policy, or of unknown weights.
    """
    _check(header, version, bound)
    if limit is not None:
        header = replace(header, oldest_in_loss=version - limit)
    return replace(header, stats=header.stats | staleness(header, version))


def staleness(header: BatchHeader, version: int) -> dict[str, float]:
    """Metrics over the response tokens of a batch; NaN for one without any.

    `staleness` (mean) and `staleness_max` count the versions by which the weights that a token was sampled with are
    older than `version`; `off_policy_tokens` is the share of tokens of which they are older at all, and `stale_masked`
    that of tokens out of the loss for it.
    """
    ages, tokens = version - header.run_versions, header.run_lengths
    total = tokens.sum()
    if not total:
        return dict.fromkeys(("staleness", "staleness_max", "off_policy_tokens", "stale_masked"), np.nan)
    return {
        "staleness": float((ages * tokens).sum() / total),
        "staleness_max": float(ages.max()),
        "off_policy_tokens": float(tokens[ages > 0].sum() / total),
        "stale_masked": float(header.lengths_out_of_loss.sum() / total),
    }


def _check(header: BatchHeader, version: int, bound: int) -> None:
    """Every response's first token is its oldest, the last its newest."""
    oldest = max(0, version - bound)
    first, last = header.versions.T
    wrong = np.flatnonzero((header.response_lengths > 0) & ((first < oldest) | (last > version)))
    if len(wrong):
        r = int(wrong[0])
        raise RuntimeError(
            f"step {header.step}: response {r} (draw {header.draws[header.groups[r]]}) was sampled with weights of the "
            f"versions {first[r]} to {last[r]}; a policy of version {version} is trained on {oldest} to {version} only "
            f"(rollout.max_staleness is {bound})"
        )

"""Whether servers compute what the trainer computes: log-probs of fresh answers, server by server."""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.config.run import Config
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.requests import Generated, RequestError, Sampling, Server
from dapo_megatron.trainer.batching import load_batch
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import gather_by_response, on_rank_zero
from dapo_megatron.types import BatchHeader, Int32, TokenBlock

PROBE_TOKENS, PROBES = 24, 4
TIMEOUT = 300.0
# fp32: largest difference of a log-prob. Anything less exact: mean difference, in the first probe, and against that.
FP32_LIMIT, FIRST_LIMIT, BF16_FACTOR, BF16_FLOOR = 1e-4, 0.3, 1.5, 0.02


@dataclass(frozen=True)
class Gap:
    """Absolute difference of a server's log-probs from the trainer's, over the tokens of a probe."""

    mean: float
    largest: float


class Probe:
    """Compares servers with `policy`. All ranks call the same methods."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self._policy = policy
        self._exact = config.training.precision == "fp32" and config.fleet.dtype == "float32"
        self._prompt = range(min(PROBE_TOKENS, policy.arch.vocab_size))  # any tokens will do
        self._sampling = Sampling(PROBE_TOKENS, config.rollout.temperature, ignore_eos=True)

    def gaps(self, servers: Sequence[Server], version: int) -> dict[str, Gap]:
        """The gap of each server, by id, under the weights `version`; one that does not answer is left out.

        Raises:
            RuntimeError: if a server answers with other weights.
        """
        answers = on_rank_zero(lambda: asyncio.run(self._ask(servers, version)))
        ours = self._score([answer for group in answers.values() for answer in group])

        def compare() -> dict[str, Gap]:
            found, number = {}, 0
            for id, group in answers.items():
                mine = torch.cat([ours[number + i] for i in range(len(group))])
                theirs = torch.from_numpy(np.concatenate([answer.log_probs for answer in group]))
                difference = (mine - theirs).abs()
                found[id] = Gap(float(difference.mean()), float(difference.max()))
                number += len(group)
            return found

        return on_rank_zero(compare) if answers else {}

    def check(self, gaps: Mapping[str, Gap], before: float | None) -> None:
        """Judge the gaps after a push; `before` is the largest mean gap of the first probe, None if this is it.

        Raises:
            RuntimeError: naming the server and the difference, if one does not compute with the weights it was sent.
        """
        limit = FIRST_LIMIT if before is None else max(BF16_FLOOR, BF16_FACTOR * before)
        for id, gap in gaps.items():
            if self._exact and not gap.largest <= FP32_LIMIT:
                difference = f"up to {gap.largest:.1e} (limit {FP32_LIMIT:.0e})"
            elif not self._exact and not gap.mean <= limit:
                difference = f"{gap.mean:.3f} on average (limit {limit:.3f})"
            else:
                continue
            raise RuntimeError(
                f"after a push the log-probs of server {id} differ from the trainer's by {difference}: it does not "
                "compute with the weights that were sent"
            )

    async def _ask(self, servers: Sequence[Server], version: int) -> dict[str, list[Generated]]:
        replies = await asyncio.gather(*(self._ask_one(server, version) for server in servers))
        return {server.id: reply for server, reply in zip(servers, replies, strict=True) if reply}

    async def _ask_one(self, server: Server, version: int) -> list[Generated]:
        """PROBES answers of a server; none if it fails."""
        async with ServerClient(server.url, server.token, TIMEOUT, self._policy.arch.vocab_size) as client:
            requests = [
                client.generate(self._prompt, self._sampling, f"probe-{uuid.uuid4().hex}", version=version)
                for _ in range(PROBES)
            ]
            try:
                answers = await asyncio.gather(*requests)
            except RequestError:
                return []
        for answer in answers:
            if (answer.versions != version).any():
                found = np.unique(answer.versions).tolist()
                raise RuntimeError(f"server {server.id} has weights {found} after the push of version {version}")
        return answers

    def _score(self, answers: Sequence[Generated]) -> dict[int, Tensor]:
        """The trainer's log-probs of each answer, on the CPU; complete on every rank."""
        prompt, count = self._prompt, len(answers)
        if not count:
            return {}
        lengths = np.array([len(answer.token_ids) for answer in answers], np.int32)
        header = BatchHeader(
            step=0,
            groups=np.zeros(count, np.int32),
            draws=np.zeros(1, np.int32),
            prompt_ids=np.zeros(1, np.int32),
            prompt_lengths=np.array([len(prompt)], np.int32),
            response_lengths=lengths,
            rewards=np.zeros(count, np.float32),
            correct=np.zeros(count, bool),
            truncated=np.zeros(count, bool),
        )
        packing = self._policy.packing
        longest = int(packing.padded(np.array([len(prompt) + PROBE_TOKENS], np.int32))[0])
        budget = max(packing.micro_batch_tokens, -(-longest // packing.total_multiple) * packing.total_multiple)
        packing = replace(packing, mini_batch=count, micro_batch_tokens=budget)

        def tokens_of(members: Int32) -> TokenBlock:
            return TokenBlock(
                responses=members,
                prompt_lengths=np.full(len(members), len(prompt), np.int32),
                response_lengths=lengths[members],
                prompt_tokens=np.tile(np.array(prompt, np.int32), len(members)),
                response_tokens=_joined([answers[r].token_ids for r in members], np.int32),
                rollout_log_probs=_joined([answers[r].log_probs for r in members], np.float32),
            )

        batch = load_batch(header, packing, self._policy.layout, tokens_of)
        return gather_by_response(batch.micro_batches(), self._policy.log_probs(batch))


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)

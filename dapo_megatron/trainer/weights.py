"""The policy's weights on their way to the servers, and the proof that they arrived (law 3)."""

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.config.run import Config
from dapo_megatron.models.table import exact_tensors, hf_shapes
from dapo_megatron.rollout.client import Generated, ServerClient
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.sync.sender import WeightSender
from dapo_megatron.trainer import device
from dapo_megatron.trainer.batching import load_batch
from dapo_megatron.trainer.build import local_rows
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import gather_by_response, on_rank_zero
from dapo_megatron.types import BatchHeader, Int32, TokenBlock

# One server: base URL and token.
Server = tuple[str, str]

NOISE = 0.1  # of each parameter's own standard deviation
PROBE_TOKENS, PROBES = 24, 4
# fp32: largest difference of a log-prob. bf16: mean difference, against that before the noise.
FP32_LIMIT, BF16_FACTOR, BF16_FLOOR = 1e-4, 1.5, 0.02


class WeightSync:
    """Pushes the policy's weights from rank 0 to every server. All ranks call the same methods.

    Args:
        config: the run's configuration.
        policy: whose weights are pushed.
        servers: the servers; an empty list (a replayed run) makes every push do nothing.
    """

    def __init__(self, config: Config, policy: Policy, servers: Sequence[Server]) -> None:
        self._config, self._policy, self._servers = config, policy, list(servers)
        self._plan = list(hf_shapes(policy.arch).items())
        self._sender: WeightSender | None = None
        if servers and policy.layout.rank == 0:
            self._sender = WeightSender(
                servers,
                host=config.fleet.host,
                bucket_bytes=int(config.fleet.bucket_mb * (1 << 20)),
                dtype=getattr(torch, config.fleet.dtype),
                timeout=config.fleet.push_timeout,
                backend=device.backend(),
                exact=exact_tensors(policy.arch),
            )
            self._sender.connect()

    def push(self, version: int) -> None:
        """Give every server the current weights as `version`; hashes compared, prefix caches reset.

        Raises:
            ServerError: on rank 0, naming the server that failed.
        """
        if not self._servers or not self._policy.layout.sends_weights:
            return
        tensors = self._policy.export()
        if self._sender is not None:
            self._sender.push(tensors, self._plan, version)
        else:
            for _ in tensors:  # take part in the gathering of each parameter
                pass

    def verify(self, version: int) -> None:
        """Prove that pushes change what the servers compute: push noisy weights twice, compare log-probs, undo.

        A probe of unchanged weights would be blind: a stale tensor would differ from the trainer's by less than
        the tolerance. Ends with the original weights pushed as `version`.

        Raises:
            RuntimeError: naming the difference, if the servers' log-probs are not the trainer's.
        """
        if not self._servers:
            return
        self.push(version)
        before = self._gap()
        kept = self._add_noise()
        self.push(version)
        self.push(version)
        noisy = self._gap()
        self._restore(kept)
        self.push(version)
        if self._config.training.precision == "fp32" and self._config.fleet.dtype == "float32":
            if noisy[1] > FP32_LIMIT:
                raise RuntimeError(
                    f"after a push the servers' log-probs differ from the trainer's by up to {noisy[1]:.1e} "
                    f"(limit {FP32_LIMIT:.0e}): the servers do not compute with the weights that were sent"
                )
        elif noisy[0] > max(BF16_FLOOR, BF16_FACTOR * before[0]):
            raise RuntimeError(
                f"after a push the servers' log-probs differ from the trainer's by {noisy[0]:.3f} on average, "
                f"before it by {before[0]:.3f}: the servers do not compute with the weights that were sent"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the transfer group."""
        if self._sender is not None:
            self._sender.close()

    def _gap(self) -> tuple[float, float]:
        """(mean, largest) absolute difference of log-probs over fresh samples of every server."""
        prompt = range(min(PROBE_TOKENS, self._policy.arch.vocab_size))  # any tokens will do
        sampling = Sampling(PROBE_TOKENS, self._config.rollout.temperature, ignore_eos=True)
        answers = on_rank_zero(lambda: asyncio.run(_sample(self._servers, prompt, sampling)))
        ours = self._score(prompt, answers)

        def compare() -> tuple[float, float]:
            theirs = torch.tensor([value for answer in answers for value in answer.log_probs])
            difference = (torch.cat([ours[i] for i in range(len(answers))]) - theirs).abs()
            return float(difference.mean()), float(difference.max())

        return on_rank_zero(compare)

    def _score(self, prompt: Sequence[int], answers: Sequence[Generated]) -> dict[int, Tensor]:
        """The trainer's log-probs of each answer, on the CPU; complete on every rank."""
        lengths = np.array([len(answer.token_ids) for answer in answers], np.int32)
        count = len(answers)
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
                response_tokens=np.array([t for r in members for t in answers[r].token_ids], np.int32),
                rollout_log_probs=np.array([v for r in members for v in answers[r].log_probs], np.float32),
            )

        batch = load_batch(header, packing, self._policy.layout, tokens_of)
        return gather_by_response(batch.micro_batches(), self._policy.log_probs(batch))

    @torch.no_grad()
    def _add_noise(self) -> list[Tensor]:
        """Perturb every parameter, alike wherever a parameter has copies; returns the originals."""
        kept = [parameter.detach().clone() for parameter in self._parameters()]
        for chunk in self._policy.chunks:
            parameters = dict(chunk.named_parameters())
            for name, row in local_rows(chunk):
                if row.is_buffer:
                    continue
                parameter = parameters[name]
                generator = torch.Generator().manual_seed(zlib.crc32(row.name.encode()))
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                parameter.add_((noise * parameter.float().std() * NOISE).to(parameter.dtype))
        return kept

    @torch.no_grad()
    def _restore(self, kept: list[Tensor]) -> None:
        for parameter, original in zip(self._parameters(), kept, strict=True):
            parameter.copy_(original)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self._policy.chunks for parameter in chunk.parameters())


async def _sample(servers: Sequence[Server], prompt: Sequence[int], sampling: Sampling) -> list[Generated]:
    """PROBES answers of every server, in the order of the servers."""
    answers = []
    for url, token in servers:
        async with ServerClient(url, token, timeout=300) as client:
            requests = [client.generate(prompt, sampling, f"probe-{i}") for i in range(PROBES)]
            answers += await asyncio.gather(*requests)
    return answers

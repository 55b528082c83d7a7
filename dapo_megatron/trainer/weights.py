"""The policy's weights on their way to the servers, and the proof that they arrived (law 3)."""

import itertools
import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from dapo_megatron.config.run import Config
from dapo_megatron.rollout.handle import Rollouts
from dapo_megatron.rollout.jobs import Admission
from dapo_megatron.rollout.requests import Server
from dapo_megatron.sync.proof import proved_plan
from dapo_megatron.sync.pusher import Member, WeightPusher
from dapo_megatron.sync.server_admin import OtherBytesError, ServerError
from dapo_megatron.trainer.build import local_rows
from dapo_megatron.trainer.colocated import Turns
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.probe import Gap, Probe
from dapo_megatron.trainer.pushers import new_pusher
from dapo_megatron.trainer.trained import TrainedModel

NOISE = 0.1  # of each parameter's own standard deviation
BLAMELESS_FAILURES = 3  # in a row, of a push in which no server can be named
logger = logging.getLogger(__name__)


class WeightSync:
    """Pushes the policy's weights to every server. All ranks call the same methods.

    Args:
        config: the run's configuration.
        policy: whose weights are pushed.
        rollouts: knows the servers. Where there are none (a replayed run), every push does nothing.
        models: all that are trained on these ranks, the policy among them.
    """

    def __init__(self, config: Config, policy: Policy, rollouts: Rollouts, models: Sequence[TrainedModel]) -> None:
        self._config, self._policy, self._rollouts = config, policy, rollouts
        self._first = policy.layout.rank == 0
        self._pushes = 0
        self._unprobed = 0  # pushes since the last probe
        self._connected: tuple[Server, ...] = ()
        self._before = 0.0  # mean gap after the first push
        self._pusher: WeightPusher | None = None
        if config.has_servers:
            self._plan = proved_plan(config, policy.arch, policy.layout.world_size)
            self._pusher = self._new_pusher()
            self._probe = Probe(config, policy)
        self._turns: Turns | None = None
        if config.has_servers and config.fleet.mode == "colocated":
            self._turns = Turns(models, config.fleet.push_timeout)

    def begin_training(self) -> None:
        """Colocated servers, which have the GPUs from a push on, give them to the trainer until the next."""
        if self._turns is not None:
            self._turns.train(self._connected)

    def push(self, version: int) -> None:
        """Give every server the current weights as `version`; hashes compared, prefix caches reset.

        A server that fails or is late is left out: the controller takes it out of the fleet.

        Raises:
            RuntimeError: naming the tensor, where a server received other bytes than were sent; naming the server,
                where one computes something else (`fleet.probe_every`).
        """
        if self._pusher is None:
            return
        servers = self._push(self._pusher, version, held=self._held)
        self._unprobed += 1
        if self._config.fleet.probe_every is not None and self._unprobed >= self._config.fleet.probe_every:
            self._probe.check(self._gaps(servers, version), self._before)

    def admit(self, admission: Admission, version: int) -> None:
        """Bring the current weights, those of `version`, to servers that come back, while the others go on.

        Raises:
            RuntimeError: as in `push`.
        """
        admitted, failed = list(admission.servers), {}
        pusher = self._new_pusher()
        try:
            pusher.connect(_members(admission.servers))
            pusher.push(version)
        except OtherBytesError:
            raise
        except ServerError as error:
            culprits = [server for server in admission.servers if server.url == error.url] or admission.servers
            failed, admitted = {server.id: str(error) for server in culprits}, []
        finally:
            pusher.close()
        gaps = self._probe.gaps(admitted, version)
        self._probe.check(gaps, self._before)
        failed |= {server.id: "it did not answer the probe" for server in admitted if server.id not in gaps}
        if self._first:
            self._rollouts.admitted(admission.number, version, list(gaps), failed)

    def verify(self, version: int) -> None:
        """Prove that pushes change what the servers compute: push noisy weights twice, compare log-probs, undo.

        A probe of unchanged weights would be blind: a stale tensor would differ from the trainer's by less than
        the tolerance. Ends with the original weights pushed as `version`.

        Raises:
            RuntimeError: naming server and difference, if its log-probs are not the trainer's.
        """
        if self._pusher is None:
            return
        gaps = self._gaps(self._push(self._pusher, version), version)
        self._before = max((gap.mean for gap in gaps.values()), default=0.0)
        kept = self._add_noise()
        self._push(self._pusher, version)
        noisy = self._gaps(self._push(self._pusher, version), version)
        self._restore(kept)
        self._push(self._pusher, version)
        self._probe.check(noisy, self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the transfer groups."""
        if self._pusher is not None:
            self._pusher.close()

    @property
    def _held(self) -> bool:
        """Whether the fleet has paused its servers for a push, and lets them go on after it."""
        return self._config.rollout.pipeline == "async" and self._config.fleet.on_push == "keep"

    def _push(self, pusher: WeightPusher, version: int, *, held: bool = False) -> Sequence[Server]:
        """Push until all servers that are left have the weights; these servers."""
        number, self._pushes = self._pushes, self._pushes + 1
        if self._first:
            self._rollouts.begin_push(number, version)
        blameless = 0
        for attempt in itertools.count():
            servers = tuple(self._rollouts.servers_for_push(number, attempt))
            begun = time.monotonic()
            try:
                if servers != self._connected:
                    self._connected = ()
                    if servers:
                        pusher.connect(_members(servers))
                    self._connected = servers
                if servers:
                    self._push_to(servers, pusher, version, held)
                break
            except OtherBytesError:
                raise
            except ServerError as error:
                self._connected = ()
                blameless = 0 if error.url else blameless + 1
                if blameless == BLAMELESS_FAILURES:
                    raise
                if self._first:
                    logger.warning("push of version %d, attempt %d: %s", version, attempt + 1, error)
                    culprit = next((server.id for server in servers if server.url == error.url), "")
                    self._rollouts.push_failed(number, attempt, culprit, str(error))
        if self._first:
            self._rollouts.push_done(number, attempt, time.monotonic() - begun)
        return servers

    def _push_to(self, servers: Sequence[Server], pusher: WeightPusher, version: int, held: bool) -> None:
        if self._turns is not None:
            self._turns.take_weights(servers)
        pusher.push(version, held=held)
        if self._turns is not None:
            self._turns.generate(servers)

    def _gaps(self, servers: Sequence[Server], version: int) -> dict[str, Gap]:
        self._unprobed = 0
        return self._probe.gaps(servers, version)

    def _new_pusher(self) -> WeightPusher:
        return new_pusher(self._config, self._policy, self._plan)

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


def _members(servers: Sequence[Server]) -> list[Member]:
    return [Member(server.id, server.url, server.token) for server in servers]

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
from dapo_megatron.trainer.colocated import Turns, shares_gpus
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.probe import Gap, Probe
from dapo_megatron.trainer.pushers import new_pusher
from dapo_megatron.trainer.trained import TrainedModel

NOISE = 0.1  # of each parameter's own standard deviation
NO_ANSWER = "it did not answer the probe"
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
        self._served: dict[str, Server] = {}  # those that have weights, by id
        self._probed: set[Server] = set()
        self._before: float | None = None  # mean gap of the first probe
        self._pusher: WeightPusher | None = None
        if config.has_servers:
            self._plan = proved_plan(config, policy.arch, policy.layout.world_size)
            self._pusher = self._new_pusher()
            self._probe = Probe(config, policy)
        self._turns: Turns | None = None
        if shares_gpus(config):
            self._turns = Turns(models, config.fleet.push_timeout)

    def begin_training(self) -> None:
        """Colocated servers, which have the GPUs from a push on, give them to the trainer until the next."""
        if self._turns is not None:
            self._turns.train(list(self._served.values()))

    def push(self, version: int) -> None:
        """Give every server the current weights as `version`; hashes compared, prefix caches reset.

        A server that fails or is late is left out: the controller takes it out of the fleet.

        Raises:
            RuntimeError: naming the tensor, where a server received other bytes than were sent; naming the server,
                where one computes something else (`fleet.probe_every`).
        """
        if self._pusher is None:
            return
        # The fleet has paused servers whose answers keep their keys and values, and lets them go on afterwards.
        self._unprobed += 1
        due = self._config.fleet.probe_every is not None and self._unprobed >= self._config.fleet.probe_every
        self._push(self._pusher, version, held=self._config.fleet.on_push == "keep", probe=due)

    def admit(self, admission: Admission, version: int) -> None:
        """Bring the current weights, those of `version`, to servers that come back, while the others go on.

        Raises:
            RuntimeError: as in `push`.
        """
        admitted, failed = list(admission.servers), {}
        if {server.id for server in self._connected} & {server.id for server in admitted}:
            self._connected = ()  # such a server leaves the groups that it was in
        pusher = self._new_pusher()
        try:
            pusher.connect(_members(admission.servers))
            self._push_to(admission.servers, pusher, version)
        except OtherBytesError:
            raise
        except ServerError as error:
            culprits = [server for server in admission.servers if server.url == error.url] or admission.servers
            failed, admitted = {server.id: str(error) for server in culprits}, []
        finally:
            pusher.close()
        gaps = self._compare(admitted, version)
        failed |= {server.id: NO_ANSWER for server in admitted if server.id not in gaps}
        self._served |= {server.id: server for server in admitted}
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
        self._push(self._pusher, version, probe=True)
        kept = self._add_noise()
        try:
            self._push(self._pusher, version)
            self._push(self._pusher, version, probe=True)
        finally:
            self._restore(kept)
        self._push(self._pusher, version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the transfer groups."""
        if self._pusher is not None:
            self._pusher.close()

    def _push(self, pusher: WeightPusher, version: int, *, held: bool = False, probe: bool = False) -> None:
        """Push until all servers that are left have the weights, and those that are new, or all, pass a `probe`."""
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
                    self._pass_probe(servers, version, everyone=probe)
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
        self._served = {server.id: server for server in servers}
        self._probed &= set(servers)

    def _push_to(self, servers: Sequence[Server], pusher: WeightPusher, version: int, held: bool = False) -> None:
        if self._turns is not None:
            self._turns.take_weights(servers)
        pusher.push(version, held=held)
        if self._turns is not None:
            self._turns.generate(servers)

    def _pass_probe(self, servers: Sequence[Server], version: int, *, everyone: bool) -> None:
        """Probe servers while no answers are generated.

        Raises:
            ServerError: on every rank, if one does not answer.
        """
        asked = [server for server in servers if everyone or server not in self._probed]
        if not asked:
            return
        gaps = self._compare(asked, version)
        for server in asked:
            if server.id not in gaps:
                raise ServerError(f"server {server.url}: {NO_ANSWER}", server.url)
        if everyone:
            self._unprobed = 0

    def _compare(self, servers: Sequence[Server], version: int) -> dict[str, Gap]:
        """The gaps of those that answer, by id; what the first ones are is what later ones may be."""
        gaps = self._probe.gaps(servers, version)
        self._probe.check(gaps, self._before)
        if gaps and self._before is None:
            self._before = max(gap.mean for gap in gaps.values())
        self._probed |= {server for server in servers if server.id in gaps}
        return gaps

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

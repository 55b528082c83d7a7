"""Weights of a trainer to the servers: every trainer rank calls the same methods and gets the same result or error."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from torch._C._distributed_c10d import Store

from dapo_megatron.sync import group as transfer
from dapo_megatron.sync.channel import Channel, Way
from dapo_megatron.sync.conductor import POLL_SECONDS, Calls, Conductor
from dapo_megatron.sync.delta import DeltaSender
from dapo_megatron.sync.plan import TransferPlan
from dapo_megatron.sync.same_host import SharedSender, meeting_place
from dapo_megatron.sync.sender import Sender, Sent, WeightSource
from dapo_megatron.sync.server_admin import OtherBytesError, Received, ServerError
from dapo_megatron.sync.wire import Group, encode

WATCH_SECONDS = 0.05  # how often a sender asks whether another has given up

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A server as a push sees it."""

    id: str
    url: str
    token: str


@dataclass(frozen=True)
class PushReport:
    """What a push took.

    Attributes:
        seconds: wall time on rank 0.
        bytes: that each sender, by trainer rank, broadcast.
        tensors: pushed.
        phases: seconds by phase, of the slowest rank or worker: gather, pack, hash and wait on the trainer's side;
            receive, verify and load on the servers'.
    """

    seconds: float
    bytes: dict[int, int]
    tensors: int
    phases: dict[str, float]


class WeightPusher:
    """Pushes weights to servers as a proved plan says.

    Args:
        plan: the same on all ranks; `sync.proof.prove` has passed it.
        source: this rank's weights.
        rank: this trainer rank.
        agree: runs a function on rank 0, and returns its result, or raises, on every rank.
        host: address of rank 0 that servers and senders reach.
        timeout: seconds; the deadline of connecting and of each push.
        backend: gloo or nccl.
        way: how buckets travel.
    """

    def __init__(
        self,
        plan: TransferPlan,
        source: WeightSource,
        *,
        rank: int,
        agree: Callable[[Callable[[], Any]], Any],
        host: str,
        timeout: float,
        backend: str,
        way: Way = "broadcast",
    ) -> None:
        self._source, self._rank, self._agree = source, rank, agree
        self._host, self._timeout, self._backend, self._way = host, timeout, backend, way
        self._follow(plan)
        self._store: Store | None = None
        self._port = 0
        self._meeting: Store | None = None
        self._epoch = self._pushes = 0
        self._members: list[Member] = []
        self._conductor: Conductor | None = None
        self._groups: dict[Group, Channel] = {}

    def _follow(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._sender = Sender(plan, self._source, self._rank, self._backend)
        self._sends = self._rank in plan.senders

    def connect(self, members: Sequence[Member]) -> None:
        """Builds the transfer groups of a new incarnation with every worker of `members`, at least one.

        Raises:
            ServerError: on every rank, if a server fails, is late or has another layout than planned.
        """
        self._leave()
        self._epoch += 1
        self._pushes = 0
        self._members = list(members)
        deadline = time.monotonic() + self._timeout
        self._port = self._agreed(lambda: self._prepare(deadline))
        if self._store is None and self._sends:
            self._store = transfer.join_store(self._host, self._port, self._timeout)
        if self._store is not None:
            self._meeting = transfer.epoch_store(self._store, self._epoch)
        calls = self._init()
        if self._sends:
            self._publish(self._join(calls, deadline))
        self._agreed(lambda: self._outcomes(calls, deadline)[0])

    def push(self, version: int, *, held: bool = False) -> PushReport:
        """Makes the weights live on all servers as `version`, hashes compared, keys and values of old ones forgotten.

        Args:
            version: theirs.
            held: the servers are paused, stay so, and keep the keys and values of requests under way. No other request
                uses these: each asks for those of its own version (`cache_salt`).

        Raises:
            ServerError: on every rank, naming the server that failed or was late; its weights are then not usable, and
                the groups are gone.
            OtherBytesError: a ServerError, if it received other bytes than were sent.
        """
        if not self._members:
            raise RuntimeError("connect() comes before push()")
        self._pushes += 1
        begun = time.monotonic()
        deadline = begun + self._timeout
        calls, failure = self._begin(deadline, held)
        try:
            sent = self._sender.send(self._groups, self._watch(calls), self._give_up, deadline)
        except BaseException:  # the run is at its end: servers must not wait for it
            self._give_up()
            raise
        if self._sends:
            self._publish(sent)

        def conclude() -> PushReport:
            if failure is not None:
                raise failure
            return self._conclude(version, held, calls, begun, deadline)

        return self._agreed(conclude)

    def close(self) -> None:
        """Leaves the groups and closes all connections."""
        self._leave()

    def _prepare(self, deadline: float) -> int:
        """On rank 0, before the others join: the store's port, from servers that are ready."""
        if self._store is None:
            store = transfer.open_store(self._host, self._timeout)
            self._store, self._port = store, store.port
        self._conductor = Conductor([(member.url, member.token) for member in self._members], self._timeout)
        self._conductor.prepare(self._plan.server.workers, deadline)
        return self._port

    def _init(self) -> Calls[None] | None:
        """Lets the servers join, on rank 0."""
        if self._conductor is None:
            return None
        info = {"host": self._host, "port": self._port, "epoch": self._epoch, "timeout": self._timeout}
        info |= {"servers": len(self._members), "backend": self._backend, "way": self._way}
        plans = [self._plan.of_server(number) for number in range(len(self._members))]
        return self._conductor.init(
            [{**info, "server": number, **encode(plan.buckets)} for number, plan in enumerate(plans)]
        )

    def _join(self, calls: Calls[None] | None, deadline: float) -> Sent:
        """Joins the groups that this rank leads, once all workers are there: joining blocks until everybody is."""
        sent, servers = Sent(), len(self._members)
        arrivals = [transfer.arrival_key(s, w) for s in range(servers) for w in range(self._plan.server.workers)]
        try:
            self._wait_for(arrivals, self._watch(calls), deadline)
            assert self._meeting is not None
            self._meeting.set(transfer.GO, "")
            for number, group in enumerate(self._plan.groups):
                if group.sender == self._rank:
                    self._groups[group] = self._channel(number, group, deadline)
        except ServerError as error:
            sent.error = str(error)
            self._give_up()
        return sent

    def _channel(self, number: int, group: Group, deadline: float) -> Channel:
        """The way to a group's workers, which this rank leads."""
        if self._way == "same_host":
            assert self._meeting is not None
            size = max(bucket.nbytes for bucket in self._plan.buckets if bucket.group == group)
            return SharedSender(meeting_place(self._meeting, group.sender), size, self._backend)
        channel = self._lead(number, transfer.group_size(len(self._members), group.workers), deadline)
        if self._way == "delta":
            return DeltaSender(channel, [bucket for bucket in self._plan.buckets if bucket.group == group])
        return channel

    def _lead(self, number: int, size: int, deadline: float) -> transfer.TransferGroup:
        assert self._meeting is not None
        try:
            return transfer.TransferGroup(
                transfer.group_store(self._meeting, number),
                address=transfer.route_to(self._host, self._port),
                rank=transfer.SENDER,
                world_size=size,
                backend=self._backend,
                timeout=max(deadline - time.monotonic(), POLL_SECONDS),
            )
        except RuntimeError as error:
            raise ServerError(f"{transfer.BROKEN_OFF} before it began: {error}") from error

    def _begin(self, deadline: float, held: bool) -> tuple[Calls[list[Received]] | None, ServerError | None]:
        """Lets the servers receive, on rank 0; the first push of an incarnation also proves the servers' geometry."""
        if self._conductor is None:
            return None, None
        try:
            return self._conductor.begin({"check_nan": self._pushes == 1}, deadline, held=held), None
        except ServerError as error:
            self._give_up()
            return None, error

    def _conclude(
        self,
        version: int,
        held: bool,
        calls: Calls[list[Received]] | None,
        begun: float,
        deadline: float,
    ) -> PushReport:
        """On rank 0, when it has sent its part: everything arrived, as it was sent, and is live."""
        assert self._conductor is not None
        outcomes, received = self._outcomes(calls, deadline)
        hashes = {rank: sent.hashes for rank, sent in outcomes.items()}
        for number, (member, workers) in enumerate(zip(self._members, received, strict=True)):
            compare_hashes(member.url, self._plan.of_server(number), hashes, [worker.hashes for worker in workers])
        self._conductor.finish(version, deadline, held=held)
        timings = [sent.seconds for sent in outcomes.values()]
        timings += [worker.seconds for workers in received for worker in workers]
        phases = {
            phase: max(t.get(phase, 0.0) for t in timings) for phase in dict.fromkeys(p for t in timings for p in t)
        }
        return PushReport(
            time.monotonic() - begun,
            {rank: sent.bytes for rank, sent in outcomes.items()},
            self._plan.num_tensors,
            phases,
        )

    def _outcomes(self, calls: Calls[T] | None, deadline: float) -> tuple[dict[int, Sent], list[T]]:
        """On rank 0: every sender's outcome and the servers' answers. Raises ServerError if one has failed."""
        assert calls is not None
        assert self._meeting is not None
        keys = {rank: self._outcome_key(rank) for rank in self._plan.senders}
        try:
            self._wait_for(list(keys.values()), calls.check, deadline)
            outcomes = {rank: Sent(**orjson.loads(self._meeting.get(key))) for rank, key in keys.items()}
            for sent in outcomes.values():
                if sent.error:
                    raise ServerError(sent.error)
            return outcomes, calls.results(deadline)
        except ServerError as error:
            self._give_up()  # servers that still receive then say so, which leaves the one that does not
            raise calls.culprit(error) from error

    def _publish(self, sent: Sent) -> None:
        """Tells rank 0 how this rank fared."""
        assert self._meeting is not None
        self._meeting.set(self._outcome_key(self._rank), orjson.dumps(vars(sent)).decode())

    def _outcome_key(self, rank: int) -> str:
        return f"outcome/{self._pushes}/{rank}"

    def _watch(self, calls: Calls[Any] | None) -> Callable[[], None]:
        """What a waiting rank asks: rank 0 its servers, all senders whether another has given up."""
        asked = 0.0

        def watch() -> None:
            nonlocal asked
            if calls is not None:
                calls.check()
            if self._meeting is not None and time.monotonic() - asked > WATCH_SECONDS:
                asked = time.monotonic()
                if self._meeting.check([transfer.BROKEN]):
                    raise ServerError(f"{transfer.BROKEN_OFF}: another rank gave up")

        return watch

    def _wait_for(self, keys: list[str], watch: Callable[[], None], deadline: float) -> None:
        """Waits until all `keys` are in the store."""
        assert self._meeting is not None
        while not self._meeting.check(keys):
            watch()
            if time.monotonic() > deadline:
                raise ServerError("servers or ranks were late (fleet.push_timeout)")
            time.sleep(POLL_SECONDS)

    def _give_up(self) -> None:
        """Leaves the groups, which frees the servers that wait, and lets all ranks know."""
        if self._meeting is not None:
            self._meeting.set(transfer.BROKEN, "")
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def _agreed(self, function: Callable[[], T]) -> T:
        """Its result from rank 0; a ServerError ends the incarnation and is raised on every rank."""

        def outcome() -> T | ServerError:
            try:
                return function()
            except ServerError as error:
                self._give_up()
                return error

        result: T | ServerError = self._agree(outcome)
        if isinstance(result, ServerError):
            self._leave()
            raise result
        return result

    def _leave(self) -> None:
        for group in self._groups.values():
            group.close()
        if self._conductor is not None:
            self._conductor.close()
        self._groups, self._members, self._conductor, self._meeting = {}, [], None, None


def compare_hashes(
    url: str, plan: TransferPlan, sent: Mapping[int, Sequence[Sequence[int]]], workers: Sequence[Sequence[int]]
) -> None:
    """Compare what the workers of server `url` received with what was sent.

    Args:
        url: the server's.
        plan: the push's.
        sent: for each sender the hashes of the stretches of its buckets.
        workers: for each worker the hashes of the stretches that it received.

    Raises:
        OtherBytesError: naming the first stretch that differs.
    """
    own = {rank: iter(hashes) for rank, hashes in sent.items()}
    expected = [(bucket, next(own[bucket.group.sender])) for bucket in plan.buckets]
    for worker, received in enumerate(workers):
        found = iter(received)
        for bucket, hashes in expected:
            if worker not in bucket.group.workers:
                continue
            for stretch, due in zip(bucket.stretches, hashes, strict=True):
                if (arrived := next(found, None)) != due:
                    what = "not at all" if arrived is None else f"with hash {arrived:#x}"
                    text = f"server {url}, worker {worker}: tensor {stretch} arrived {what}, sent was {due:#x}"
                    raise OtherBytesError(text, url)

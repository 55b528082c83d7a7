"""Rank 0's part of a push: the same request to all servers at once, and who is to blame when it fails."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from dapo_megatron.sync.group import BROKEN_OFF
from dapo_megatron.sync.server_admin import Received, ServerAdmin, ServerError

POLL_SECONDS = 0.001
BLAME_SECONDS = 5.0  # after a broadcast broke off: servers that are alive have said so by then
HEALTH_SECONDS = 2.0  # in which a server that is alive answers a health check
logger = logging.getLogger(__name__)

T = TypeVar("T")


class Calls(Generic[T]):
    """One request under way to every server."""

    def __init__(self, admins: Sequence[ServerAdmin], call: Callable[[ServerAdmin, int], T]) -> None:
        self._admins = admins
        self._futures = [_in_background(call, admin, number) for number, admin in enumerate(admins)]

    def check(self) -> None:
        """Raises the first failure there is, without asking who is to blame for it."""
        if failures := self._failures():
            raise failures[0]

    def results(self, deadline: float) -> list[T]:
        """The answers, in the order of the servers, before `deadline` (monotonic seconds). Raises ServerError."""
        while not all(future.done() for future in self._futures):
            self.check()
            if time.monotonic() > deadline:
                raise self.culprit(ServerError("servers were late (fleet.push_timeout)"), grace=0)
            time.sleep(POLL_SECONDS)
        self.check()
        return [future.result() for future in self._futures]

    def settled(self, deadline: float) -> list[ServerError]:
        """Waits for every answer, also when some fail; the failures, those that are late at `deadline` among them."""
        while not all(future.done() for future in self._futures) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        late = [admin.url for admin in self._silent()]
        return self._failures() + [ServerError(f"server {url} did not answer", url, answered=False) for url in late]

    def culprit(self, otherwise: ServerError | None = None, grace: float = BLAME_SECONDS) -> ServerError:
        """The server that broke the request: one that is gone, refused, or stays silent for `grace` seconds.

        A server whose broadcast broke off fails, too, and is not to blame for it. Where nobody is: `otherwise`, or
        what broke off, without a server's name.
        """
        end = time.monotonic() + grace
        while True:
            own = [error for error in self._failures() if BROKEN_OFF not in str(error)]
            if own:
                return min(own, key=lambda error: error.answered)
            silent = self._silent()
            if not silent or time.monotonic() > end:
                break
            time.sleep(POLL_SECONDS)
        if silent:
            late = f"servers {', '.join(admin.url for admin in silent)} did not answer before the deadline"
            return ServerError(f"{late} (fleet.push_timeout)", self._latest(silent), answered=False)
        error = otherwise or self._failures()[0]
        return ServerError(str(error)) if BROKEN_OFF in str(error) else error

    def _latest(self, silent: Sequence[ServerAdmin]) -> str:
        """URL of the one of these to blame, empty where none is.

        One that does not even answer a health check is, or else one that is later than others were. Several that live,
        and no other was in time: something that they share is slow.
        """
        if len(silent) == 1:
            return silent[0].url
        checks = [_in_background(lambda admin: admin.is_healthy(HEALTH_SECONDS), admin) for admin in silent]
        gone = [admin for admin, check in zip(silent, checks, strict=True) if not check.result()]
        others = silent if len(silent) < len(self._admins) else []
        return next((admin.url for admin in [*gone, *others]), "")

    def _silent(self) -> list[ServerAdmin]:
        """Servers that have not answered yet."""
        return [admin for admin, future in zip(self._admins, self._futures, strict=True) if not future.done()]

    def _failures(self) -> list[ServerError]:
        return [error for future in self._futures if (error := _failure(future)) is not None]


class Conductor:
    """The servers of one incarnation of the transfer groups, each (base URL, token)."""

    def __init__(self, servers: Sequence[tuple[str, str]], timeout: float) -> None:
        # Connections outlive the deadline: who is silent is told from who is only waiting for others.
        self.admins = [ServerAdmin(url, token, timeout + 2 * BLAME_SECONDS) for url, token in servers]
        self._unfinished: set[str] = set()  # URLs of those that may have a part of new weights

    def close(self) -> None:
        """Closes all connections. A server whose update did not end stays paused: it would sample with anything."""
        if self._unfinished:
            logger.warning(
                "a push did not end on servers %s: they stay paused, with weights of which parts may be missing, until "
                "a push reaches them, of this run or of another",
                ", ".join(sorted(self._unfinished)),
            )
        for admin in self.admins:
            admin.close()

    def prepare(self, workers: int, deadline: float) -> None:
        """Closes updates that another incarnation left open, and checks that servers have as many workers as planned.

        Raises:
            ServerError: naming the server that fails or has another layout.
        """
        Calls(self.admins, lambda admin, _: admin.abandon_weight_update()).results(deadline)
        sizes = Calls(self.admins, lambda admin, _: admin.world_size()).results(deadline)
        for admin, size in zip(self.admins, sizes, strict=True):
            if size != workers:
                raise ServerError(
                    f"server {admin.url} has {size} workers, but fleet.tensor x fleet.pipeline = {workers}", admin.url
                )

    def init(self, infos: Sequence[Mapping[str, Any]]) -> Calls[None]:
        """Lets all workers join the groups of their server's info."""
        return Calls(self.admins, lambda admin, number: admin.init_weight_transfer_engine(infos[number]))

    def begin(self, info: Mapping[str, Any], deadline: float, *, held: bool) -> Calls[list[Received]]:
        """Opens an update on every server and lets its workers receive; the answers are what each got.

        Servers are paused before, unless they are `held` already.
        """

        def begin(admin: ServerAdmin, _: int) -> None:
            if not held:
                admin.pause()
            self._unfinished.add(admin.url)
            admin.start_weight_update()

        Calls(self.admins, begin).results(deadline)
        return Calls(self.admins, lambda admin, _: admin.update_weights(info))

    def finish(self, version: int, deadline: float, *, held: bool) -> None:
        """Makes the weights live under `version`; unless servers are `held`, they forget keys and values and go on.

        Raises:
            ServerError: also if one says afterwards that its weights are others.
        """

        def finish(admin: ServerAdmin, _: int) -> None:
            admin.finish_weight_update(version)
            if (found := admin.weight_version()) != version:
                text = f"server {admin.url} has weights of version {found} after a push of version {version}"
                raise ServerError(text, admin.url)
            if not held:
                admin.reset_prefix_cache()
                admin.resume()
            self._unfinished.discard(admin.url)

        Calls(self.admins, finish).results(deadline)


def _failure(future: "Future[Any]") -> ServerError | None:
    """What a call that has ended failed with; an error that is no server's is raised."""
    if not future.done() or (error := future.exception()) is None:
        return None
    if not isinstance(error, ServerError):
        raise error
    return error


def _in_background(call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Runs `call` in a thread that does not keep the process alive: a server may never answer."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="weight-push", daemon=True).start()
    return future

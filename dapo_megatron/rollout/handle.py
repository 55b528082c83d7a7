"""Rollouts as the trainer sees them: a controller process, a recording of one, or given pairs. Without torch."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import httpx

from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.files import write_atomically
from dapo_megatron.rollout.address import PARENT_VARIABLE, TOKEN_VARIABLE, Address, controller_host
from dapo_megatron.rollout.blocks import decode_block, decode_header, select
from dapo_megatron.rollout.jobs import Admission
from dapo_megatron.rollout.journal import Journal
from dapo_megatron.rollout.offline import NoServers, open_offline
from dapo_megatron.rollout.requests import Server
from dapo_megatron.rollout.server import log_tail
from dapo_megatron.run_state.store import latest_state, read_run
from dapo_megatron.types import BatchHeader, Int32, TokenBlock

LOG_LINES = 15
POLL_SECONDS = 1.0
REPLY_TIMEOUT = 300.0
SHARED_SECONDS = 10.0
"""A network file system may show a new file to other nodes a little later."""

STOP_SECONDS = 40.0
"""Enough for a controller to stop its servers, which it kills after 10 s."""

OnProgress = Callable[[float, float, str], None]
"""Called with done, total, and a text."""

OnAdmission = Callable[[Admission], None]
"""Called on every rank alike, in the same order, with servers that need the weights before they can answer."""

OnRankZero = Callable[[Callable[[], Any]], Any]
"""Runs a function on rank 0 and returns its result, or raises its error, on every rank."""


class ControllerError(RuntimeError):
    """The rollout controller failed or is gone; the text ends with the last lines of its log."""


@dataclass(frozen=True)
class StopRun:
    """The run ends here by its own rule (`rollout.on_exhausted: stop`)."""

    reason: str


class Rollouts(Protocol):
    """What training needs of rollouts. Leaving the `with` block ends every process that was started for them."""

    def wait_ready(self, on_progress: OnProgress) -> None:
        """Wait until the servers have started. They have no usable weights before the first push."""
        ...

    def begin(self, step: int, version: int, trained_version: int) -> None:
        """Start the sampling of a step's batch, when those of earlier steps are complete. Twice does no harm.

        The servers have the weights `version` now; `trained_version` are those that the step will train.
        """
        ...

    def wait(self, step: int, on_progress: OnProgress, on_admission: OnAdmission) -> BatchHeader | StopRun:
        """The batch's header, when it is complete. All ranks wait for it."""
        ...

    def tokens(self, step: int, responses: Int32) -> TokenBlock:
        """Token data of `responses`, int32 [r] indices into the header's arrays, in that order."""
        ...

    def evaluate(self, name: str, on_progress: OnProgress, on_admission: OnAdmission) -> dict[str, Any] | None:
        """Result of an evaluation on the held-out prompts (`dapo_megatron.evaluation.evaluate`); None in a replay.

        All ranks wait for it.
        """
        ...

    def begin_push(self, push: int, version: int) -> None:
        """Hold the fleet for the push number `push` (from 0), of the weights `version`. Twice does no harm."""
        ...

    def servers_for_push(self, push: int, attempt: int) -> Sequence[Server]:
        """Wait until the fleet is held; the servers of an attempt (from 0), the same on every rank, perhaps none."""
        ...

    def push_failed(self, push: int, attempt: int, id: str, reason: str) -> None:
        """A server failed in an attempt and is taken out; the next attempt has the rest."""
        ...

    def push_done(self, push: int, attempt: int, seconds: float) -> None:
        """The servers of an attempt have the weights, after `seconds`: they go on."""
        ...

    def admitted(self, number: int, version: int, ids: Sequence[str], failed: Mapping[str, str]) -> None:
        """The servers `ids` of an admission have the weights `version`; others `failed`, for reasons by id.

        What is in neither waits for another admission.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_rollouts(config: Config, rank: int, on_rank_zero: OnRankZero) -> Rollouts:
    """The rollouts of a run, on every rank: rank 0 starts the controller, the others talk to it; DPO has none.

    The order of prompts or pairs goes on from the newest saved state in `run.dir`, unless `run.resume` is `never`.
    """
    if config.rollout.replay is not None:
        return Replay(config.rollout.replay)
    if not config.has_servers:
        return open_offline(config, _saved_cursor(config), on_rank_zero)
    started: list[ControllerProcess] = []

    def start() -> Address:
        started.append(start_controller(config, _saved_cursor(config)))
        return started[0].address

    try:
        address: Address = on_rank_zero(start)
        _check_shared(address.log_path)
        return RemoteRollouts(address, started[0] if rank == 0 else None)
    except BaseException:
        for process in started:
            process.stop()
        raise


def _saved_cursor(config: Config) -> dict[str, Any] | None:
    """State of the order of prompts in the run that is resumed; None in a new one."""
    saved = latest_state(config.run.dir) if config.run.resume == "auto" else None
    cursor: dict[str, Any] | None = read_run(saved)["cursor"] if saved else None
    return cursor


def _check_shared(log_path: Path) -> None:
    """Every rank saves its part of the run's state in `run.dir`: it must see there what rank 0 has written."""
    deadline = time.monotonic() + SHARED_SECONDS
    while not log_path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{socket.gethostname()} does not see {log_path}, which rank 0 has written: run.dir must lie on a file "
                "system that all trainer nodes share"
            )
        time.sleep(0.1)


@dataclass(frozen=True)
class ControllerProcess:
    """A controller that this process started."""

    process: "subprocess.Popen[bytes]"
    address: Address

    def stop(self) -> None:
        """Ask it to end, and wait until it and its servers have; kill it if that takes too long.

        Servers die with a killed controller.
        """
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_controller(config: Config, cursor: dict[str, Any] | None) -> ControllerProcess:
    """Start the controller; `cursor` is the sampler's state of the run that is resumed.

    It ends when this process or the calling thread does, however that happens.

    Raises:
        ControllerError: when it ends before it can be talked to.
    """
    folder = Path(config.run.dir) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    log_path, config_path, state_path = (folder / f"controller.{end}" for end in ("log", "config.json", "state.json"))
    write_atomically(config_path, config.model_dump_json(indent=1).encode())
    token, host = secrets.token_hex(32), controller_host(os.environ)
    reader, writer = os.pipe()
    arguments = ["--config", str(config_path), "--host", host, "--port-fd", str(writer)]
    if cursor:
        write_atomically(state_path, json.dumps(cursor).encode())
        arguments += ["--state", str(state_path)]
    with os.fdopen(reader) as ready, log_path.open("wb") as log:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "dapo_megatron.rollout.controller", *arguments],
                env=os.environ | {TOKEN_VARIABLE: token, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(writer)
        port = ready.readline().strip()  # empty when the process ended without writing one
    address = Address(f"http://{host}:{port}", token, log_path)
    if not port:
        raise _gone(address, f"ended with code {process.wait()} while starting")
    return ControllerProcess(process, address)


class RemoteRollouts:
    """A controller over HTTP. `process` is given on the rank that started it, which also ends it."""

    def __init__(self, address: Address, process: ControllerProcess | None = None):
        self.address = address
        self._process = process
        self._client = httpx.Client(
            base_url=address.url,
            headers={"Authorization": f"Bearer {address.token}"},
            timeout=REPLY_TIMEOUT,
            limits=httpx.Limits(max_keepalive_connections=0),  # one that idled through an update may be closed
            trust_env=False,  # a proxy would be asked for a loopback address
        )

    def wait_ready(self, on_progress: OnProgress) -> None:
        """See `Rollouts.wait_ready`."""
        while True:
            status = self._call("GET", "/status", wait=POLL_SECONDS).json()
            if status["state"] == "failed":
                raise self._error(status)
            on_progress(status["healthy"], status["total"], status["message"])
            if status["state"] == "ready":
                return

    def begin(self, step: int, version: int, trained_version: int) -> None:
        """See `Rollouts.begin`."""
        self._call("POST", f"/batches/{step}", json={"version": version, "trained": trained_version})

    def wait(self, step: int, on_progress: OnProgress, on_admission: OnAdmission) -> BatchHeader | StopRun:
        """See `Rollouts.wait`."""
        reply = self._poll(f"/batches/{step}", on_progress, on_admission)
        return (
            StopRun(reply.json()["stop"]) if reply.status_code == httpx.codes.CONFLICT else decode_header(reply.content)
        )

    def tokens(self, step: int, responses: Int32) -> TokenBlock:
        """See `Rollouts.tokens`."""
        return decode_block(self._call("POST", f"/batches/{step}/tokens", content=responses.tobytes()).content)

    def evaluate(self, name: str, on_progress: OnProgress, on_admission: OnAdmission) -> dict[str, Any]:
        """See `Rollouts.evaluate`."""
        self._call("POST", f"/evaluations/{name}")
        result: dict[str, Any] = self._poll(f"/evaluations/{name}", on_progress, on_admission).json()
        return result

    def begin_push(self, push: int, version: int) -> None:
        """See `Rollouts.begin_push`."""
        self._call("POST", f"/pushes/{push}", json={"version": version})

    def servers_for_push(self, push: int, attempt: int) -> Sequence[Server]:
        """See `Rollouts.servers_for_push`."""
        while True:
            reply = self._call("GET", f"/pushes/{push}", wait=POLL_SECONDS, attempt=attempt)
            if reply.status_code == httpx.codes.OK:
                return _servers(reply.json())

    def push_failed(self, push: int, attempt: int, id: str, reason: str) -> None:
        """See `Rollouts.push_failed`."""
        self._call("POST", f"/pushes/{push}/failed", json={"attempt": attempt, "id": id, "reason": reason})

    def push_done(self, push: int, attempt: int, seconds: float) -> None:
        """See `Rollouts.push_done`."""
        self._call("POST", f"/pushes/{push}/done", json={"attempt": attempt, "seconds": seconds})

    def admitted(self, number: int, version: int, ids: Sequence[str], failed: Mapping[str, str]) -> None:
        """See `Rollouts.admitted`."""
        told = {"version": version, "ids": list(ids), "failed": dict(failed)}
        self._call("POST", f"/admissions/{number}/done", json=told)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        if self._process is not None:
            self._process.stop()

    def _poll(self, path: str, on_progress: OnProgress, on_admission: OnAdmission) -> httpx.Response:
        admissions = 0
        while True:
            reply = self._call("GET", path, wait=POLL_SECONDS, after=admissions)
            if reply.status_code != httpx.codes.ACCEPTED:
                return reply
            work = reply.json()
            if "admission" in work:
                on_admission(Admission(work["admission"], _servers(work)))
                admissions += 1
            else:
                text = f"{work['drawn']} prompts drawn, {work['answers']} answers, {work['tokens']} tokens"
                on_progress(work["kept"], work["needed"], text)

    def _call(
        self, method: str, path: str, *, json: object = None, content: bytes | None = None, **query: float
    ) -> httpx.Response:
        """Any reply but an error; a controller that is gone is noticed at once."""
        try:
            reply = self._client.request(method, path, params=query, json=json, content=content)
        except httpx.TimeoutException:
            raise _gone(self.address, f"did not answer {method} {path} within {REPLY_TIMEOUT:g} s") from None
        except httpx.TransportError as error:
            raise _gone(self.address, f"cannot be reached ({error})") from None
        if reply.status_code in (httpx.codes.OK, httpx.codes.ACCEPTED, httpx.codes.CONFLICT):
            return reply
        raise self._error(reply.json())

    def _error(self, failure: dict[str, Any]) -> Exception:
        if failure.get("user"):
            return UserError(failure["error"])
        return ControllerError(f"the rollout controller failed: {failure['error']} (log: {self.address.log_path})")


class Replay(NoServers):
    """The batches recorded by an earlier run in `folder`, in place of a controller. There are no servers."""

    def __init__(self, folder: str | Path):
        self._journal = Journal(folder)

    def wait(self, step: int, on_progress: OnProgress, on_admission: OnAdmission) -> BatchHeader:
        """The recorded header. Raises UserError when there is none."""
        return self._journal.read(step)[0]

    def tokens(self, step: int, responses: Int32) -> TokenBlock:
        """See `Rollouts.tokens`."""
        return select(*self._journal.read(step), responses)


def _servers(reply: dict[str, Any]) -> tuple[Server, ...]:
    return tuple(Server(**server) for server in reply["servers"])


def _gone(address: Address, what: str) -> ControllerError:
    with contextlib.suppress(OSError):
        tail = "\n".join(f"    {line}" for line in log_tail(address.log_path, LOG_LINES))
        return ControllerError(f"the rollout controller {what}; the end of {address.log_path}:\n{tail}")
    return ControllerError(f"the rollout controller {what}; its log is {address.log_path}")

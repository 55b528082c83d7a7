"""The routes of a vLLM server that a weight push needs, called by the trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import httpx
import orjson

from dapo_megatron.rollout import vllm_api
from dapo_megatron.sync.group import BROKEN_OFF
from dapo_megatron.sync.versions import parse_version

T = TypeVar("T")


class ServerError(RuntimeError):
    """A server did not do what it was asked; the text names it, the route and the reason.

    Attributes:
        url: the server's; empty where no single one is to blame.
        answered: whether it answered at all.
    """

    def __init__(self, text: str, url: str = "", *, answered: bool = True) -> None:
        super().__init__(text, url)
        self.url, self.answered = url, answered

    def __str__(self) -> str:
        return str(self.args[0])


class OtherBytesError(ServerError):
    """A server received other bytes than were sent; the text names the first tensor that differs."""


@dataclass(frozen=True)
class Received:
    """What a worker received in a push.

    Attributes:
        hashes: of all stretches, in their order.
        seconds: by phase.
        error: what went wrong; empty: nothing.
    """

    hashes: list[int]
    seconds: dict[str, float]
    error: str


class ServerAdmin:
    """Weight routes of one server, at base `url` under `token`.

    Every method raises ServerError if the server refuses or does not answer within `timeout` seconds.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self.url = url
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout,
            # No connection is used twice: vLLM closes one after an error, or after 5 idle seconds, and a
            # request sent on it at that moment would fail for no reason of its own.
            limits=httpx.Limits(max_keepalive_connections=0),
            # A proxy from the environment must not see loopback or cluster traffic.
            trust_env=False,
        )

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def is_healthy(self, seconds: float) -> bool:
        """Whether the server answers a health check, each part of which takes at most `seconds`."""
        try:
            return self._client.get(vllm_api.HEALTH, timeout=seconds).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def world_size(self) -> int:
        """Workers of this server that take part in a transfer group (TP x PP x DP)."""
        return self._ask("GET", vllm_api.WORLD_SIZE, vllm_api.parse_world_size)

    def weight_version(self) -> int:
        """Version of the weights that the server samples with now."""
        return self._ask("GET", vllm_api.WEIGHT_INFO, _version)

    def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        """Lets all workers join the transfer group; returns when they have."""
        self._call("POST", vllm_api.INIT_WEIGHT_TRANSFER, vllm_api.init_weight_transfer_body(info))
        self._check(vllm_api.INIT_WEIGHT_TRANSFER, self._rpc("failure"))

    def pause(self) -> None:
        """Stops the engine between two of its steps, with what is under way: half-received weights compute nothing.

        An answer that was ended may still be on its way to the engine, though nobody waits for it any more.
        """
        self._expect("paused", vllm_api.pause_path("keep", clear_cache=False))

    def resume(self) -> None:
        """Lets the engine go on after `pause`."""
        self._expect("resumed", vllm_api.RESUME)

    def start_weight_update(self) -> None:
        """Opens an update: the server's layers wait for tensors."""
        self._call("POST", vllm_api.START_WEIGHT_UPDATE)

    def update_weights(self, info: Mapping[str, Any]) -> list[Received]:
        """Lets all workers receive the tensors of `info`; returns, for each, what arrived, when all have everything."""
        self._call("POST", vllm_api.UPDATE_WEIGHTS, vllm_api.update_weights_body(info))
        try:
            received = [Received(**worker) for worker in self._rpc("received")]
        except TypeError as error:
            raise ServerError(f"server {self.url}: its plugin is another version's: {error}", self.url) from error
        self._check(vllm_api.UPDATE_WEIGHTS, [worker.error for worker in received])
        return received

    def finish_weight_update(self, version: int) -> None:
        """Makes the received weights live under `version`."""
        body = vllm_api.finish_weight_update_body(str(version))
        self._call("POST", vllm_api.FINISH_WEIGHT_UPDATE, body)
        self._check(vllm_api.FINISH_WEIGHT_UPDATE, self._rpc("failure"))

    def reset_prefix_cache(self) -> None:
        """Forgets all keys and values of a paused engine; requests under way go on with such as are computed anew."""
        if not self._ask("POST", vllm_api.reset_prefix_cache_path(running=True), vllm_api.parse_reset):
            raise ServerError(f"server {self.url}: the prefix cache cannot be reset", self.url)

    def abandon_weight_update(self) -> None:
        """Closes an update that was started and never finished, if there is one."""
        self._rpc("abandon_weight_update")

    def sleep(self) -> None:
        """Ends what runs and drops weights, keys and values; a push brings the weights back."""
        self._expect("sleeping", vllm_api.sleep_path(2))

    def wake_weights(self) -> None:
        """Takes memory for weights, which hold nothing yet, after `sleep`; harmless where the server is awake."""
        self._call("POST", vllm_api.wake_up_path(["weights"]))

    def wake_cache(self) -> None:
        """Takes memory for keys and values: the server is awake."""
        self._expect("awake", vllm_api.wake_up_path(["kv_cache"]))

    def _expect(self, status: Literal["paused", "resumed", "sleeping", "awake"], path: str) -> None:
        self._ask("POST", path, lambda reply: vllm_api.check_status(reply, status))

    def _rpc(self, method: str) -> list[Any]:
        """What `method` of the receiver's extension returns on each worker."""
        return self._ask("POST", vllm_api.COLLECTIVE_RPC, vllm_api.parse_rpc, vllm_api.rpc_body(method))

    def _check(self, path: str, errors: Sequence[str]) -> None:
        """Raises ServerError if a worker failed at `path`: rather one that did of itself than one left alone."""
        failed = sorted((BROKEN_OFF in error, worker, error) for worker, error in enumerate(errors) if error)
        if failed:
            _, worker, error = failed[0]
            raise ServerError(f"server {self.url}: POST {path} failed on worker {worker}: {error}", self.url)

    def _ask(self, method: str, path: str, parse: Callable[[Any], T], body: Mapping[str, Any] | None = None) -> T:
        try:
            return parse(self._call(method, path, body))
        except ValueError as error:  # what parsers raise
            raise ServerError(f"server {self.url}: {method} {path}: {error}", self.url) from error

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        content = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            reply = self._client.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            text = f"server {self.url}: {method} {path} failed: {error!r}"
            raise ServerError(text, self.url, answered=False) from error
        if reply.status_code != httpx.codes.OK:
            text = f"server {self.url}: {method} {path} failed ({reply.status_code}): {_reason(reply)}"
            raise ServerError(text, self.url)
        return _decoded(reply)


def _version(reply: Any) -> int:
    return parse_version(vllm_api.parse_weight_info(reply))


def _reason(reply: httpx.Response) -> str:
    """The message of vLLM's error body, or the body itself."""
    return vllm_api.error_text(_decoded(reply) or reply.text)


def _decoded(reply: httpx.Response) -> Any:
    """The body; None if it is empty or no JSON, which no parser accepts."""
    try:
        return orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        return None

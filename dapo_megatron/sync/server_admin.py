"""The routes of a vLLM server that a weight push needs, called by the trainer."""

from collections.abc import Mapping
from typing import Any

import httpx
import orjson

from dapo_megatron.sync.versions import parse_version


class ServerError(RuntimeError):
    """A server did not do what it was asked; the text names it, the route and the reason."""


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

    def world_size(self) -> int:
        """Workers of this server that take part in a transfer group (TP x PP x DP)."""
        return int(self._call("GET", "/get_world_size")["world_size"])

    def weight_version(self) -> int:
        """Version of the weights that the server samples with now."""
        return parse_version(self._call("GET", "/weight_info")["weight_version"])

    def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        """Lets all workers join the transfer group; returns when they have."""
        self._call("POST", "/init_weight_transfer_engine", {"init_info": info})

    def start_weight_update(self) -> None:
        """Opens an update: the server's layers wait for tensors."""
        self._call("POST", "/start_weight_update")

    def update_weights(self, info: Mapping[str, Any]) -> None:
        """Lets all workers receive the tensors of `info`; returns when they have them all."""
        self._call("POST", "/update_weights", {"update_info": info})

    def finish_weight_update(self, version: int) -> None:
        """Makes the received weights live under `version`."""
        self._call("POST", "/finish_weight_update", {"weight_version": str(version)})

    def reset_prefix_cache(self) -> None:
        """Forgets cached keys and values: those of the old weights would be used with the new ones."""
        if not self._call("POST", "/reset_prefix_cache")["success"]:
            raise ServerError(f"server {self.url}: the prefix cache cannot be reset while requests are running")

    def weight_hashes(self) -> list[dict[str, str]]:
        """Per worker, the SHA-256 of every tensor of the last push as it arrived, by name."""
        return list(self._call("POST", "/collective_rpc", {"method": "weight_hashes"})["results"])

    def abandon_weight_update(self) -> None:
        """Closes an update that was started and never finished, if there is one."""
        self._call("POST", "/collective_rpc", {"method": "abandon_weight_update"})

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        content = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            reply = self._client.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise ServerError(f"server {self.url}: {method} {path} failed: {error!r}") from error
        if reply.status_code != httpx.codes.OK:
            raise ServerError(f"server {self.url}: {method} {path} failed ({reply.status_code}): {_reason(reply)}")
        return orjson.loads(reply.content) if reply.content else None


def _reason(reply: httpx.Response) -> str:
    """The message of vLLM's error body, or the body itself."""
    try:
        return str(orjson.loads(reply.content)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return reply.text[:500]

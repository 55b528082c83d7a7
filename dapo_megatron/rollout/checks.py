"""Whether a server that answers is one that this run can use. Asked before a run, and when it joins."""

from typing import Any

import httpx

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.errors import UserError
from dapo_megatron.rollout import vllm_api

TIMEOUT = 30.0
GUARDED = vllm_api.WEIGHT_INFO
"""What a server tells nobody who does not send its token."""


class UnreachableError(RuntimeError):
    """A server does not answer; it may later."""


def check_server(url: str, token: str, fleet: FleetConfig, longest: int, source: str) -> str | None:
    """Check the server at `url`: it lives, `token` opens it and nothing else does, its workers and its length fit.

    Args:
        url: its base URL.
        token: opens it.
        fleet: how servers are meant to be.
        longest: tokens that a sequence may have.
        source: the key that names this server.

    Returns:
        A warning to show, or None.

    Raises:
        UnreachableError: if it does not answer.
        UserError: if it does not fit.
    """
    where = f"{source}: server {url}"
    with httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False) as client:
        if (health := _ask(client, vllm_api.HEALTH, where).status_code) != httpx.codes.OK:
            raise UnreachableError(f"{where} answers GET {vllm_api.HEALTH} with {health}")
        if fault := open_to_strangers(_ask(client, GUARDED, where).status_code):
            raise UserError(f"{where} {fault}")
        client.headers["Authorization"] = f"Bearer {token}"
        try:
            warning = vllm_api.warn_if_untested(vllm_api.parse_server_version(_get(client, vllm_api.VERSION, where)))
            workers = vllm_api.parse_world_size(_get(client, vllm_api.WORLD_SIZE, where))
            length = vllm_api.parse_model_length(_get(client, vllm_api.MODELS, where))
        except vllm_api.ReplyError as error:
            raise UserError(f"{where} does not answer as vLLM does: {error}") from None
    if workers != fleet.world_size:
        raise UserError(
            f"{where} has {workers} workers, but fleet.tensor={fleet.tensor} x fleet.pipeline={fleet.pipeline} is "
            f"{fleet.world_size}"
        )
    if length < longest:
        raise UserError(f"{where} was started for {length} tokens, but a sequence of this run may have {longest}")
    return warning


def open_to_strangers(status: int) -> str | None:
    """What is wrong with a server that answers GUARDED with `status` where no token was sent; None: nothing."""
    if status == httpx.codes.UNAUTHORIZED:
        return None
    return (
        f"opens without its token (GET {GUARDED} is answered with {status}, not 401): anybody could replace its "
        "weights; start it with `dapo-megatron serve`"
    )


def _get(client: httpx.Client, path: str, where: str) -> Any:
    """The decoded reply, None where it is empty."""
    reply = _ask(client, path, where)
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise UserError(f"{where} refuses the token (fleet.token_env)")
    if reply.status_code != httpx.codes.OK:
        raise UnreachableError(f"{where} answers GET {path} with {reply.status_code}")
    try:
        return reply.json() if reply.content else None
    except ValueError:
        raise vllm_api.ReplyError(f"the reply to GET {path} is no JSON") from None


def _ask(client: httpx.Client, path: str, where: str) -> httpx.Response:
    try:
        return client.get(path)
    except httpx.HTTPError as error:
        raise UnreachableError(f"{where} does not answer ({error!r})") from None

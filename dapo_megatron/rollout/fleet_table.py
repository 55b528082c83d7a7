"""`dapo-megatron fleet`: what each server of a fleet says about itself."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.config.fleet import FleetConfig, check_url, server_urls
from dapo_megatron.config.load import load_config
from dapo_megatron.errors import UserError
from dapo_megatron.rollout import vllm_api
from dapo_megatron.rollout.client import ServerClient, ServerFacts
from dapo_megatron.rollout.requests import RequestError
from dapo_megatron.serve import read_token

TIMEOUT = 10.0
HEAD = ("URL", "healthy", "vLLM", "weights", "workers", "paused", "running", "waiting", "KV cache")


@dataclass(frozen=True)
class Row:
    """A server. `problem` says why it is of no use, and the rest is what it said before; None: it is healthy."""

    url: str
    problem: str | None
    facts: ServerFacts | None = None
    activity: vllm_api.Activity | None = None


def show_fleet(options: argparse.Namespace) -> int:
    """Print a table of the servers that the command line names; 1 if one of them is not healthy, else 0.

    Raises:
        UserError: if no server is named, or there is no token.
    """
    urls, variable = _named(options.urls, options.config)
    rows = asyncio.run(ask(urls, read_token(options.token_file, variable)))
    print(*table(rows), *dict.fromkeys(warnings(rows)), sep="\n")
    return int(any(row.problem is not None for row in rows))


def _named(urls: Sequence[str], config: str | None) -> tuple[list[str], str]:
    """The servers, and the environment variable with their token."""
    if bool(urls) == (config is not None):
        raise UserError("name servers by their URLs, or by --config CONFIG")
    if config is None:
        for url in urls:
            try:
                check_url(url, "URL")
            except ValueError as error:
                raise UserError(str(error)) from None
        return [url.rstrip("/") for url in urls], FleetConfig().token_env
    fleet = load_config(config, []).fleet
    if fleet.mode != "external":
        raise UserError(
            f"--config {config}: fleet.mode is {fleet.mode}, and only servers of an external fleet have addresses that "
            "are known beforehand"
        )
    return server_urls(fleet), fleet.token_env


async def ask(urls: Sequence[str], token: str) -> list[Row]:
    """Ask all servers at the same time."""
    return list(await asyncio.gather(*(_ask(url, token) for url in urls)))


async def _ask(url: str, token: str) -> Row:
    facts = None
    async with ServerClient(url, token, TIMEOUT) as client:
        try:
            facts = await client.facts()
            if not await client.health():
                return Row(url, "its engine is dead", facts)
            return Row(url, None, facts, await client.activity())
        except RequestError as error:
            return Row(url, str(error).removeprefix(f"server {url}").lstrip(": "), facts)


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of the table, the head first."""
    cells = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _cells(row: Row) -> tuple[str, ...]:
    facts, activity = row.facts, row.activity
    said = (facts.vllm, facts.weights, facts.world_size, "yes" if facts.paused else "no") if facts else (None,) * 4
    done = (activity.running, activity.waiting, activity.kv_cache) if activity else (None,) * 3
    shown = [
        "-" if value is None else f"{value:.0%}" if isinstance(value, float) else str(value) for value in said + done
    ]
    return row.url, "no" if row.problem else "yes", *shown


def warnings(rows: Sequence[Row]) -> list[str]:
    """What is wrong with servers, a line each."""
    lines = [f"{row.url}: {row.problem}" for row in rows if row.problem is not None]
    for row in rows:
        if row.facts is not None:
            try:
                warning = vllm_api.warn_if_untested(row.facts.vllm)
            except UserError as error:
                warning = str(error)
            lines += [f"warning: {warning}"] if warning else []
    weights = {row.facts.weights for row in rows if row.facts is not None}
    if len(weights) > 1:
        lines.append(f"warning: the servers have different weights: versions {', '.join(map(str, sorted(weights)))}")
    return lines

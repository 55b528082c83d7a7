"""What a controller and its workers say to each other: frames of a JSON header and raw arrays, over a socket pair."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from dapo_megatron.rollout.requests import AnswerTask, Generated, Sampling, Server
from dapo_megatron.types import Prompt, Sample, Steps

Arrays = list[NDArray[Any]]

_LENGTHS = struct.Struct("<IQ")  # bytes of header and of arrays
UNSENT_BYTES = 16 * 2**20
"""More than this waits in no sender's buffer: who sends waits instead."""


class Channel:
    """One end of a stream socket. Senders wait while the other side does not read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)

    @classmethod
    async def open(cls, end: socket.socket) -> "Channel":
        """The channel over a connected socket, which it closes."""
        return cls(*await asyncio.open_connection(sock=end, limit=2**20))

    async def send(self, kind: str, members: dict[str, Any] | None = None, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Send a frame. Raises ConnectionError when the other side is gone."""
        shapes = [(array.dtype.str, array.shape) for array in arrays]
        header = orjson.dumps({"kind": kind, "arrays": shapes, **(members or {})})
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays if array.size]
        self._writer.write(b"".join([_LENGTHS.pack(len(header), sum(map(len, parts))), header, *parts]))
        await self._writer.drain()

    async def receive(self) -> tuple[dict[str, Any], Arrays] | None:
        """The header of the next frame and its arrays, read-only; None when the other side is gone."""
        try:
            header_length, length = _LENGTHS.unpack(await self._reader.readexactly(_LENGTHS.size))
            header = orjson.loads(await self._reader.readexactly(header_length))
            return header, _arrays(header["arrays"], await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def close(self) -> None:
        """Close this end; what was not sent is lost."""
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def _arrays(shapes: list[tuple[str, list[int]]], data: bytes) -> Arrays:
    arrays, at = [], 0
    for name, shape in shapes:
        dtype, count = np.dtype(name), int(np.prod(shape))
        arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape) if count else np.zeros(shape, dtype))
        at += count * dtype.itemsize
    return arrays


def pack_task(server: Server, task: AnswerTask) -> tuple[dict[str, Any], Arrays]:
    """A task and the server to run it on, for `Channel.send`."""
    prompt = task.prompt
    members = {
        "server": asdict(server),
        "request_id": task.request_id,
        "prompt": {"id": prompt.id, "ground_truth": prompt.ground_truth, "data_source": prompt.data_source},
        "sampling": asdict(task.sampling),
        "finish_reason": task.so_far.finish_reason,
        "by_rule": task.by_rule,
        "version": task.version,
    }
    return members, [np.array(prompt.token_ids, np.int32), *_generated_arrays(task.so_far)]


def unpack_task(members: dict[str, Any], arrays: Arrays) -> tuple[Server, AnswerTask]:
    """What `pack_task` was given."""
    prompt_ids, *so_far = arrays
    sampling = members["sampling"]
    task = AnswerTask(
        members["request_id"],
        Prompt(token_ids=tuple(prompt_ids.tolist()), **members["prompt"]),
        Sampling(**sampling | {"stop_token_ids": tuple(sampling["stop_token_ids"])}),
        unpack_generated(members, so_far),
        members["by_rule"],
        members["version"],
    )
    return Server(**members["server"]), task


def pack_generated(answer: Generated) -> tuple[dict[str, Any], Arrays]:
    """An answer or a part of one, for `Channel.send`."""
    return {"finish_reason": answer.finish_reason}, _generated_arrays(answer)


def unpack_generated(members: dict[str, Any], arrays: Arrays) -> Generated:
    """What `pack_generated` was given."""
    token_ids, log_probs, versions, routes = arrays
    return Generated(token_ids, log_probs, versions, members["finish_reason"], routes)


def pack_sample(sample: Sample) -> tuple[dict[str, Any], Arrays]:
    """A graded answer, for `Channel.send`."""
    members = {
        "finish_reason": sample.finish_reason,
        "correct": sample.correct,
        "reward": sample.reward,
        "score": sample.score,
        "reason": sample.reason,
    }
    # The routes, of 2 bytes each, stand last: the others stay aligned.
    arrays = [sample.token_ids, sample.log_probs, sample.versions, sample.steps.places, sample.steps.rewards]
    return members, [*arrays, sample.routes]


def unpack_sample(members: dict[str, Any], arrays: Arrays) -> Sample:
    """What `pack_sample` was given."""
    token_ids, log_probs, versions, places, rewards, routes = arrays
    return Sample(
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=members["finish_reason"],
        versions=versions,
        correct=members["correct"],
        reward=members["reward"],
        score=members["score"],
        reason=members["reason"],
        steps=Steps(places, rewards),
        routes=routes,
    )


def _generated_arrays(answer: Generated) -> Arrays:
    return [answer.token_ids, answer.log_probs, answer.versions, answer.routes]

"""A training batch as compact arrays, and those arrays as bytes: for the wire and for the journal.

The bytes are NumPy's npz format without pickle; what is not an array stands in it as JSON.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo_megatron.types import NO_ROUTES, BatchHeader, Bool, Float32, Group, Int16, Int32, Sample, TokenBlock

NO_ARRAYS = ("step", "oldest_in_loss", "stats", "cursor")
HEADER_ARRAYS = tuple(f.name for f in fields(BatchHeader) if f.name not in NO_ARRAYS)
ADDED_ARRAYS = ("step_responses", "step_places", "step_rewards", "run_responses", "run_versions", "run_lengths")
"""Of a header, which older records lack; they were empty then."""
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class BatchTokens:
    """The token data of a whole batch; a prompt stands once per group."""

    prompt_tokens: Int32  # [sum of prompt_lengths]
    response_tokens: Int32  # [sum of response_lengths]
    rollout_log_probs: Float32  # [sum of response_lengths]
    routes: Int16  # [sum of both lengths over the responses, L, k], or empty


def build_batch(
    step: int, groups: Sequence[Group], stats: dict[str, float], cursor: dict[str, Any]
) -> tuple[BatchHeader, BatchTokens]:
    """Flatten the groups of a batch, in the order given. Responses of one group stand together."""
    samples = [sample for group in groups for sample in group.samples]
    runs = [version_runs(sample.versions) for sample in samples]
    header = BatchHeader(
        step=step,
        groups=_int32([index for index, group in enumerate(groups) for _ in group.samples]),
        draws=_int32([group.draw for group in groups]),
        prompt_ids=_int32([group.prompt.id for group in groups]),
        prompt_lengths=_int32([len(group.prompt.token_ids) for group in groups]),
        response_lengths=_int32([len(sample.token_ids) for sample in samples]),
        rewards=np.array([sample.reward for sample in samples], dtype=np.float32),
        correct=_bool([sample.correct for sample in samples]),
        truncated=_bool([sample.finish_reason == "length" for sample in samples]),
        step_responses=np.repeat(
            np.arange(len(samples), dtype=np.int32), [len(sample.steps.places) for sample in samples]
        ),
        step_places=_joined([sample.steps.places for sample in samples], np.int32),
        step_rewards=_joined([sample.steps.rewards for sample in samples], np.float32),
        run_responses=np.repeat(np.arange(len(samples), dtype=np.int32), [len(lengths) for _, lengths in runs]),
        run_versions=_joined([versions for versions, _ in runs], np.int32),
        run_lengths=_joined([lengths for _, lengths in runs], np.int32),
        stats=stats,
        cursor=cursor,
    )
    return header, _tokens(groups, samples)


def _tokens(groups: Sequence[Group], samples: Sequence[Sample]) -> BatchTokens:
    return BatchTokens(
        prompt_tokens=_joined([_int32(group.prompt.token_ids) for group in groups], np.int32),
        response_tokens=_joined([sample.token_ids for sample in samples], np.int32),
        rollout_log_probs=_joined([sample.log_probs for sample in samples], np.float32),
        routes=_routes(
            [sample.routes for sample in samples],
            [len(group.prompt.token_ids) + len(sample.token_ids) for group in groups for sample in group.samples],
        ),
    )


def version_runs(versions: Int32) -> tuple[Int32, Int32]:
    """The runs of equal numbers in int32 [n]: the number of each and its length, int32 [V]."""
    starts = np.flatnonzero(np.diff(versions, prepend=-1))  # no version is negative
    return versions[starts], np.diff(starts, append=len(versions)).astype(np.int32)


def _routes(parts: Sequence[Int16], lengths: Sequence[int]) -> Int16:
    """One after the other, [sum of lengths, L, k], -1 for a sequence without; empty where none has any."""
    known = next((part for part in parts if len(part)), NO_ROUTES)
    if not len(known):
        return NO_ROUTES
    unknown = np.full((1, *known.shape[1:]), -1, np.int16)
    pairs = zip(parts, lengths, strict=True)
    return np.concatenate([part if len(part) else unknown.repeat(length, axis=0) for part, length in pairs])


def select(header: BatchHeader, tokens: BatchTokens, responses: Int32) -> TokenBlock:
    """The token data of `responses` (int32 [r], indices into the header's [R] arrays), in that order.

    Raises:
        IndexError: when an index is not one of the batch's.
    """
    if len(responses) and (responses.min() < 0 or responses.max() >= header.num_responses):
        raise IndexError(f"the batch of step {header.step} has {header.num_responses} responses")
    groups = header.groups[responses]
    prompts = _spans(header.prompt_lengths, groups)
    answers = _spans(header.response_lengths, responses)
    sequences = _spans(header.sequence_lengths, responses) if len(tokens.routes) else []
    return TokenBlock(
        responses=responses,
        prompt_lengths=header.prompt_lengths[groups],
        response_lengths=header.response_lengths[responses],
        prompt_tokens=_joined([tokens.prompt_tokens[span] for span in prompts], np.int32),
        response_tokens=_joined([tokens.response_tokens[span] for span in answers], np.int32),
        rollout_log_probs=_joined([tokens.rollout_log_probs[span] for span in answers], np.float32),
        routes=np.concatenate([tokens.routes[span] for span in sequences]) if sequences else NO_ROUTES,
    )


def encode_header(header: BatchHeader) -> bytes:
    """A header as bytes."""
    return _encode(_header_arrays(header))


def decode_header(data: bytes) -> BatchHeader:
    """The header that `encode_header` wrote. Raises ValueError for anything else."""
    return _header(_decode(data))


def encode_block(block: TokenBlock) -> bytes:
    """A token block as bytes."""
    return _encode({f.name: getattr(block, f.name) for f in fields(block)})


def decode_block(data: bytes) -> TokenBlock:
    """The block that `encode_block` wrote. Raises ValueError for anything else."""
    arrays = _decode(data)
    return TokenBlock(**{f.name: _entry(arrays, f.name) for f in fields(TokenBlock)})


def encode_batch(header: BatchHeader, tokens: BatchTokens) -> bytes:
    """A whole batch as bytes."""
    return _encode(_header_arrays(header) | {f.name: getattr(tokens, f.name) for f in fields(tokens)})


def decode_batch(data: bytes) -> tuple[BatchHeader, BatchTokens]:
    """The batch that `encode_batch` wrote. Raises ValueError for anything else."""
    arrays = _decode(data)
    header = _header(arrays)
    arrays.setdefault("routes", NO_ROUTES)  # older records lack it
    return header, BatchTokens(**{f.name: _entry(arrays, f.name) for f in fields(BatchTokens)})


def _header_arrays(header: BatchHeader) -> Arrays:
    rest = json.dumps({"step": header.step, "stats": header.stats, "cursor": header.cursor}).encode()
    return {name: getattr(header, name) for name in HEADER_ARRAYS} | {"json": np.frombuffer(rest, dtype=np.uint8)}


def _header(arrays: Arrays) -> BatchHeader:
    members: dict[str, Any] = {
        name: _entry(arrays, name) for name in HEADER_ARRAYS if name in arrays or name not in ADDED_ARRAYS
    }
    return BatchHeader(**members, **json.loads(_entry(arrays, "json").tobytes()))


def _entry(arrays: Arrays, name: str) -> NDArray[Any]:
    if name not in arrays:
        raise ValueError(f"the data has no {name}")
    return arrays[name]


def _encode(arrays: Arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _decode(data: bytes) -> Arrays:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return dict(file)
    except Exception as error:  # zipfile and NumPy raise many types for damaged data
        raise ValueError(f"not an intact npz archive: {error}") from error


def _spans(lengths: Int32, members: Int32) -> list[slice]:
    """Where each member's tokens stand in the flat array of all."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return [slice(int(ends[m] - lengths[m]), int(ends[m])) for m in members]


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.int32] | type[np.float32]) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _int32(values: Sequence[Any]) -> Int32:
    return np.array(values, dtype=np.int32)


def _bool(values: Sequence[bool]) -> Bool:
    return np.array(values, dtype=np.bool_)

"""Batches as arrays, as bytes, on disk, and replayed."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.errors import UserError
from dapo_megatron.rollout.blocks import (
    BatchTokens,
    build_batch,
    decode_batch,
    decode_block,
    decode_header,
    encode_batch,
    encode_block,
    encode_header,
    select,
)
from dapo_megatron.rollout.handle import Replay
from dapo_megatron.rollout.journal import Journal
from dapo_megatron.types import BatchHeader, Group, Prompt, Sample, Steps

STATS = {"kept": 2.0, "accuracy": float("nan")}


def make_batch(sizes: list[tuple[int, list[int]]], step: int = 1) -> tuple[BatchHeader, BatchTokens, list[Group]]:
    """A batch whose groups have a prompt of the first length and responses of the lengths in the list."""
    rng = np.random.default_rng(0)
    groups = []
    for index, (prompt_length, lengths) in enumerate(sizes):
        samples = tuple(
            Sample(
                token_ids=rng.integers(0, 150_000, n).astype(np.int32),
                log_probs=rng.standard_normal(n).astype(np.float32),
                finish_reason="length" if n % 2 else "stop",
                versions=np.sort(rng.integers(step, step + 3, n)).astype(np.int32),
                correct=bool(n % 3),
                reward=n / 7,
                score=float(bool(n % 3)),
                steps=Steps(np.arange(0, n, 2, dtype=np.int32), rng.standard_normal((n + 1) // 2).astype(np.float32)),
            )
            for n in lengths
        )
        prompt = Prompt(id=100 + index, token_ids=tuple(range(index, index + prompt_length)), ground_truth="")
        groups.append(Group(draw=10 + index, prompt=prompt, samples=samples))
    return *build_batch(step, groups, STATS, {"drawn": 12}), groups


def assert_same(left: object, right: object) -> None:
    for name, value in vars(left).items():
        other = getattr(right, name)
        np.testing.assert_equal(other, value)
        if isinstance(value, np.ndarray):
            assert other.dtype == value.dtype, name


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 6), min_size=1, max_size=4)), max_size=5), st.data()
)
def test_selected_tokens_are_those_of_the_answers(sizes: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    header, tokens, groups = make_batch(sizes)
    answers = [(group, sample) for group in groups for sample in group.samples]
    assert header.num_responses == len(answers)
    indices = st.integers(0, max(0, len(answers) - 1))
    chosen = data.draw(st.lists(indices, max_size=6 if answers else 0))
    block = decode_block(encode_block(select(header, tokens, np.array(chosen, dtype=np.int32))))
    prompt_at = response_at = 0
    for position, index in enumerate(chosen):
        group, sample = answers[index]
        prompt_end = prompt_at + block.prompt_lengths[position]
        response_end = response_at + block.response_lengths[position]
        assert tuple(block.prompt_tokens[prompt_at:prompt_end]) == group.prompt.token_ids
        np.testing.assert_array_equal(block.response_tokens[response_at:response_end], sample.token_ids)
        np.testing.assert_array_equal(block.rollout_log_probs[response_at:response_end], sample.log_probs)
        assert header.rewards[index] == np.float32(sample.reward)
        assert header.truncated[index] == (sample.finish_reason == "length")
        assert header.draws[header.groups[index]] == group.draw
        steps = header.step_responses == index
        np.testing.assert_array_equal(header.step_places[steps], sample.steps.places)
        np.testing.assert_array_equal(header.step_rewards[steps], sample.steps.rewards)
        prompt_at, response_at = prompt_end, response_end
    assert (prompt_at, response_at) == (len(block.prompt_tokens), len(block.response_tokens))


@pytest.mark.parametrize("sizes", [[], [(3, [2, 0, 5]), (1, [1, 1, 1])]])
def test_a_header_comes_back_from_bytes(sizes: list[tuple[int, list[int]]]) -> None:
    header, _, _ = make_batch(sizes)
    assert_same(decode_header(encode_header(header)), header)
    assert header.versions.shape == (header.num_responses, 2)
    steps = sum((n + 1) // 2 for _, lengths in sizes for n in lengths)
    for name, dtype in (("responses", np.int32), ("places", np.int32), ("rewards", np.float32)):
        array = getattr(header, f"step_{name}")
        assert (array.shape, array.dtype) == ((steps,), dtype)


def test_an_answer_without_routes_among_others_has_unknown_ones() -> None:
    """Its server may have ended before it said them."""
    groups = make_batch([(2, [3, 4]), (1, [2])])[2]
    first, last = (np.full((length, 2, 1), length, np.int16) for length in (5, 3))
    for sample, routes in zip([groups[0].samples[0], groups[1].samples[0]], (first, last), strict=True):
        object.__setattr__(sample, "routes", routes)
    header, tokens = build_batch(1, groups, STATS, {})
    assert tokens.routes.tolist() == [[[5], [5]]] * 5 + [[[-1], [-1]]] * 6 + [[[3], [3]]] * 3
    assert select(header, tokens, np.array([1], np.int32)).routes.tolist() == [[[-1], [-1]]] * 6


def without(data: bytes, *names: str) -> bytes:
    """An archive that lacks some of its arrays."""
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in np.load(io.BytesIO(data)).items() if name not in names})
    return buffer.getvalue()


def test_a_record_from_before_process_rewards_has_none() -> None:
    header, tokens, _ = make_batch([(3, [2, 3])])
    old = without(encode_batch(header, tokens), "step_responses", "step_places", "step_rewards")
    decoded, _ = decode_batch(old)
    none = np.zeros(0, np.int32)
    expected = replace(header, step_responses=none, step_places=none, step_rewards=none.astype(np.float32))
    assert_same(decoded, expected)


def test_any_other_missing_array_is_named() -> None:
    header, _, _ = make_batch([(3, [2, 3])])
    with pytest.raises(ValueError, match="the data has no rewards"):
        decode_header(without(encode_header(header), "rewards"))


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_response_outside_the_batch_is_refused(wrong: int) -> None:
    header, tokens, _ = make_batch([(3, [2, 1, 5])])
    with pytest.raises(IndexError, match="3 responses"):
        select(header, tokens, np.array([0, wrong], dtype=np.int32))


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", draws=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="not an intact npz"):
        decode_header((tmp_path / "evil.npz").read_bytes())


def test_a_recorded_run_is_replayed(tmp_path: Path) -> None:
    batches = {step: make_batch([(step, [2, 3]), (1, [4, step])], step) for step in (1, 2)}
    for header, tokens, _ in batches.values():
        Journal(tmp_path).write(header, tokens)
    with Replay(tmp_path) as replay:
        replay.wait_ready(print)
        for step, (header, tokens, _) in batches.items():
            replay.begin(step, version=0, trained_version=0)
            assert_same(replay.wait(step, print, print), header)
            wanted = np.array([3, 0], dtype=np.int32)
            assert_same(replay.tokens(step, wanted), select(header, tokens, wanted))
        with pytest.raises(UserError, match="no batch of step 3"):
            replay.wait(3, print, print)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001.npz", "step_000002.npz"]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    header, tokens, _ = make_batch([(3, [2, 3])])
    journal = Journal(tmp_path)
    journal.write(header, tokens)
    content = bytearray(journal.path(1).read_bytes())
    content[len(content) // 2] ^= 0xFF
    journal.path(1).write_bytes(content)
    with pytest.raises(UserError, match=r"step_000001\.npz is damaged"):
        journal.read(1)

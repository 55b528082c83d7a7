"""Replies of `/inference/v1/generate` and the parameters sent to it."""

from typing import Any

import pytest

from dapo_megatron.rollout.client import NO_LOG_PROB, Generated, RequestError, parse_choice, sampling_params
from dapo_megatron.rollout.requests import Sampling


def choice(**changes: Any) -> dict[str, Any]:
    content = [{"token_id": 5, "logprob": -0.5, "rank": 1}, {"token_id": 6, "logprob": -1.5, "rank": 3}]
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    return {
        "token_ids": [5, 6],
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "weight_versions": spans,
    } | changes


def test_reply_is_read() -> None:
    assert parse_choice(choice()) == Generated((5, 6), (-0.5, -1.5), "stop", (3, 4))


def test_answer_of_the_weights_on_disk_has_version_0() -> None:
    assert parse_choice(choice(weight_versions=[{"version": "default", "start": 0, "end": 2}])).versions == (0, 0)


def test_answer_aborted_before_its_first_token_is_empty() -> None:
    answer = parse_choice(choice(token_ids=[], logprobs={"content": []}, weight_versions=None, finish_reason="abort"))
    assert answer == Generated((), (), "abort", (0, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_versions": None}, "without weight versions"),
        ({"logprobs": {"content": [{"logprob": -0.5}]}}, "without the log-prob of each token"),
        (
            {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": NO_LOG_PROB}]}},
            "without the log-prob of each token",
        ),
    ],
)
def test_incomplete_answer_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        parse_choice(choice(**changes))


def test_every_field_that_a_model_folder_could_set_is_sent() -> None:
    sent = sampling_params(Sampling(max_tokens=9, temperature=0.5, stop_token_ids=(7,), seed=3))
    # The fields of a generation_config.json that vLLM takes over as defaults.
    assert {"repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_tokens"} <= sent.keys()
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    assert {name: sent[name] for name in neutral} == neutral
    assert (sent["max_tokens"], sent["temperature"], sent["stop_token_ids"], sent["seed"]) == (9, 0.5, [7], 3)

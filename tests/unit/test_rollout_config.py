"""Rules of the rollout section's own options."""

import pytest
from pydantic import ValidationError

from dapo_megatron.config.rollout import RolloutConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adaptive_group": {"sizes": [8, 12]}}, r"samples_per_prompt \(16\) must be the largest of .* \(12\)"),
        (
            {"adaptive_group": {"sizes": [12, 8, 16]}},
            r"sizes \(\[12, 8, 16\]\) must be ascending numbers of at least 2",
        ),
        ({"adaptive_group": {"sizes": [8, 8, 16]}}, "must be ascending"),
        ({"adaptive_group": {"sizes": [1, 16]}}, "at least 2 answers"),
        ({"adaptive_group": {"sizes": [16]}}, "at least 2 items"),
        ({"adaptive_group": {"sizes": [8, 16], "acceptance": 1.0}}, "less than 1"),
        (
            {"adaptive_group": {"sizes": [8, 16]}, "dynamic_sampling": False},
            "adaptive_group needs dynamic_sampling=true",
        ),
        ({"history": {"rest_after": 0}}, "greater than or equal to 1"),
        ({"history": {"rest_epochs": 0}}, "greater than or equal to 1"),
        ({"history": {"hard_every": 1}}, "greater than or equal to 2"),
        ({"history": {"rest": 1}}, "Extra inputs are not permitted"),
        ({"max_staleness": 1}, r"\(1\) must be 0 or null with pipeline=sync and partial_rollouts=requeue"),
        (
            {"partial_rollouts": "resume", "max_staleness": 0},
            r"\(0\) must be at least 1 with pipeline=sync and .*resume",
        ),
        ({"pipeline": "one_step_off", "max_staleness": 0}, r"\(0\) must be at least 1 with pipeline=one_step_off and "),
        (
            {"pipeline": "one_step_off", "partial_rollouts": "resume", "max_staleness": 1},
            r"\(1\) must be at least 2 with pipeline=one_step_off and partial_rollouts=resume",
        ),
        ({"pipeline": "async", "max_staleness": 0}, r"\(0\) must be at least 1 with pipeline=async"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutConfig.model_validate(values)


def test_sizes_up_to_the_configured_one_are_accepted() -> None:
    config = RolloutConfig.model_validate({"adaptive_group": {"sizes": [8, 12, 16]}})
    assert config.adaptive_group is not None
    assert config.adaptive_group.acceptance == 0.9


@pytest.mark.parametrize(
    ("values", "bound", "ahead"),
    [
        ({}, 0, 0),
        ({"max_staleness": 0}, 0, 0),
        ({"partial_rollouts": "resume"}, 1, 0),
        ({"partial_rollouts": "resume", "max_staleness": 3}, 3, 0),
        ({"pipeline": "one_step_off"}, 1, 1),
        ({"pipeline": "one_step_off", "max_staleness": 2}, 2, 1),
        ({"pipeline": "one_step_off", "partial_rollouts": "resume"}, 2, 1),
        ({"pipeline": "async"}, 1, 1),
        ({"pipeline": "async", "max_staleness": 3}, 3, 3),
        ({"pipeline": "async", "partial_rollouts": "resume"}, 1, 1),
    ],
)
def test_bound_on_staleness_and_how_far_to_look_ahead(values: dict[str, object], bound: int, ahead: int) -> None:
    config = RolloutConfig.model_validate(values)
    assert (config.staleness_bound, config.steps_ahead) == (bound, ahead)

"""Presets: what each sets, what wins over it, and the rules of the keys that they bring together."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_helpers import write_config

from dapo_megatron.config.load import load_config
from dapo_megatron.config.preset import FOLDER, preset_names, preset_values
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError

CHAIN = ["naive_grpo", "+overlong_filter", "+clip_higher", "+soft_overlong", "+token_loss", "+dynamic_sampling"]
PRESETS = [
    *sorted(CHAIN),
    "cispo",
    "dapo",
    "dapo_with_kl",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "ppo",
    "r1_zero",
    "reinforce_pp",
    "rloo",
]
PAIRS = ["rollout.samples_per_prompt=2"]  # the groups of the config in config_helpers have 4


def resolved(folder: Path, *overrides: str, **sections: Any) -> Config:
    """The config of config_helpers with overrides; where it is dpo, with groups of two."""
    pairs = PAIRS if "algorithm=dpo" in overrides else []
    return load_config(write_config(folder, **sections), [*overrides, *pairs])


def message(folder: Path, *overrides: str, **sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_config(write_config(folder, **sections), overrides)
    return str(caught.value)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing(ours: Config, others: Config) -> set[str]:
    """Keys whose resolved values differ, the preset's name aside."""
    values, expected = dict(flat(ours.model_dump())), dict(flat(others.model_dump()))
    assert values.keys() == expected.keys()
    return {key for key, value in values.items() if value != expected[key]} - {"algorithm.preset"}


def test_these_are_the_presets() -> None:
    assert sorted(preset_names()) == sorted(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_filling_in_changes_what_is_not_said_and_nothing_when_done_again(name: str, tmp_path: Path) -> None:
    config = resolved(tmp_path, f"algorithm={name}")
    assert config.algorithm.preset == name
    values = dict(flat(config.model_dump()))
    for key, wanted in flat(preset_values(name)):
        assert values[key] == (1 if wanted == "auto" else wanted), key
    assert Config.model_validate(config.model_dump()) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_the_same_from_the_file_and_the_command_line(name: str, tmp_path: Path) -> None:
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 2 if name == "dpo" else 4, "max_tokens": 8}
    named = resolved(tmp_path, algorithm=name, rollout=rollout)
    assert resolved(tmp_path, algorithm={"preset": name}, rollout=rollout) == named
    assert resolved(tmp_path, f"algorithm={name}", rollout=rollout) == named
    assert resolved(tmp_path, f"algorithm={name}", algorithm="grpo", rollout=rollout) == named
    assert resolved(tmp_path, f"algorithm={{preset: {name}}}", rollout=rollout) == named


@pytest.mark.parametrize(
    ("preset", "base", "keys"),
    [
        ("+overlong_filter", "naive_grpo", {"algorithm.overlong.filter"}),
        ("+clip_higher", "+overlong_filter", {"algorithm.clip.high"}),
        ("+soft_overlong", "+clip_higher", {"algorithm.overlong.cache_tokens"}),
        ("+token_loss", "+soft_overlong", {"algorithm.aggregation"}),
        ("+dynamic_sampling", "+token_loss", {"rollout.dynamic_sampling"}),
        ("dapo", "+dynamic_sampling", {"algorithm.overlong.filter"}),
        ("dapo_with_kl", "dapo", {"algorithm.kl.coefficient"}),
        ("grpo", "naive_grpo", set()),
        ("r1_zero", "grpo", {"algorithm.kl.coefficient"}),
        ("rloo", "grpo", {"algorithm.advantage.estimator", "algorithm.aggregation"}),
        ("dr_grpo", "grpo", {"algorithm.advantage.estimator", "algorithm.aggregation"}),
    ],
)
def test_a_preset_differs_from_its_base_in_what_its_name_says(
    preset: str, base: str, keys: set[str], tmp_path: Path
) -> None:
    assert differing(resolved(tmp_path, f"algorithm={preset}"), resolved(tmp_path, f"algorithm={base}")) == keys


def test_without_a_preset_the_defaults_are_dapo_without_punishment(tmp_path: Path) -> None:
    plain = resolved(tmp_path)
    assert plain.algorithm.preset is None
    assert differing(resolved(tmp_path, "algorithm=dapo"), plain) == {"algorithm.overlong.cache_tokens"}


@pytest.mark.parametrize("overrides", [["algorithm.clip.high=0.3", "algorithm=grpo"], ["algorithm=grpo"] * 2])
def test_the_command_line_wins_in_either_order(overrides: list[str], tmp_path: Path) -> None:
    config = resolved(tmp_path, *overrides, "algorithm.clip.high=0.3")
    assert config.algorithm.preset == "grpo"
    assert (config.algorithm.clip.low, config.algorithm.clip.high) == (0.2, 0.3)
    assert config.algorithm.aggregation == "sequence_mean"


def test_keys_of_the_command_line_go_beside_a_name_in_the_file(tmp_path: Path) -> None:
    config = resolved(tmp_path, "algorithm.clip.high=0.3", algorithm="grpo")
    assert config.algorithm.preset == "grpo"
    assert (config.algorithm.clip.high, config.algorithm.aggregation) == (0.3, "sequence_mean")


def test_keys_of_the_file_win_over_its_preset_and_over_that_of_the_command_line(tmp_path: Path) -> None:
    algorithm = {"preset": "dapo", "clip": {"high": 0.4}, "overlong": {"cache_tokens": 3}}
    config = resolved(tmp_path, algorithm=algorithm)
    assert (config.algorithm.clip.low, config.algorithm.clip.high) == (0.2, 0.4)
    assert config.algorithm.overlong.cache_tokens == 3
    replaced = resolved(tmp_path, "algorithm=cispo", algorithm=algorithm)
    assert (replaced.algorithm.loss, replaced.algorithm.clip.low, replaced.algorithm.clip.high) == ("cispo", 1.0, 0.4)
    assert replaced.algorithm.clip.dual is None


def test_keys_win_in_the_other_sections_of_a_preset(tmp_path: Path) -> None:
    assert resolved(tmp_path, "algorithm=grpo").rollout.dynamic_sampling is False
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 8, "dynamic_sampling": True}
    assert resolved(tmp_path, "algorithm=grpo", rollout=rollout).rollout.dynamic_sampling is True
    assert resolved(tmp_path, "algorithm=grpo", "rollout.dynamic_sampling=true").rollout.dynamic_sampling is True


def test_null_wins_like_any_value(tmp_path: Path) -> None:
    assert resolved(tmp_path, "algorithm=ppo", "algorithm.advantage.gamma=null").algorithm.advantage.gamma is None
    assert resolved(tmp_path, "algorithm=null", algorithm="grpo") == resolved(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "cache"),
    [
        (["rollout.max_tokens=100"], 20),
        (["rollout.max_tokens=104"], 20),
        ([], 1),  # of the 8 tokens in config_helpers
        (["rollout.max_tokens=4"], 0),
        (["rollout.max_tokens=100", "algorithm.overlong.cache_tokens=7"], 7),
    ],
)
def test_auto_is_a_fifth_of_the_most_tokens(overrides: list[str], cache: int, tmp_path: Path) -> None:
    assert resolved(tmp_path, "algorithm=dapo", *overrides).algorithm.overlong.cache_tokens == cache


def test_auto_needs_no_preset_and_reads_the_default(tmp_path: Path) -> None:
    overrides = ["algorithm.overlong.cache_tokens=auto", "training.micro_batch_tokens=24576", "training.mini_batch=512"]
    config = resolved(tmp_path, *overrides, rollout={})
    assert (config.rollout.max_tokens, config.algorithm.overlong.cache_tokens) == (20480, 4096)  # the paper's


def test_a_preset_stays_filled_in_where_a_section_is_replaced(tmp_path: Path) -> None:
    """Assignment validates again, with the preset's name still there."""
    config = resolved(tmp_path, "algorithm=grpo", "algorithm.clip.high=0.3")
    config.run = config.run.model_copy(update={"steps": 9})
    assert (config.run.steps, config.algorithm.clip.high, config.rollout.dynamic_sampling) == (9, 0.3, False)


@pytest.mark.parametrize("name", ["dapoo", "+", "../presets/dapo", "", "Dapo"])
def test_an_unknown_preset_names_them_all(name: str, tmp_path: Path) -> None:
    text = message(tmp_path, f"algorithm.preset='{name}'")
    assert f"algorithm.preset ({name}) must be one of +clip_higher, " in text
    assert all(f" {preset}" in text for preset in PRESETS)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm.kl={coefficient: 0.1, estimator: k1}"],
            "algorithm.kl: estimator (k1) must be k2 or k3 with in=loss",
        ),
        (["algorithm.kl.in=both"], "algorithm.kl.in='both' is not allowed, it must be 'loss' or 'reward'"),
        (["algorithm.kl.coefficient=-1"], "algorithm.kl.coefficient=-1 is not allowed, it must be greater than or"),
        (["algorithm.kl.coefficient=.nan"], "algorithm.kl.coefficient=nan is not allowed, it must be"),
        (
            ["algorithm.advantage.gamma=0.9"],
            "algorithm.advantage: gamma (0.9) is read by the estimator gae only, not by group_norm",
        ),
        (
            ["algorithm=grpo", "algorithm.advantage.whiten=false"],
            "algorithm.advantage: whiten (false) is read by the estimator gae only, not by group_norm",
        ),
        (
            ["algorithm=ppo", "algorithm.advantage.std=sample"],
            "algorithm.advantage: std (sample) is read by the estimator group_norm only, not by gae",
        ),
        (["algorithm=ppo", "algorithm.advantage.gamma=0"], "algorithm.advantage.gamma=0 is not allowed, it must be"),
        (["algorithm=ppo", "algorithm.advantage.lam=1.5"], "algorithm.advantage.lam=1.5 is not allowed, it must be"),
        (["algorithm=ppo", "critic.value_clip=0"], "critic.value_clip=0 is not allowed, it must be greater than 0"),
        (
            ["algorithm=rloo", "rollout.samples_per_prompt=1"],
            "rollout.samples_per_prompt (1) must be at least 2 with algorithm.advantage.estimator=leave_one_out",
        ),
        (
            ["algorithm=ppo", "rollout.samples_per_prompt=1", "rollout.dynamic_sampling=true"],
            "rollout.dynamic_sampling (true) must be false with rollout.samples_per_prompt=1",
        ),
        (["algorithm=grpo", "algorithm.clip.low=0.3"], "algorithm: clip.high (0.2) must be at least clip.low (0.3)"),
        (["algorithm=cispo", "algorithm.clip.dual=3"], "algorithm: clip.dual (3) must be null with loss=cispo"),
        (["algorithm.overlong.cache_tokens=half"], "algorithm.overlong.cache_tokens='half' is not allowed, it must be"),
        (["algorithm=dpo"], "rollout.samples_per_prompt (4) must be 2 with algorithm.loss=dpo"),
        (["algorithm.dpo.beta=0.3"], "algorithm: dpo is read with loss=dpo only, not with loss=ppo_clip"),
        (["algorithm=dpo", *PAIRS, "algorithm.dpo.beta=0"], "algorithm.dpo.beta=0 is not allowed, it must be greater"),
        (["algorithm=dpo", *PAIRS, "algorithm.dpo.label_smoothing=0.5"], "algorithm.dpo.label_smoothing=0.5 is not"),
        (
            ["algorithm=dpo", *PAIRS, "algorithm.aggregation=token_mean"],
            "algorithm: aggregation (token_mean) must be sequence_sum with loss=dpo",
        ),
        (
            ["algorithm=dpo", *PAIRS, "algorithm.kl.coefficient=0.1"],
            "algorithm: kl.coefficient (0.1) must be 0.0 with loss=dpo",
        ),
        (
            ["algorithm=dpo", *PAIRS, "algorithm.old_log_probs=rollout"],
            "algorithm: old_log_probs (rollout) must be recompute with loss=dpo",
        ),
        (
            ["algorithm=dpo", *PAIRS, "algorithm.rollout_correction.mode=tis"],
            "algorithm: rollout_correction.mode (tis) must be none with loss=dpo",
        ),
        (
            ["algorithm=dpo", *PAIRS, "algorithm.overlong.filter=true"],
            "algorithm: overlong.filter (true) must be false with loss=dpo",
        ),
        (
            ["algorithm=dpo", *PAIRS, "algorithm.advantage.estimator=group_mean"],
            "algorithm: advantage.estimator (group_mean) must be group_norm with loss=dpo",
        ),
        (
            ["algorithm=dpo", *PAIRS, "rollout.dynamic_sampling=true"],
            "rollout.dynamic_sampling (true) must be false with algorithm.loss=dpo",
        ),
        (
            ["algorithm=dpo", *PAIRS, "evaluation.data={path: rows.jsonl}"],
            "evaluation.data (a section) must be null with algorithm.loss=dpo",
        ),
        (["algorithm=dpo", *PAIRS, "rollout.replay=recorded"], "rollout.replay (recorded) must be null with"),
        (
            ["algorithm=dpo", *PAIRS, "training.mini_batch=4"],
            "training.mini_batch (4) must be 8 with algorithm.loss=dpo",
        ),
    ],
)
def test_each_rule_has_one_sentence(overrides: list[str], expected: str, tmp_path: Path) -> None:
    text = message(tmp_path, *overrides)
    assert expected in text
    assert "\n" not in text


def test_one_answer_per_prompt_is_enough_where_a_critic_compares(tmp_path: Path) -> None:
    config = resolved(tmp_path, "algorithm=ppo", "rollout.samples_per_prompt=1", "rollout.prompts_per_step=8")
    assert config.responses_per_step == 8


def test_unknown_keys_of_the_new_sections_name_the_nearest(tmp_path: Path) -> None:
    assert "did you mean algorithm.kl.in?" in message(tmp_path, "algorithm.kl.inn=loss")
    assert "did you mean algorithm.advantage.lam?" in message(tmp_path, "algorithm.advantage.lambda=0.9")
    assert "did you mean critic.optimizer.lr?" in message(tmp_path, "critic.lr=0.1")


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_says_what_it_is(name: str) -> None:
    """A comment comes first; what follows is the objective's alone."""
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert yaml.safe_load(text).keys() == {"algorithm", "rollout"}

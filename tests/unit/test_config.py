"""Loading a config: overrides, nearest keys, one clear sentence for each fault."""

import subprocess
import sys
from pathlib import Path

import pytest
from config_helpers import write_config

from dapo_megatron.config.load import load_config
from dapo_megatron.config.reference import config_keys, markdown
from dapo_megatron.errors import UserError

ROOT = Path(__file__).parents[2]
STALE = "algorithm.rollout_correction.max_token_staleness"


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_values_defaults_and_overrides(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=1e-5", 'rollout.stop=["\\n", "."]', "fleet.port=null", "data.train.limit=7"]
    config = load_config(write_config(tmp_path), overrides)
    assert config.rollout.samples_per_prompt == 4
    assert config.optimizer.lr == 1e-5
    assert config.rollout.stop == ["\n", "."]
    assert config.fleet.port is None
    assert config.data.train.limit == 7
    assert config.algorithm.clip.high == 0.28
    assert config.responses_per_step == 16


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("rollout.sample_per_prompt=3", "rollout.samples_per_prompt"),
        ("rolout.max_tokens=3", "rollout"),
        ("lr=1", "optimizer.lr"),
        ("training.lr=1", "optimizer.lr"),
        ("parallel.tensor_parallel=2", "parallel.tensor"),
        ("algorithm.clip.hihg=0.3", "algorithm.clip.high"),
        ("evaluation.data.arithmetic.problem=3", "evaluation.data.arithmetic.problems"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, override: str, nearest: str) -> None:
    key = override.partition("=")[0]
    text = message(write_config(tmp_path), override)
    assert "unknown key" in text
    assert f"did you mean {nearest}" in text
    assert key.split(".")[0] in text


def test_unknown_key_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = write_config(tmp_path, optimizer={"learning_rate": 1})
    assert message(path).startswith(f"{path}: unknown key optimizer.learning_rate; did you mean ")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "rollout.samples_per_prompt=1",
            "rollout.samples_per_prompt (1) must be at least 2 with algorithm.advantage.estimator=group_norm",
        ),
        ("run.steps=many", "run.steps='many' is not allowed, it must be a valid integer"),
        ("fleet.dtype=int8", "fleet.dtype='int8' is not allowed, it must be 'float32', 'bfloat16' or 'float16'"),
        ("rollout=5", "rollout must be a section of keys, not 5"),
        ("rollout.top_p=0.9", "top_p must be 1 for training"),
        (
            "algorithm={old_log_probs: rollout, rollout_correction: {mode: tis}}",
            "algorithm: rollout_correction.mode (tis) must be none with old_log_probs: rollout",
        ),
        ("training.mini_batch=6", "training.mini_batch (6) must be a multiple of rollout.samples_per_prompt (4)"),
        ("training.mini_batch=12", "(16) must be a multiple of training.mini_batch (12)"),
        ("training.micro_batch_tokens=100", "data.max_prompt_tokens + rollout.max_tokens = 136"),
        (
            "algorithm.overlong.cache_tokens=9",
            "algorithm.overlong.cache_tokens (9) must not exceed rollout.max_tokens (8)",
        ),
        (
            "algorithm.overlong.shift=past_max",
            "algorithm.overlong: shift=past_max needs cache_tokens > 0 (it is 0)",
        ),
        ("algorithm.overlong.shift=after", "algorithm.overlong.shift='after' is not allowed, it must be 'before_max'"),
        ("algorithm.overlong.brevity=-1", "algorithm.overlong.brevity=-1 is not allowed, it must be greater than or"),
        ("algorithm.overlong.brevity=.inf", "algorithm.overlong.brevity=inf is not allowed, it must be a finite"),
        ("algorithm.overlong.factor=.inf", "algorithm.overlong.factor=inf is not allowed, it must be a finite"),
        ("algorithm.overlong.filter=maybe", "algorithm.overlong.filter='maybe' is not allowed"),
        ("algorithm.clip.high=0.1", "algorithm: clip.high (0.1) must be at least clip.low (0.2); only loss=cispo"),
        ("algorithm.loss=cispo", "algorithm: clip.dual (10) must be null with loss=cispo, which has no dual clip"),
        ("algorithm.clip.low=0", "algorithm.clip.low=0 is not allowed, it must be greater than 0"),
        ("algorithm.clip.high=.inf", "algorithm.clip.high=inf is not allowed, it must be a finite number"),
        ("algorithm.clip.warmup={steps: 5, low: 0.1}", "the key algorithm.clip.warmup.high is required"),
        (
            "algorithm.clip.warmup={steps: 0, low: 0.1, high: 0.2}",
            "algorithm.clip.warmup.steps=0 is not allowed, it must be greater than or equal to 1",
        ),
        (
            "algorithm.clip.warmup={steps: 5, low: 0.2, high: 0.1}",
            "algorithm: clip.warmup.high (0.1) must be at least clip.warmup.low (0.2)",
        ),
        ("algorithm.entropy_coefficient=-0.1", "algorithm.entropy_coefficient=-0.1 is not allowed, it must be greater"),
        (
            "rollout={pipeline: async, replay: rollouts}",
            "rollout.pipeline (async) must be sync with rollout.replay, which trains on recorded answers",
        ),
        (
            "fleet.on_push=keep",
            "fleet.on_push (keep) must be abort unless rollout.pipeline=async: no answer is under way in a push",
        ),
        (
            "algorithm.rollout_correction.max_token_staleness=0",
            "algorithm.rollout_correction.max_token_staleness (0) must be less than rollout.max_staleness (0), or no",
        ),
        ("algorithm.rollout_correction.max_token_staleness=-1", "max_token_staleness=-1 is not allowed"),
        ("rollout.max_prompts_per_step=3", "max_prompts_per_step (3) must be at least prompts_per_step (4)"),
        (
            "algorithm.advantage.over=tokens",
            "algorithm.advantage: over (tokens) is read by the estimator reinforce_pp only, not by group_norm",
        ),
        ("data.train.path=rows.jsonl", "data.train: give exactly one of `path` and `arithmetic`"),
        ("run.steps", "the override 'run.steps' must have the form KEY=VALUE"),
        ("=3", "the override '=3' must have the form KEY=VALUE"),
        ("rollout.stop=[a", "the override 'rollout.stop=[a' cannot be applied"),
    ],
)
def test_each_rule_has_one_sentence(tmp_path: Path, override: str, expected: str) -> None:
    text = message(write_config(tmp_path), override)
    assert expected in text
    assert "\n" not in text


def test_cispo_takes_any_range_and_no_variant_of_clipping(tmp_path: Path) -> None:
    path, cispo = write_config(tmp_path), ["algorithm.loss=cispo", "algorithm.clip.dual=null"]
    wide = "algorithm.clip.warmup={steps: 5, low: 1, high: 0.1}"
    clip = load_config(path, [*cispo, "algorithm.clip.low=1", wide]).algorithm.clip
    assert (clip.low, clip.high, clip.dual, clip.by_sign) == (1.0, 0.28, None, False)
    text = message(path, *cispo, "algorithm.clip.by_sign=true")
    assert "algorithm: clip.by_sign (true) must be false with loss=cispo" in text


PAST_MAX = ["algorithm.overlong.shift=past_max", "algorithm.overlong.cache_tokens=16"]


PAIRS = ["algorithm=dpo", "rollout.dynamic_sampling=false", "rollout.samples_per_prompt=2", "training.mini_batch=8"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["rollout.pipeline=async", "rollout.max_staleness=2", "fleet.mode=colocated"],
            "rollout.pipeline (async) must be sync with fleet.mode=colocated: trainer and servers take turns",
        ),
        (
            ["rollout.pipeline=async", "rollout.max_staleness=2", f"{STALE}=2"],
            f"{STALE} (2) must be less than rollout.max_staleness (2), or no token is ever that old",
        ),
        (
            ["rollout.pipeline=one_step_off", f"{STALE}=0"],
            f"{STALE} (0) must be at least 1 with rollout.pipeline=one_step_off, where every token is a version old",
        ),
        (["rollout.partial_rollouts=resume", "rollout.replay=x"], "partial_rollouts (resume) must be requeue with"),
        (["rollout.selection=arrival", "rollout.replay=x"], "rollout.selection (arrival) must be draw_order with"),
        ([*PAIRS, "rollout.pipeline=one_step_off"], "(one_step_off) must be sync with algorithm.loss=dpo"),
        ([*PAIRS, "rollout.selection=arrival"], "(arrival) must be draw_order with algorithm.loss=dpo"),
        ([*PAIRS, "rollout.partial_rollouts=resume"], "(resume) must be requeue with algorithm.loss=dpo"),
    ],
)
def test_pipelines_fit_the_rest(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert expected in message(write_config(tmp_path), *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.pipeline=async", "rollout.max_staleness=2", f"{STALE}=1", "fleet.on_push=keep"],
        ["rollout.pipeline=async", f"{STALE}=0"],
        ["rollout.pipeline=one_step_off", "rollout.max_staleness=2", f"{STALE}=1"],
        ["rollout.partial_rollouts=resume", f"{STALE}=0"],
        PAIRS,
    ],
)
def test_pipelines_that_are_accepted(tmp_path: Path, overrides: list[str]) -> None:
    load_config(write_config(tmp_path), overrides)


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        ([], []),
        (["rollout.selection=arrival"], ["rollout.selection=arrival prefers short answers"]),
        (["rollout.pipeline=async"], ["rollout.pipeline=async trains on tokens of older weights"]),
        (["rollout.pipeline=one_step_off", "algorithm.rollout_correction.mode=tis"], []),
        (["rollout.pipeline=async", "algorithm.old_log_probs=rollout"], []),
    ],
)
def test_notes(tmp_path: Path, overrides: list[str], notes: list[str]) -> None:
    found = load_config(write_config(tmp_path), overrides).notes
    assert [text[: len(note)] for text, note in zip(found, notes, strict=True)] == notes


def test_answers_may_be_longer_where_the_penalty_grows_past_the_most_tokens(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    plain = load_config(path, ["algorithm.overlong.cache_tokens=4"])
    assert (plain.generation_limit, plain.longest_sequence) == (8, 136)
    longer = load_config(path, PAST_MAX)  # a cache of more than rollout.max_tokens is sound here
    assert (longer.rollout.max_tokens, longer.generation_limit, longer.longest_sequence) == (8, 24, 152)


def test_micro_batches_hold_the_longer_answers(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    load_config(path, [*PAST_MAX, "training.micro_batch_tokens=152"])
    text = message(path, *PAST_MAX, "training.micro_batch_tokens=151")
    assert "data.max_prompt_tokens + rollout.max_tokens + algorithm.overlong.cache_tokens = 152" in text


def test_one_answer_per_prompt_needs_an_estimator_without_groups(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    single = ["rollout.samples_per_prompt=1", "rollout.prompts_per_step=16"]
    estimator = "algorithm.advantage.estimator=reinforce_pp"
    assert "rollout.dynamic_sampling (true) must be false" in message(path, *single, estimator)
    config = load_config(path, [*single, estimator, "rollout.dynamic_sampling=false"])
    assert config.responses_per_step == 16


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    assert len(message(write_config(tmp_path), "run.steps=0", "optimizer.lr=0").splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {steps: 3", "is not valid YAML"),
        ("[1, 2]", "must hold sections"),
        ('run: {steps: 3, dir: "${nowhere}"}', "nowhere"),
        ("run: {steps: 3}", "the key run.dir is required"),
        ("run: 3", "run must be a section of keys, not 3"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert str(path) in message(path)
    assert expected in message(path)


def test_missing_file(tmp_path: Path) -> None:
    assert (
        message(tmp_path / "no.yaml")
        == f"{tmp_path / 'no.yaml'}: the config file cannot be read: No such file or directory"
    )


def test_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == markdown(), "run `make docs`"


def test_every_key_is_documented() -> None:
    keys = list(config_keys())
    assert len(keys) > 60
    assert [key.name for key in keys if not key.description] == []
    warmup = {f"algorithm.clip.warmup.{name}" for name in ("steps", "low", "high")}  # where the section is given
    given = warmup | {"rollout.adaptive_group.sizes"}
    assert {key.name for key in keys if key.default is None} == {"run.dir", "run.steps", "model.path"} | given


def test_command_line_and_monitor_load_no_torch() -> None:
    modules = "dapo_megatron.cli, dapo_megatron.config.preflight, dapo_megatron.monitoring.monitor"
    script = f"import sys, {modules}; print(sorted(sys.modules.keys() & {{'torch', 'vllm', 'megatron', 'scipy'}}))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"

"""A RolloutWork whose servers always say the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dapo_megatron.config.run import Config
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.rewards import RewardFunction
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.grader import Grader
from dapo_megatron.rollout.records import Records
from dapo_megatron.rollout.requests import AnswerTask, Generated, Server
from dapo_megatron.rollout.work import Data, RolloutWork
from dapo_megatron.types import Sample


def said(text: str, version: int = 3) -> Generated:
    """An answer, one token a character, as `tests.unit.config_helpers.write_model` makes tokenizers."""
    ids = [63 if character == "\n" else ord(character) - 32 for character in text]
    return Generated(
        np.array(ids, np.int32),
        np.full(len(ids), -0.5, np.float32),
        np.full(len(ids), version, np.int32),
        "stop",
    )


@dataclass
class OneText:
    """An engine whose servers say `text` with weights of `version`."""

    grader: Grader
    text: str
    version: int
    steps: list[int] = field(default_factory=list)  # that have ended

    async def answer(self, server: Server, task: AnswerTask, on_tokens: Callable[[int], None]) -> Sample:
        return self.grader.sample(said(self.text, self.version), task.prompt, task.by_rule)

    async def abort(self, server: Server, request_ids: Sequence[str]) -> None: ...

    def end_step(self, step: int) -> None:
        self.steps.append(step)


async def work_of(
    config: Config, data: Data, text: str, version: int = 3, function: RewardFunction | None = None
) -> RolloutWork:
    tokenizer = Tokenizer(config.model.path)
    limit = config.rollout.max_tokens
    grader = Grader(tokenizer, config.data.reward, config.rollout.stop, config.algorithm.overlong, limit, function)
    engine, records = OneText(grader, text, version), Records(Path(config.run.dir) / "rollouts")
    fleet = Fleet(engine, config.fleet, records)
    fleet.add(Server("0", "http://127.0.0.1:1", ""), version)
    return RolloutWork(config, data, tokenizer, fleet, engine, records)

"""What the controller asks of a server, and what comes back: the words that fleet, workers and sampler share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from dapo_megatron.types import NO_ROUTES, Float32, Int16, Int32, Prompt, Sample


@dataclass(frozen=True)
class Sampling:
    """How to sample. Everything else that vLLM knows is sent too, at the value that changes nothing.

    An answer ends with the model's end token (unless `ignore_eos`) or one of `stop_token_ids`, which stays in
    the answer, or after `max_tokens`. `temperature` 0 is greedy. `seed` makes one request repeatable.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class Generated:
    """An answer, or the part of one that has arrived: T generated tokens, the end token included.

    `log_probs` are natural, under the distribution that was sampled from. `versions` are those of the weights that each
    token was sampled with. `finish_reason` is "stop" or "length" for a whole answer, "partial" for a part. `routes` are
    those of prompt and answer, as in `Sample`.
    """

    token_ids: Int32  # [T]
    log_probs: Float32  # [T]
    versions: Int32  # [T]
    finish_reason: Literal["stop", "length", "partial"]
    routes: Int16 = field(default_factory=lambda: NO_ROUTES)  # [prompt + T, L, k], or empty


NOTHING = Generated(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "partial")
"""Of an answer that has not begun."""

UNKNOWN_VERSION = -1
"""Of tokens of which nobody knows the weights."""


@dataclass(frozen=True)
class Server:
    """A server under the name that the fleet gave it. One that was lost and came back has another `life`."""

    id: str
    url: str
    token: str
    life: int = 0


@dataclass(frozen=True, eq=False)
class AnswerTask:
    """One answer to `prompt`, which goes on after `so_far`. `request_id` is new for every attempt.

    `by_rule`: it is graded by the rule alone, as held-out answers are, also where training has a reward function.
    `version` is that of the weights that the server has: keys and values of others are not used, and tokens of which
    the server does not say the version, because the answer was cut off, are said to be of this one.
    """

    request_id: str
    prompt: Prompt
    sampling: Sampling
    so_far: Generated = NOTHING
    by_rule: bool = False
    version: int = UNKNOWN_VERSION


class RequestError(RuntimeError):
    """An answer was not completed; the text names server and reason.

    `partial` holds every token there is, those the attempt began with included. `kind`: the server did not do its part
    (`server`), the request was ended on purpose (`aborted`), or it can never succeed (`refused`).
    """

    def __init__(
        self, text: str, partial: Generated = NOTHING, kind: Literal["server", "aborted", "refused"] = "server"
    ) -> None:
        super().__init__(text)
        self.partial = partial
        self.kind = kind


class Engine(Protocol):
    """Runs answers on servers: in this process, or in workers."""

    async def answer(self, server: Server, task: AnswerTask, on_tokens: Callable[[int], None]) -> Sample:
        """A whole answer, graded. `on_tokens` is called with the number of tokens that have just arrived.

        Raises:
            RequestError: with what had arrived.
        """
        ...

    async def abort(self, server: Server, request_ids: Sequence[str]) -> None:
        """End requests; their `answer` raises RequestError of the kind `aborted`. Never raises."""
        ...

    def end_step(self, step: int) -> None:
        """Let the graders sum up a step's failures (`Grader.end_step`)."""
        ...

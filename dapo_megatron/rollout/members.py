"""The servers of a fleet as it sees them: what runs on each, and which weights each has had."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dapo_megatron.rollout.requests import Server
from dapo_megatron.types import Int32


class VersionError(RuntimeError):
    """Tokens are said to be of weights that their server did not have. Nothing that it says can be trained on."""


@dataclass(frozen=True)
class Member:
    """A server of the fleet at one moment. `joining`: it is healthy, but has no weights to sample with yet.

    `answers` are under way on it, and `tokens` are expected of them. In seconds: the age of the `oldest`, and the time
    since the last token came or the first of them began (`quiet`); None where none is under way.
    """

    id: str
    url: str
    token: str
    state: Literal["ready", "joining"]
    version: int | None
    answers: int
    tokens: int
    oldest: float | None
    quiet: float | None


@dataclass(eq=False)
class Attempt:
    """A request for an answer, under way on a server.

    `versions` are those of the server's weights since it began, the one it began with first. `ended`: the fleet itself
    ended it, and the answer goes on elsewhere, or later.
    """

    request_id: str
    group: Hashable
    prompt_length: int
    began: float
    versions: list[int]
    expected: int  # tokens still to come
    received: int = 0
    ended: Literal["aborted", "removed"] | None = None

    def check(self, server: Server, versions: Int32) -> None:
        """Raises VersionError unless the `versions` of this attempt's tokens, [T], can be."""
        steps = versions[np.flatnonzero(np.diff(versions, prepend=-2))].tolist()
        if not set(steps) <= set(self.versions) or steps != sorted(steps):
            raise VersionError(
                f"server {server.id} ({server.url}) says that it sampled an answer with weights {_listed(steps)}, but "
                f"since the answer began it had weights {_listed(self.versions)}: it was restarted or changed by "
                "somebody else"
            )


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, versions))


@dataclass(eq=False)
class Place:
    """A server and what runs on it. `now` of all methods is the time of a monotonic clock."""

    server: Server
    version: int | None
    rests: bool = False  # no answers begin: it keeps failing
    failures: int = 0  # in a row
    moved: float = 0.0  # when the last token came, or the first of the answers under way began
    load: int = 0  # tokens expected: of each answer, and of each group's prompt once
    attempts: dict[str, Attempt] = field(default_factory=dict)
    _groups: dict[Hashable, list[Attempt]] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether it has weights to sample with."""
        return self.version is not None

    def begin(self, attempt: Attempt) -> None:
        """An answer begins here."""
        if not self.attempts:
            self.moved = attempt.began
        self.attempts[attempt.request_id] = attempt
        self.load += attempt.expected
        if attempt.group not in self._groups:
            self.load += attempt.prompt_length
        self._groups.setdefault(attempt.group, []).append(attempt)

    def load_without(self, group: Hashable) -> int:
        """Tokens expected of answers of other groups."""
        own = self._groups.get(group, [])
        return self.load - sum(attempt.expected for attempt in own) - (own[0].prompt_length if own else 0)

    def arrived(self, attempt: Attempt, count: int, now: float) -> None:
        """`count` tokens came."""
        self.moved = now
        attempt.received += count
        come = min(count, attempt.expected - 1)  # one that is longer than expected has at least a token to come
        attempt.expected -= come
        self.load -= come

    def end(self, attempt: Attempt) -> None:
        """An answer ended, well or not."""
        del self.attempts[attempt.request_id]
        self.load -= attempt.expected
        self._groups[attempt.group].remove(attempt)
        if not self._groups[attempt.group]:
            del self._groups[attempt.group]
            self.load -= attempt.prompt_length

    def received(self, version: int, now: float) -> None:
        """It has other weights from now on; answers under way go on with them."""
        self.version = version
        self.moved = now
        for attempt in self.attempts.values():
            attempt.versions.append(version)

    def member(self, now: float) -> Member:
        """As others see it."""
        began = [attempt.began for attempt in self.attempts.values()]
        return Member(
            id=self.server.id,
            url=self.server.url,
            token=self.server.token,
            state="ready" if self.ready else "joining",
            version=self.version,
            answers=len(began),
            tokens=self.load,
            oldest=now - min(began) if began else None,
            quiet=now - self.moved if began else None,
        )

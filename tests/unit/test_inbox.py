"""How a worker joins a transfer group when others do not, and who is to blame for it."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron.sync import group as transfer
from dapo_megatron.sync.conductor import Calls
from dapo_megatron.sync.inbox import Inbox
from dapo_megatron.sync.server_admin import ServerAdmin, ServerError

HOST = "127.0.0.1"


@pytest.mark.parametrize(
    ("key", "timeout", "reason"),
    [
        (transfer.BROKEN, 60, "somebody gave up"),  # at once
        (None, 0.1, "not all workers have come"),
        (transfer.GO, 0.5, ""),  # the sender is gone since
    ],
)
def test_a_worker_that_cannot_join_blames_nobody(key: str | None, timeout: float, reason: str) -> None:
    store = transfer.open_store(HOST, 10)
    if key is not None:
        transfer.epoch_store(store, 3).set(key, "")
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{transfer.BROKEN_OFF} before it began: {reason}"):
        Inbox(
            0,
            server=0,
            servers=2,
            host=HOST,
            port=store.port,
            epoch=3,
            groups=[[0, [0]]],
            buckets=[],
            backend="gloo",
            way="broadcast",
            timeout=timeout,
        )
    assert time.monotonic() - begun < 30
    assert transfer.epoch_store(store, 3).check([transfer.arrival_key(0, 0)])


def calls(*outcomes: str | None) -> "Calls[str]":
    """A request that the server with an outcome's number fails so, or answers."""

    def call(admin: ServerAdmin, number: int) -> str:
        if (text := outcomes[number]) is not None:
            raise ServerError(text, admin.url)
        time.sleep(0.1)
        return "done"

    admins: list[Any] = [SimpleNamespace(url=f"http://{number}") for number in range(len(outcomes))]
    return Calls(admins, call)


def test_a_server_that_was_left_alone_is_not_named() -> None:
    broken = f"server http://0: {transfer.BROKEN_OFF}"
    for otherwise in (None, ServerError(broken, "http://0")):
        found = calls(broken, None).culprit(otherwise)
        assert (str(found), found.url) == (broken, "")
    assert calls(broken, "out of memory").culprit(ServerError(broken, "http://0")).url == "http://1"
    assert calls(broken, None).culprit(ServerError("a sender", "http://7")).url == "http://7"


def test_all_answers_are_waited_for_also_when_some_fail() -> None:
    under_way = calls("gone", None)
    assert [error.url for error in under_way.settled(time.monotonic() + 10)] == ["http://0"]
    assert under_way._futures[1].result(timeout=0) == "done"
    late = calls("gone", None).settled(time.monotonic() - 1)
    assert {error.url for error in late} == {"http://0", "http://1"}

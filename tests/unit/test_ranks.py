"""What rank 0 finds out, every rank learns."""

from typing import NoReturn

import pytest

from dapo_megatron.errors import UserError
from dapo_megatron.trainer.ranks import on_rank_zero

pytestmark = pytest.mark.usefixtures("layout")


def fail(error: BaseException) -> NoReturn:
    raise error


def test_result_is_returned() -> None:
    assert on_rank_zero(lambda: {"found": [1, 2]}) == {"found": [1, 2]}
    assert on_rank_zero(lambda: None) is None


def test_user_error_keeps_its_sentence() -> None:
    with pytest.raises(UserError, match=r"^the port is in use$"):
        on_rank_zero(lambda: fail(UserError("the port is in use")))


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_any_other_error_of_rank_zero_stays_itself(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        on_rank_zero(lambda: fail(error))
    assert raised.value is error

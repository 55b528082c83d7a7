"""The one exception a user is meant to read."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class UserError(Exception):
    """Something the user can correct: bad config, missing file, port in use.

    Its text is one clear sentence that names the file or key and the rule. Command-line
    entry points print it without a traceback and exit with code 2.
    """


@contextmanager
def renamed_keys(names: Mapping[str, str]) -> Iterator[None]:
    """Let a UserError raised within name other keys: what checks the policy also checks models beside it.

    Args:
        names: what stands for each key, or beginning of one, in messages. {} leaves them as they are.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
        for key, name in names.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(key)}", name, text)
        raise UserError(text) from error

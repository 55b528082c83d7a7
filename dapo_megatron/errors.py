"""The one exception a user is meant to read."""


class UserError(Exception):
    """Something the user can correct: bad config, missing file, port in use.

    Its text is one clear sentence that names the file or key and the rule. Command-line
    entry points print it without a traceback and exit with code 2.
    """

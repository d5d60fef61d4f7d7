"""The one exception that means "the user can mend this", and nothing else.

Every module may import this one. A `UsageError` is shown as a sentence on stderr with
exit code 2 (see `cli.py`); any other exception is a fault of ours and keeps its
traceback.
"""


class UsageError(Exception):
    """A foreseeable mistake or condition outside the program.

    The message names the value, the rule it breaks and the way on, in one or two
    sentences that make sense without a traceback.
    """

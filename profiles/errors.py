"""The errors a user can cause. Each message is one sentence: the rule, the value, the remedy."""


class SpectuneError(Exception):
    """A request that cannot be carried out; the message tells what to change."""

    exit_code = 1


class UsageError(SpectuneError):
    """A command or call that is wrong in itself, whatever the files and models hold."""

    exit_code = 2

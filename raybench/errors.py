"""The errors that a user can cause, each with its exit code.

RaybenchError
├── UsageError          2   a command that cannot be carried out as it was given
│   ├── JobError        2   the job file: one line per problem, all of them at once
│   └── ResultsError    2   a run that is not there, a folder that cannot be read or written
└── ClusterError        3   no cluster at that address, it refuses us, or no point fits it
    └── DevicesInUseError    3   another sweep has the devices

Anything else that escapes is a bug of raybench and exits with 4.
Every class takes one string, so that an instance survives pickling between processes.
ResultsWarning says what of the results is left out; the commands print it as a line on stderr.
"""

from __future__ import annotations


class RaybenchError(Exception):
    """A failure whose text is meant for the user: where, the rule, what was given, what to do."""

    exit_code = 4


class UsageError(RaybenchError):
    """The command line asks for something that cannot be done."""

    exit_code = 2


class JobError(UsageError):
    """A job file that cannot be run; the text holds one `file:line:col: key: rule` line each."""


class ResultsError(UsageError):
    """A run or point that is not in the results, or results that cannot be read or written."""


class ClusterError(RaybenchError):
    """The cluster cannot be reached or used, or no point of the plan fits it."""

    exit_code = 3


class ResultsWarning(UserWarning):
    """Part of the results is left out: a damaged run, columns of a later version."""


class DevicesInUseError(ClusterError):
    """Another sweep has one of the devices: nothing is started, and nothing is kept."""

"""The family of errors a user may meet.

Every message says what was given, what was expected and what to do.  `exit_code` is what the command
line returns: 2 for a mistake that the user can correct before a run, 1 for a run that failed.
"""


class FedSignError(Exception):
    """Base of all errors raised on purpose by FedSign."""

    exit_code = 1


class ConfigError(FedSignError):
    """The configuration, or a name in it, cannot be used."""

    exit_code = 2


class DataError(FedSignError):
    """A dataset or a partition cannot be made from what is there."""

    exit_code = 2


class ResultsError(FedSignError):
    """A run on disk is missing, damaged or in the way."""

    exit_code = 2


class ResumeError(ResultsError):
    """A run on disk cannot be gone on with: it is damaged, or what it needs was not kept."""


class DiskFullError(FedSignError):
    """Nothing more can be written; what is on disk is whole and the run can be resumed."""


class CodecError(FedSignError):
    """A tensor arrived in an encoding that this version cannot read or write."""


class ReplyError(FedSignError):
    """A client's reply does not fit the request."""


class ClientStateError(FedSignError):
    """The state a client keeps on disk is not the one the server counts on."""


class IncompleteModelError(FedSignError):
    """A client has not got what a request leaves out; the server sends it the whole model."""


class LateError(FedSignError):
    """A client trained for longer than a round lasts."""


class RankError(FedSignError):
    """One of the processes that train a client together has died."""


class JoinError(FedSignError):
    """A machine was not let in by those that train a client together, or has no use for them."""


class StepError(FedSignError):
    """An optimizer was asked for a step out of its order."""


class RoundError(FedSignError):
    """A round ended with too few usable replies."""


class EngineError(FedSignError):
    """An engine (Ray, SuperLink) could not be started or stopped answering."""


class LinkLostError(EngineError):
    """The SuperLink of a run is gone; when it is there again, the run can go on."""

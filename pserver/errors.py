"""Every error that this package raises on purpose.

The class decides what a caller may do about it; the message says what was expected, what came and what to do. Errors
cross the wire by class name and message, so the name of each class here is part of the protocol.

    PserverError
    |-- ConfigError                a setting, argument or environment variable is unusable
    |-- InvalidRequest             a message, size, offset or value that no correct client sends
    |-- ProtocolMismatch           client and server speak different versions
    |-- LayoutMismatch             this trainer's model differs from the registered one
    |-- UnsupportedModel           the model cannot be distributed (no parameters, unknown dtype, ...)
    |-- UnsupportedOptimizer       the optimizer, or one of its arguments, cannot be run on servers
    |-- UnknownModel               no model of that name on this coordinator or server
    |-- UnknownContext             no such context, or it has ended
    |-- TrainerEnded               this trainer's lease has ended; its id is refused for ever
    |-- StalePush                  a repeat of a mutation whose outcome was already acknowledged
    |-- PushLost                   a push is not known any more, and must be sent again (may be retried)
    |-- ServerEnded                this server's lease has ended; it must drop what it has and join anew
    |-- RankTaken                  another living trainer holds the rank (may be retried)
    |-- StaleEpoch                 the model has been placed anew; register it again
    |-- MixedRounds                values were read while a round was applied (may be retried)
    |-- ServerUnavailable          a server could not be reached (may be retried)
    |-- NotLeader                  this coordinator does not lead; another one does, or will (may be retried)
    |-- StoreUnavailable           what coordinators must remember cannot be read or kept now (may be retried)
    |-- DeadlineExceeded           a wait ended before what it waited for
    |-- SharedMemoryUnavailable    memory cannot be shared here; trainers fall back to streams
    |-- ModelFailed                the model has lost a shard or could not apply a round
    |-- RoundFailed                a round's deadline passed and its policy says to fail; training may go on
    |-- NonFiniteGradient          a gradient has NaN or infinite elements and the policy says to raise
    |-- ServerErrors               several servers failed at once (an ExceptionGroup of the above)
    `-- InternalError              a fault of this package
"""

from typing import ClassVar


class PserverError(Exception):
    """Base of every error of this package.

    `status` is the name of the gRPC status code that carries the error; `retryable` says whether repeating the same
    call, unchanged, can succeed.
    """

    status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


class ConfigError(PserverError):
    """A setting, argument or environment variable is unusable."""

    status = "INVALID_ARGUMENT"


class InvalidRequest(PserverError):
    """A message, size, offset or value that no correct client sends."""

    status = "INVALID_ARGUMENT"


class ProtocolMismatch(PserverError):
    """Client and server speak different versions of the protocol."""

    status = "FAILED_PRECONDITION"


class LayoutMismatch(PserverError):
    """This trainer's model differs from the registered one; the message names the first difference."""

    status = "FAILED_PRECONDITION"


class UnsupportedModel(PserverError):
    """The model cannot be distributed."""

    status = "INVALID_ARGUMENT"


class UnsupportedOptimizer(PserverError):
    """The optimizer, or one of its arguments, cannot be run on servers."""

    status = "INVALID_ARGUMENT"


class UnknownModel(PserverError):
    """No model of that name."""

    status = "NOT_FOUND"


class UnknownContext(PserverError):
    """No such context, or it has ended."""

    status = "NOT_FOUND"


class TrainerEnded(PserverError):
    """This trainer's lease has ended; its id is refused for ever."""

    status = "FAILED_PRECONDITION"


class StalePush(PserverError):
    """A repeat of a mutation whose outcome was already acknowledged, or was forgotten."""

    status = "FAILED_PRECONDITION"


class PushLost(PserverError):
    """A push is not known any more: it was lost with its shard's primary. The same must be sent again."""

    status = "ABORTED"
    retryable = True


class ServerEnded(PserverError):
    """This server's lease has ended and others have its shards; it must drop what it has and join anew."""

    status = "FAILED_PRECONDITION"


class RankTaken(PserverError):
    """Another living trainer holds the rank."""

    status = "ALREADY_EXISTS"
    retryable = True


class StaleEpoch(PserverError):
    """The model has been placed anew; it must be registered again."""

    status = "ABORTED"


class MixedRounds(PserverError):
    """Values of several rounds came where one was asked for; they must be read again."""

    status = "ABORTED"
    retryable = True


class ServerUnavailable(PserverError):
    """A server could not be reached, or the connection broke."""

    status = "UNAVAILABLE"
    retryable = True


class NotLeader(PserverError):
    """This coordinator does not lead, or no longer; whoever asks must look for the one that does."""

    status = "UNAVAILABLE"
    retryable = True


class StoreUnavailable(PserverError):
    """The store of coordinators cannot be reached, is full, or did not answer in time."""

    status = "UNAVAILABLE"
    retryable = True


class DeadlineExceeded(PserverError, TimeoutError):
    """A wait ended before what it waited for."""

    status = "DEADLINE_EXCEEDED"


class SharedMemoryUnavailable(PserverError):
    """Memory cannot be shared here: another machine, user or /dev/shm, not enough of it, or switched off."""

    status = "FAILED_PRECONDITION"


class ModelFailed(PserverError):
    """The model has lost a shard, or could not apply a round."""

    status = "ABORTED"


class RoundFailed(PserverError):
    """A round's deadline passed with trainers absent; nothing was stepped, and the next step may succeed."""

    status = "DEADLINE_EXCEEDED"


class NonFiniteGradient(PserverError):
    """A round's gradient has NaN or infinite elements; nothing was stepped."""

    status = "FAILED_PRECONDITION"


class ServerErrors(PserverError, ExceptionGroup[PserverError]):
    """Several servers failed at once; `exceptions` has one error for each, which names its server."""

    status = "INTERNAL"

    def __str__(self) -> str:
        return "; ".join([self.message, *(str(each) for each in self.exceptions)])


class InternalError(PserverError):
    """A fault of this package; please report it with the message."""

    status = "INTERNAL"


def _tree(cls: type[PserverError]) -> dict[str, type[PserverError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


#: Every class that crosses the wire, by name. `ServerErrors` does not: it is made where the replies come together.
ERRORS: dict[str, type[PserverError]] = {
    name: cls for name, cls in _tree(PserverError).items() if cls is not ServerErrors
}

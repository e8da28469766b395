"""The exceptions of topoproxy. Every message reads ``cannot <do what> <to what>: <cause>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class TopoproxyError(Exception):
    """Base of all errors that a user may see; carries the exit code of a command that ends with it."""

    exit_code: ClassVar[int] = 1

    def reword(self, message: str) -> None:
        """Give the error another message; its class stays, and with it the exit code."""
        self.args = (message,)


class ConfigError(TopoproxyError):
    """The configuration is invalid (sysexits EX_CONFIG)."""

    exit_code = 78


class InputError(TopoproxyError):
    """An input file has invalid content (sysexits EX_DATAERR)."""

    exit_code = 65


class UsageError(TopoproxyError):
    """The command line is wrong."""

    exit_code = 2


class UnavailableError(TopoproxyError):
    """Another process (runtime, daemon) does not answer (sysexits EX_UNAVAILABLE)."""

    exit_code = 69


class ReplacedFilesError(UnavailableError):
    """A module cannot be imported: the files of topoproxy were replaced since the process has started."""


class CannotCreateError(TopoproxyError):
    """A socket or state file cannot be made (sysexits EX_CANTCREAT)."""

    exit_code = 73


class LockedError(TopoproxyError):
    """Another instance holds the lock (sysexits EX_TEMPFAIL)."""

    exit_code = 75


class PermissionDeniedError(TopoproxyError):
    """The process lacks a permission (sysexits EX_NOPERM)."""

    exit_code = 77


class RecordError(TopoproxyError):
    """Records cannot be stored in the ledger because of their content; the rest of their batch is stored.

    Attributes:
        rejected: The cause in short words, by the record's key.
    """

    def __init__(self, rejected: Mapping[str, str]) -> None:
        key, why = next(iter(rejected.items()))
        more = f" (and {len(rejected) - 1} more)" if len(rejected) > 1 else ""
        super().__init__(f"cannot store record {key} in the ledger: {why}{more}")
        self.rejected = rejected


class TopologyError(InputError):
    """sysfs, or a machine description, is incomplete, contradictory or not supported."""


class CgroupError(TopoproxyError):
    """A cgroup file cannot be read or written.

    Attributes:
        errno: The kernel's error number, 0 if there is none.
    """

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


class RuntimeCallError(TopoproxyError):
    """The container runtime answered one of our own calls with an error.

    Attributes:
        code: The gRPC status code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class HookError(TopoproxyError):
    """A hook cannot be loaded, or has returned something that is not allowed."""


class DeviceConflictError(TopoproxyError):
    """The additions of a device plugin contradict the container's request or another plugin."""

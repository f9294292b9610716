"""Every exception this project raises on purpose, for both sides.

AotpackError                 message, hint
  BundleError                the bundle cannot be used
    MalformedBundle          member, problem
    UnsupportedFormat        found, reads
    DigestMismatch           member, expected, actual
    TargetMismatch           reasons: nothing in the bundle fits this machine
  CallError                  this call cannot be served
    UnknownEntry             name, names
    GuardMiss                entry, reasons by variant
  MissingDependency          package, needed_for, extra
  MissingDevice
  WeightsError               update_weights was given something it cannot use
  ArtifactError              an artifact did not load or run
  SessionClosed              the session was closed before the call
  ManifestError              problems, each with its place            [build side]
  SourceError                the model source cannot be used          [build side]
  CompileError               job, log                                 [build side]
  UsageError                 what was asked for cannot be meant       [build side]
    OutputError              the place to write to holds something else

`hint` is the next step and is only set when it is true. `exit_code` is what the command line returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotpack_runtime.record import Record


class AotpackError(Exception):
    """Base of all errors of this project; `str()` is one line, `hint` the next step or ""."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class BundleError(AotpackError):
    """The bundle cannot be used."""

    exit_code = 7


class MalformedBundle(BundleError):
    """A member is missing, truncated or does not say what the format asks for."""

    def __init__(self, member: str, problem: str, *, hint: str = "fetch or build the bundle again") -> None:
        super().__init__(f"{member}: {problem}", hint=hint)
        self.member, self.problem = member, problem


class UnsupportedFormat(BundleError):
    """The index has a format version that this reader does not know."""

    exit_code = 6

    def __init__(self, member: str, *, found: object, reads: Sequence[int]) -> None:
        known = ", ".join(map(str, reads))
        super().__init__(
            f"{member}: format version is {found!r}, this aotpack-runtime reads {known}",
            hint="upgrade aotpack-runtime, or build the bundle with the version you serve with",
        )
        self.found, self.reads = found, tuple(reads)


class DigestMismatch(BundleError):
    """A member's bytes are not the bytes that were packed."""

    def __init__(self, member: str, *, expected: str, actual: str) -> None:
        super().__init__(
            f"{member}: sha256 is {actual[:12]}, the index says {expected[:12]}",
            hint="the file changed after packing; fetch the bundle again",
        )
        self.member, self.expected, self.actual = member, expected, actual


class TargetMismatch(BundleError):
    """Nothing in the bundle can run on this machine."""

    exit_code = 6

    def __init__(self, bundle: str, reasons: Mapping[str, str]) -> None:
        distinct = sorted(set(reasons.values())) or ["it holds no entries"]
        super().__init__(
            f"{bundle} does not fit this host: " + "; ".join(distinct[:4]),
            hint="`aotpack check` says it of every variant",
        )
        self.reasons = dict(reasons)


class CallError(AotpackError):
    """This call cannot be served."""


class UnknownEntry(CallError, KeyError):
    """The bundle has no entry of this name."""

    exit_code = 2

    def __init__(self, name: str, names: Sequence[str]) -> None:
        super().__init__(f"no entry {name!r}; the bundle has: {', '.join(names) or 'none'}")
        self.name, self.names = name, tuple(names)


class GuardMiss(CallError):
    """No variant fits the call and nothing may serve it instead.

    `reasons` maps each variant to the first guard that turned the call down.
    """

    def __init__(self, entry: str, reasons: Mapping[str, str], *, why: str, hint: str = "") -> None:
        lines = [f"{variant}: {reason}" for variant, reason in reasons.items()]
        more = f"; and {len(lines) - 4} more" if len(lines) > 4 else ""
        super().__init__(f"{entry}: no variant fits this call, {why}: " + "; ".join(lines[:4]) + more, hint=hint)
        self.entry, self.reasons = entry, dict(reasons)


class MissingDependency(AotpackError):
    """A package is needed for something that was asked for and is not installed."""

    exit_code = 4

    def __init__(self, package: str, *, needed_for: str, install: str = "") -> None:
        super().__init__(
            f"the package {package!r} is needed for {needed_for} and is not installed",
            hint=f"pip install {install or package}",
        )
        self.package, self.needed_for = package, needed_for


class MissingDevice(AotpackError):
    """Something that was asked for needs a device that this host does not have."""

    exit_code = 4


class WeightsError(AotpackError):
    """The tensors given to update_weights cannot be used; nothing was changed."""


class ArtifactError(AotpackError):
    """An artifact did not load or did not run; the message holds the library's own words."""

    def __init__(self, artifact: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{artifact}: {problem}", hint=hint)
        self.artifact, self.problem = artifact, problem


class SessionClosed(AotpackError):
    """The session was closed; load the bundle again."""


class Problem(Record):
    """One thing wrong in a text file, at its place; line and column count from 1."""

    file: str
    line: int
    col: int
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{self.file}:{self.line}:{self.col}: error: {where}{self.message}"


class ManifestError(AotpackError):
    """The manifest is not valid; `problems` holds all of them, one line each."""

    exit_code = 3

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class SourceError(AotpackError):
    """A model source could not be imported, constructed or exported."""

    def __init__(self, source: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{source}: {problem}", hint=hint)
        self.source, self.problem = source, problem


class UsageError(AotpackError):
    """What was asked for cannot be meant."""

    exit_code = 2


class OutputError(UsageError):
    """The place that was named holds something that is not for us to replace."""


class CompileError(AotpackError):
    """A job failed; `log` is the tail of what its toolchain printed."""

    def __init__(self, job: str, problem: str, *, hint: str = "", log: str = "") -> None:
        super().__init__(f"{job}: {problem}", hint=hint)
        self.job, self.problem, self.log = job, problem, log

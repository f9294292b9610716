"""What this host offers, found without importing torch, and every environment variable the runtime reads.

| variable | meaning | default |
|---|---|---|
| AOTPACK_MODE | `strict`, `eager` or `jit`: what a miss does, over the manifest's `on_miss` | the manifest's |
| AOTPACK_ALLOW | requirements not to judge, comma separated: `torch`, `glibc`, `libstdcxx`, `cpu`, ... | none |
| AOTPACK_CACHE_DIR | where archives unpack and the builder keeps its results | `~/.cache/aotpack` |
| AOTPACK_CHECK | digests checked at load: `full`, `index` or `off` | `full` |
| AOTPACK_LOG | what is said on stderr: `+dispatch,guards,jit,load,bundle` (`logs.py`) | nothing |
| AOTPACK_MISS_LOG | a file for one JSON line a missed shape | none |
| AOTPACK_JIT_JOBS | compiles behind misses at a time, on the whole host | one for every four CPUs |
| AOTPACK_JIT_NICE | how far they step back behind other processes, 0 to 19 | 19 |
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from aotpack_runtime.drivers.probe import find_gpus
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.format.gpu import NEWEST_CUDA, Gpu
from aotpack_runtime.imported import imported

if TYPE_CHECKING:
    from pathlib import Path


class Machine:
    """A host as targets see it; the cached properties look when they are first asked. `index` is the GPU that is meant,
    of those the driver shows."""

    def __init__(self, arch: str, index: int = 0) -> None:
        self.arch, self.index = arch, index

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Kinds of device, seen in the file system: neither the driver nor torch is asked."""
        there = any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu"))
        return ("cpu", "cuda") if there else ("cpu",)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """What the driver shows (CUDA_VISIBLE_DEVICES respected), asked at the first look; none without a driver."""
        return find_gpus() if "cuda" in self.devices else ()

    @property
    def gpu(self) -> Gpu | None:
        return self.gpus[self.index] if self.index < len(self.gpus) else None

    def on(self, index: int) -> Machine:
        """The same host with its GPU number `index` meant."""
        if index == self.index:
            return self
        other = Machine(arch=self.arch, index=index)
        other.__dict__.update({name: value for name, value in self.__dict__.items() if name != "index"})
        return other

    @cached_property
    def cpu_flags(self) -> frozenset[str]:
        """Feature flags of the first CPU in /proc/cpuinfo; empty where there is none."""
        try:
            with open("/proc/cpuinfo") as file:  # of a host with many CPUs the whole takes milliseconds
                found = next((line for line in file if line.startswith(("flags", "Features"))), "")
        except OSError:
            return frozenset()
        return frozenset(found.partition(":")[2].split())

    @cached_property
    def torch(self) -> str | None:
        """torch's version: of the imported module, else the one that stands beside its libraries."""
        module = imported("torch")
        return str(module.__version__) if module is not None else self._in_torch(r"__version__ = '([^']+)'")

    @cached_property
    def torch_cuda(self) -> str | None:
        """The CUDA version that the installed torch is built for; None of a CPU build."""
        module = imported("torch")
        return module.version.cuda if module is not None else self._in_torch(r"cuda\b.* = '([^']+)'")

    @cached_property
    def libtorch(self) -> str | None:
        """The folder of torch's shared libraries, found without importing anything."""
        module = imported("torch")
        if module is not None and module.__file__:
            return os.path.join(os.path.dirname(module.__file__), "lib")
        return next((os.path.join(folder, "lib") for folder, _ in _torch_folders()), None)

    def _in_torch(self, pattern: str) -> str | None:
        """What `pattern` finds in the version.py of the installed torch, or of its libraries where they stand alone."""
        match = next((re.search(pattern, text) for _, text in _torch_folders()), None)
        return match[1] if match else None

    @cached_property
    def glibc(self) -> str | None:
        try:
            return (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")[2] or None
        except (ValueError, OSError):
            return None

    @cached_property
    def libstdcxx(self) -> str | None:
        """Newest GLIBCXX symbol version: libstdc++.so.6.0.N defines GLIBCXX_3.4.N (gcc's ABI history)."""
        for folder in _library_folders():
            try:
                real = os.path.realpath(os.path.join(folder, "libstdc++.so.6"), strict=True)
            except OSError:
                continue
            match = re.search(r"\.so\.6\.0\.(\d+)$", real)
            newest = int(match[1]) if match else _newest_glibcxx(real)
            if newest:
                return f"3.4.{newest}"
        return None

    @cached_property
    def python(self) -> str:
        return f"cp{sys.version_info.major}{sys.version_info.minor}"


def _newest_glibcxx(path: str) -> int:
    """The last number of the newest GLIBCXX_3.4.N that a libstdc++ defines, 0 when it tells none. Asked of one that was
    copied into an image under its short name, which says nothing."""
    try:
        with open(path, "rb") as file:
            return max((int(number) for number in re.findall(rb"GLIBCXX_3\.4\.(\d+)\0", file.read())), default=0)
    except OSError:
        return 0


def _torch_folders() -> Iterator[tuple[str, str]]:
    """(folder, text of its version.py) of what has torch's libraries under `lib`: torch itself, or what
    `aotpack export slim` made."""
    for name in ("torch", "aotpack_libtorch"):
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            try:
                with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
                    text = file.read()
            except OSError:
                continue
            yield folder, text


def this_machine() -> Machine:
    """This host. The file system is asked when a fact is first needed."""
    return Machine(arch=os.uname().machine)


def made_up(text: str) -> Machine:
    """This host with one GPU as `text` says: `sm_86`, or `sm_90,driver=12.4`; ValueError for anything else.

    Without a driver's version it is of the newest CUDA that is known.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)(?:,driver=(\d+)\.(\d+))?", text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a machine such as sm_86 or sm_90,driver=12.4")
    capability = (int(match[1]), int(match[2]))
    driver = (int(match[3]), int(match[4])) if match[3] else NEWEST_CUDA
    machine = this_machine()
    machine.__dict__.update(devices=("cpu", "cuda"), gpus=(Gpu(capability, driver, f"a made-up {text}"),))
    return machine


def _library_folders() -> list[str]:
    paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    prefix = os.path.join(sys.prefix, "lib")
    triple = f"{os.uname().machine}-linux-gnu"
    system = (f"/usr/lib/{triple}", f"/lib/{triple}", "/usr/lib64", "/lib64", "/usr/lib", "/usr/local/lib64")
    return [*paths, prefix, *system]


def cache_dir() -> Path:
    """AOTPACK_CACHE_DIR, else the user's cache folder, else `private_dir`. The current folder is never meant: relative
    values of XDG_CACHE_HOME and HOME are passed over."""
    from pathlib import Path  # 4 ms, which a server that has no use for a cache need not pay

    explicit = named_cache()
    if explicit:
        return Path(explicit)
    for variable, below in (("XDG_CACHE_HOME", ""), ("HOME", ".cache")):
        value = os.environ.get(variable, "")
        folder = os.path.join(value, below)
        if os.path.isabs(value) and os.access(folder if os.path.isdir(folder) else value, os.W_OK):
            return Path(folder, "aotpack")
    return private_dir()


def named_cache() -> str:
    """The folder that AOTPACK_CACHE_DIR names, seen from the current one, "" when it names none."""
    explicit = os.environ.get("AOTPACK_CACHE_DIR", "")
    return os.path.abspath(explicit) if explicit else ""


def private_dir() -> Path:
    """A folder for this uid under the temp folder."""
    import tempfile  # only hosts without a home get here
    from pathlib import Path

    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written anywhere, which whoever writes there will say
        temporary = os.sep
    return Path(temporary, f"aotpack-{os.getuid()}")


def make_private(folder: Path) -> None:
    """Make `folder`, and the folders above it that are not there, for this user alone; OSError."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)


def untrusted(folder: Path) -> str:
    """Why `folder`, made with private permissions if it is not there, must not hold what this process will run: it
    cannot be made, or another user can write it. "" when it may."""
    try:
        make_private(folder)
        status = folder.stat()
    except OSError as error:
        return f"{folder}: cannot be created: {error.strerror}"
    if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
        return f"{folder}: others can write it"
    return ""


def in_main_interpreter() -> bool:
    """Is this Python's main interpreter? From C, Python is called back in that one alone: in another a call of DLPack's
    waits for ever (Python 3.11)."""
    try:
        import ctypes
    except ImportError:  # of an interpreter with a lock of its own
        return False
    ask = ctypes.PYFUNCTYPE(ctypes.c_void_p)
    here, main = [ask((f"PyInterpreterState_{name}", ctypes.pythonapi))() for name in ("Get", "Main")]
    return bool(here == main)


def check_numbers() -> None:
    """AotpackError for a variable that should be a number and is not: said at `load`, not behind the first miss."""
    for name, expected in (("AOTPACK_JIT_JOBS", "[1-9][0-9]*"), ("AOTPACK_JIT_NICE", "1?[0-9]")):
        text = os.environ.get(name, "")
        if text and not re.fullmatch(expected, text):
            least = "1 or more" if name == "AOTPACK_JIT_JOBS" else "0 to 19"
            raise AotpackError(f"{name} is {text[:40]!r}; expected a number, {least}")


def allowed_mismatches() -> frozenset[str]:
    """Requirements that AOTPACK_ALLOW says not to check."""
    return frozenset(word.strip() for word in os.environ.get("AOTPACK_ALLOW", "").split(",") if word.strip())

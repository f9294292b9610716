"""Which configuration of each kernel is kept, where a build on a GPU would time them.

A table of `aotpack tune` decides where it has the kernel, by the digest of its source. Without one a rule does: the
first configuration that does not spill, in Inductor's own order. All candidates are kept in the record of the job; no
more of them are compiled than it takes to choose.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

Json = Any

SPILL_LIMIT = 16
"""Words that a kernel may spill before Inductor would rather take another configuration (its own default)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One kernel: its candidates in Inductor's order, which was taken, and why ("table", "rule" or "only one")."""

    kernel: str
    digest: str
    candidates: tuple[Json, ...]
    taken: int
    why: str
    registers: int
    spills: int


@dataclass(slots=True)
class Choices:
    """Chooses for the kernels of one compile; `table` maps the digest of a kernel to the configuration that was seen to
    be fastest."""

    table: Mapping[str, Json] = field(default_factory=dict)
    made: list[Choice] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    @property
    def in_place_of_tuning(self) -> Any:
        """For `PythonWrapperCodegen.generate_and_run_autotune_block`: the generated block defines every kernel and then
        calls each with random inputs. Only the definitions run; a kernel is saved here, not by its first call."""

        def block(wrapper: Any) -> None:
            from torch._inductor.runtime.triton_heuristics import CachingAutotuner

            definitions = wrapper.kernel_autotune_defs.getvalue()
            waited = f"{definitions}\nasync_compile.wait(globals())\ndel async_compile\n"
            self.code.append(f"{waited}\n{wrapper.kernel_autotune_calls.getvalue()}")
            scope: dict[str, Any] = {}
            # A kernel is compiled as it is chosen: most of its candidates are not worth compiling.
            with mock.patch.object(CachingAutotuner, "precompile", return_value=None):
                exec(waited, scope)  # noqa: S102 - as Inductor runs its own code
            for tuner in scope.values():
                if isinstance(tuner, CachingAutotuner):
                    tuner.launchers = [self.choose(tuner)]
                    tuner.save_gpu_kernel(0, tuner.launchers[0])

        return block

    def choose(self, tuner: Any) -> Any:
        """The launcher to keep of all that `tuner` could have, compiled, and a note of it. Inductor's own error when no
        candidate compiles."""
        offered = list(tuner.configs)
        digest = kernel_digest(tuner.fn.src, tuner.fn.__name__)
        picked = self._picked(tuner, offered, self.table.get(digest))
        chosen = _first_calm(tuner, offered) if picked is None else picked
        candidates = list(map(config_record, offered))
        record = config_record(chosen.config)
        candidates += [record] * (record not in candidates)
        self.made.append(
            Choice(
                kernel=tuner.inductor_meta.get("kernel_name") or tuner.fn.__name__,
                digest=digest,
                candidates=tuple(candidates),
                taken=candidates.index(record),
                why="table" if picked is not None else "only one" if len(offered) == 1 else "rule",
                registers=chosen.n_regs or 0,
                spills=chosen.n_spills or 0,
            )
        )
        return chosen

    def _picked(self, tuner: Any, offered: Sequence[Any], wanted: Json) -> Any:
        """The launcher of the configuration that a table has, None where it has none, or one that is not of this
        kernel or does not compile."""
        if wanted is None:
            return None
        known = (config for config in (*offered, *_halved(offered)) if config_record(config) == wanted)
        return next(filter(None, (_compiled(tuner, config) for config in known)), None)


def _first_calm(tuner: Any, offered: Sequence[Any]) -> Any:
    """The first configuration that does not spill, compiled; the first that compiles where all do. Those behind it are
    never compiled."""
    limit = tuner.inductor_meta.get("spill_threshold", SPILL_LIMIT)
    spilling = None
    for config in offered:
        launcher = _compiled(tuner, config)
        if launcher is not None and (launcher.n_spills or 0) <= limit:
            return launcher
        spilling = spilling or launcher
    return spilling or _precompiled(tuner, offered)


def _compiled(tuner: Any, config: Any) -> Any:
    """The launcher of one configuration, None when it takes more than the device has."""
    try:
        return _precompiled(tuner, [config])
    except RuntimeError as error:
        if "No valid triton configs" not in str(error):
            raise
        return None


def _precompiled(tuner: Any, configs: Sequence[Any]) -> Any:
    tuner.configs, tuner.compile_results, tuner.launchers = list(configs), [], []
    tuner.precompile()
    return tuner.launchers[0]


def _halved(offered: Sequence[Any]) -> Iterator[Any]:
    """What Inductor adds to the candidates of a reduction that takes many registers: the largest of its blocks halved
    (`CachingAutotuner._dynamic_scale_rblock`)."""
    for config in offered:
        blocks = {name: size for name, size in config.kwargs.items() if name.startswith("R")}
        if blocks:
            other = copy.deepcopy(config)
            other.kwargs[max(blocks, key=blocks.__getitem__)] //= 2
            yield other


def config_record(config: Any) -> Json:
    """A configuration of Triton as JSON: block sizes by name, warps and stages."""
    return {**dict(config.kwargs), "num_warps": config.num_warps, "num_stages": config.num_stages}


def kernel_digest(source: str, name: str) -> str:
    """The source of a kernel by its content: the name that a build numbers it by is left out."""
    return hashlib.sha256(source.replace(name, "kernel").encode()).hexdigest()

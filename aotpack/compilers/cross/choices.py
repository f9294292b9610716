"""Which configuration of each kernel is kept, where a build on a GPU would time them.

A table of `aotpack tune` decides where it has the kernel, by the digest of its source. Without one a rule does: the
first configuration that does not spill, in Inductor's own order. All candidates are kept in the record of the job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
            exec(waited, scope)  # noqa: S102 - as Inductor runs its own code
            for tuner in scope.values():
                if isinstance(tuner, CachingAutotuner):
                    if not tuner.launchers:
                        tuner.precompile()
                    tuner.launchers = [self.choose(tuner)]
                    tuner.save_gpu_kernel(0, tuner.launchers[0])

        return block

    def choose(self, tuner: Any) -> Any:
        """The launcher to keep of those of `tuner`, and a note of it."""
        launchers = list(tuner.launchers)
        configs = [config_record(launcher.config) for launcher in launchers]
        digest = kernel_digest(tuner.fn.src, tuner.fn.__name__)
        wanted = self.table.get(digest)
        limit = tuner.inductor_meta.get("spill_threshold", SPILL_LIMIT)
        calm = [number for number, launcher in enumerate(launchers) if (launcher.n_spills or 0) <= limit]
        taken = configs.index(wanted) if wanted in configs else (calm or [0])[0]
        why = "only one" if len(launchers) == 1 else "table" if wanted in configs else "rule"
        chosen = launchers[taken]
        self.made.append(
            Choice(
                kernel=tuner.inductor_meta.get("kernel_name") or tuner.fn.__name__,
                digest=digest,
                candidates=tuple(configs),
                taken=taken,
                why=why,
                registers=chosen.n_regs or 0,
                spills=chosen.n_spills or 0,
            )
        )
        return chosen


def config_record(config: Any) -> Json:
    """A configuration of Triton as JSON: block sizes by name, warps and stages."""
    return {**dict(config.kwargs), "num_warps": config.num_warps, "num_stages": config.num_stages}


def kernel_digest(source: str, name: str) -> str:
    """The source of a kernel by its content: the name that a build numbers it by is left out."""
    return hashlib.sha256(source.replace(name, "kernel").encode()).hexdigest()

"""Generated C++ whose checks may fail inside a parallel loop: made to raise, where OpenMP would end the process.

Inductor checks every index that comes from data (`weight[ids]`) and throws when it is out of bounds. An exception must
not leave an OpenMP construct: a bad token id would end the server. Each loop body is wrapped here, so that the first
error is kept and thrown again after the parallel region, where the library turns it into an error of the call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

_CHECK = re.compile(r"TORCH_CHECK\(|\bthrow\b")
_LOOP = re.compile(r"\s*#pragma omp for\b(?:.*\bcollapse\((?P<depth>\d+)\))?")
_REGION = re.compile(r"\s*#pragma omp (parallel|single)\b")
_PRAGMA = re.compile(r"\s*#pragma omp\b")

KEPT = "std::exception_ptr aotpack_error;"
TRY = "try {"
CATCH = '} catch (...) { _Pragma("omp critical") aotpack_error = std::current_exception(); }'
THROWN = "if (aotpack_error) std::rethrow_exception(aotpack_error);"


@contextmanager
def raising_kernels() -> Iterator[None]:
    """Everything AOTInductor compiles inside goes through `raising`."""
    from torch._inductor.codecache import AotCodeCompiler

    original = AotCodeCompiler.compile

    def compile(graph: Any, wrapper_code: str, kernel_code: str, *args: Any, **kwargs: Any) -> Any:
        return original(graph, wrapper_code, raising(kernel_code), *args, **kwargs)

    with mock.patch.object(AotCodeCompiler, "compile", compile):
        yield


def raising(source: str) -> str:
    """`source` with every function whose checks may fail inside a parallel loop rewritten; the others as they are."""
    lines = source.split("\n")
    found: list[str] = []
    number = 0
    while number < len(lines):
        end = _block_end(lines, number) if lines[number] == "{" else number
        found += _raising_function(lines[number : end + 1])
        number = end + 1
    return "\n".join(found)


def _raising_function(lines: Sequence[str]) -> list[str]:
    """The body of a function, from its `{` to its `}`."""
    checks = {number for number, line in enumerate(lines) if _CHECK.search(line)}
    regions = [_block(lines, number) for number, line in enumerate(lines) if _REGION.match(line)]
    if not any(number in region for number in checks for region in regions):
        return list(lines)
    loops = [_block(lines, number, int(match["depth"] or 1)) for number, match in _matches(lines)]
    loops = [loop for loop in loops if any(number in loop for number in checks)]
    if any(number in region and not any(number in loop for loop in loops) for number in checks for region in regions):
        return [line for line in lines if not _PRAGMA.match(line)]  # in turn rather than in parallel
    opened, closed = {loop.start for loop in loops}, {loop.stop - 1 for loop in loops}
    found = [lines[0], KEPT]
    for number, line in enumerate(lines[1:-1], 1):
        if number in closed:
            found.append(CATCH)
        if not line.lstrip().startswith("#pragma omp simd"):  # no exception may leave that either
            found.append(line)
        if number in opened:
            found.append(TRY)
    return [*found, THROWN, lines[-1]]


def _matches(lines: Sequence[str]) -> Iterator[tuple[int, re.Match[str]]]:
    for number, line in enumerate(lines):
        match = _LOOP.match(line)
        if match:
            yield number, match


def _block(lines: Sequence[str], number: int, depth: int = 1) -> range:
    """The line numbers of the block that follows line `number`, of the innermost of `depth` nested loops."""
    start = number
    for _ in range(depth):
        start = next((n for n in range(start + 1, len(lines)) if lines[n].strip() == "{"), start)
    return range(start, _block_end(lines, start) + 1)


def _block_end(lines: Sequence[str], start: int) -> int:
    """The line of the `}` that closes the `{` alone on line `start`: generated code is indented without a slip."""
    closing = lines[start].replace("{", "}")
    return next((n for n in range(start + 1, len(lines)) if lines[n] == closing), len(lines) - 1)

"""A check that fails inside a parallel loop is an exception, not the end of the process."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from aotpack.compilers.kernels import CATCH, KEPT, THROWN, TRY, raising

COMPILER = shutil.which("g++") or ""
CHECK = 'AOTI_TORCH_CHECK(in_ptr0[x0] < 50L, "index out of bounds: 0 <= tmp0 < 50L");'


def function(*body: str) -> str:
    """A kernel as Inductor writes it; a line of `body` may hold several."""
    lines = [line for part in body for line in textwrap.dedent(part).strip("\n").split("\n")]
    return "\n".join(['extern "C"  void  kernel(const int64_t* in_ptr0)', "{", *[f"    {line}" for line in lines], "}"])


PARALLEL = """
#pragma omp parallel
{
    int tid = omp_get_thread_num();
    {
        #pragma omp for
        for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(64L); x0+=static_cast<int64_t>(1L))
        {
            {
                BODY
            }
        }
    }
}
"""
COLLAPSED = """
#pragma omp parallel num_threads(4)
{
    {
        #pragma omp for collapse(2)
        for(int64_t x0=0L; x0<64L; x0+=1L)
        {
            for(int64_t x1=0L; x1<8L; x1+=1L)
            {
                BODY
            }
        }
    }
}
"""
BEFORE_THE_LOOP = """
#pragma omp parallel
{
    BODY
    #pragma omp for
    for(int64_t x0=0L; x0<64L; x0+=1L)
    {
        auto tmp1 = x0;
    }
}
"""
SINGLE = """
#pragma omp parallel
{
    #pragma omp single
    {
        BODY
    }
}
"""
IN_TURN = """
for(int64_t x0=0L; x0<64L; x0+=1L)
{
    BODY
}
"""


def changes(source: str) -> tuple[list[str], list[str]]:
    """Lines that `raising` adds, and those it takes away."""
    before, after = source.split("\n"), raising(source).split("\n")
    added = [line.strip() for line in after if line not in before]
    return added, [line.strip() for line in before if line not in after]


@pytest.mark.parametrize(
    ("source", "added", "removed"),
    [
        pytest.param(PARALLEL.replace("BODY", CHECK), [KEPT, TRY, CATCH, THROWN], [], id="loop"),
        pytest.param(COLLAPSED.replace("BODY", CHECK), [KEPT, TRY, CATCH, THROWN], [], id="collapsed-loops"),
        pytest.param(PARALLEL.replace("BODY", '(tmp0 ? 0 : (throw std::runtime_error("no"), 0));'), [KEPT, TRY, CATCH, THROWN], [], id="throw"),
        pytest.param(PARALLEL.replace("BODY", "auto tmp0 = inductor_cpu_throw_if(x0);"), [], [], id="no-check"),
        pytest.param(IN_TURN.replace("BODY", CHECK), [], [], id="no-parallel-region"),
        pytest.param(PARALLEL.replace("BODY", "auto tmp0 = x0;") + CHECK, [], [], id="check-after-the-region"),
        pytest.param(BEFORE_THE_LOOP.replace("BODY", CHECK), [], ["#pragma omp parallel", "#pragma omp for"], id="check-outside-of-the-loop"),
        pytest.param(SINGLE.replace("BODY", CHECK), [], ["#pragma omp parallel", "#pragma omp single"], id="single"),
    ],
)  # fmt: skip
def test_only_what_needs_it_is_changed(source: str, added: list[str], removed: list[str]) -> None:
    assert changes(function(source)) == (added, removed)


def test_one_function_of_several_is_changed() -> None:
    plain, checked = function(PARALLEL.replace("BODY", "auto tmp0 = x0;")), function(PARALLEL.replace("BODY", CHECK))
    found = raising(f"#include <x>\n{plain}\n{checked}\n{plain}\n")
    assert found == f"#include <x>\n{plain}\n{raising(checked)}\n{plain}\n"
    assert raising(checked) != checked


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("loop", [PARALLEL, COLLAPSED, BEFORE_THE_LOOP, SINGLE, IN_TURN], ids=["loop", "collapsed", "before", "single", "in-turn"])  # fmt: skip
def test_the_error_of_a_check_reaches_the_caller(tmp_path: Path, loop: str) -> None:
    """With what it kept: the caller may go on, and the next call works."""
    body = 'if (in_ptr0[0] > 50L) throw std::runtime_error("index out of bounds");'
    source = f"""
#include <cstdint>
#include <cstdio>
#include <exception>
#include <omp.h>
#include <stdexcept>
{function(loop.replace("BODY", body))}
int main() {{
    int64_t good = 1, bad = 51;
    for (int64_t* index : {{&bad, &good, &bad}})
        try {{ kernel(index); std::puts("done"); }}
        catch (const std::exception& error) {{ std::puts(error.what()); }}
}}
"""
    (tmp_path / "kernel.cpp").write_text(raising(source))
    subprocess.run([COMPILER, "-O1", "-fopenmp", "kernel.cpp", "-o", "kernel"], cwd=tmp_path, check=True, timeout=120)
    done = subprocess.run([tmp_path / "kernel"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["index out of bounds", "done", "index out of bounds", ""])

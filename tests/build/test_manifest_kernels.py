"""Mistakes in kernel entries of a manifest: each is one line with its place, what was expected and what was found.

Rows are `(field, its value, the whole line)`; the field stands in an otherwise good manifest, at its own line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from aotpack.kernel_plan import KernelPlan
from aotpack.manifest import read_manifest
from aotpack.manifest_kernels import TritonEntry
from aotpack.plan import make_plan
from aotpack_runtime.errors import ManifestError, Problem

TRITON = """\
schema: aotpack.manifest/v1
bundle: {name: demo, version: 0.1.0}
targets:
  cpu: {kind: cpu}
  gpu: {kind: cuda, arch: [sm_90]}
entries:
  add:
    kind: triton
    source: "kernels:add"
    params: {x: "*{dtype}:{align}", o: "*{dtype}", n: "i32:{align}", eps: fp32, BLOCK: constexpr}
    axes: {dtype: [fp32, fp16], align: [16, 1]}
    configs: [{BLOCK: 64, num_warps: 2}, {BLOCK: 128, num_warps: 4}]
    where: ["BLOCK <= 128"]
    guards: ["n <= 100000"]
    key: [n, dtype]
    choose: rules
    rules: [{when: "n <= 64", config: 0}, {config: 1}]
    grid: ["rows", "ceil_div(n, BLOCK)"]
    shapes: {x: [rows, n], o: [rows, n]}
    fill: {x: randn}
    points: [{rows: [1, 2], n: 64, eps: 1.0}]
    targets: [gpu]
"""

BARE = """\
schema: aotpack.manifest/v1
bundle: {name: demo, version: 0.1.0}
targets:
  cpu: {kind: cpu}
  gpu: {kind: cuda, arch: [sm_90]}
entries:
  add:
    kind: triton
    source: "kernels:add"
    params: {x: "*{dtype}:{align}", n: i32}
    axes: {dtype: [fp32, fp16], align: [16, 1]}
    targets: [gpu]
    grid: [n]
"""
"""With nothing but parameters and axes, so that a mistake in one has no other."""

NVRTC = """\
schema: aotpack.manifest/v1
bundle: {name: demo, version: 0.1.0}
targets:
  cpu: {kind: cpu}
  gpu: {kind: cuda, arch: [sm_90]}
entries:
  top:
    kind: nvrtc
    source: kernels/top.cu
    name_expression: "top<{T}, {B}>"
    template: {T: {float32: float, float16: __half}, B: [32, 64]}
    params: {x: "const {T}*", o: "{T}*", n: int}
    options: ["--use_fast_math"]
    grid: ["rows"]
    block: ["B"]
    smem: "B * 4"
    limits: {registers: 64}
    targets: [gpu]
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def with_field(text: str, field: str, value: str) -> str:
    """The manifest with a field of its entry changed, or added as the last line."""
    lines = text.splitlines()
    place = next((number for number, line in enumerate(lines) if line.startswith(f"    {field}:")), len(lines))
    return "\n".join([*lines[:place], f"    {field}: {value}", *lines[place + 1 :], ""])


def found_in(text: str, *, plan: bool = False) -> list[Problem]:
    """What reading the manifest (or, with `plan`, planning it too) says is wrong; [] when nothing."""
    Path("m.yaml").write_text(text)
    try:
        manifest = read_manifest(Path("m.yaml"))
        if plan:
            make_plan(manifest)
    except ManifestError as error:
        return list(error.problems)
    return []


def lines_of(text: str) -> list[str]:
    return [str(each).removeprefix("m.yaml:").replace(": error:", "", 1) for each in found_in(text)]


@pytest.mark.parametrize("text", [TRITON, BARE, NVRTC], ids=["triton", "bare", "nvrtc"])
def test_without_a_mistake_it_is_planned(text: str) -> None:
    assert found_in(text, plan=True) == []


TRITON_MISTAKES = [
    ("source", "3", '9:13 entries.add.source: expected text, found the number 3; put it in quotes: "3"'),
    ("source", "kernels", '9:13 entries.add.source: expected "pkg.module:Name", found the text "kernels"'),
    ("source", "add.cu", '9:13 entries.add.source: expected "pkg.module:Name", found the text "add.cu"'),
    ("source", "[a]", "9:13 entries.add.source: expected text, found a list"),
    ("params", "3", "10:13 entries.add.params: expected a mapping, found the number 3"),
    ("params", "[]", "10:13 entries.add.params: expected a mapping, found a list"),
    ("params", "{}", "10:13 entries.add.params: is empty; expected at least one key"),
    ("params", "{x: 3.5}", '10:17 entries.add.params.x: expected text, found the number 3.5; put it in quotes: "3.5"'),
    ("params", "{x: [1]}", "10:17 entries.add.params.x: expected text, found a list"),
    ("params", "{x: null}", "10:17 entries.add.params.x: expected text, found null"),
    ("params", "{x: true}", '10:17 entries.add.params.x: expected text, found true (a boolean); put it in quotes: "true"'),
    ("params", "{class: i32}", '10:14 entries.add.params.class: expected a Python name such as batch or seq_len, found the text "class"'),
    ("params", "{x y: i32}", '10:14 entries.add.params.x y: expected a Python name such as batch or seq_len, found the text "x y"'),
    ("params", "{3: i32}", '10:14 entries.add.params: a key is the number 3, expected text; if it is a name, put it in quotes: "3"'),
    ("params", "{self: }", "10:19 entries.add.params.self: expected text, found null"),
    ("params", '{x: "{}"}', '10:17 entries.add.params.x: {} in the text "{}" is no name of an axis'),
    ("params", '{x: "{0}"}', '10:17 entries.add.params.x: {0} in the text "{0}" is no name of an axis'),
    ("params", '{x: "{dtype!r}"}', '10:17 entries.add.params.x: {dtype!r} in the text "{dtype!r}" is no name of an axis'),
    ("params", '{x: "*{dtype:>9}"}', '10:17 entries.add.params.x: {dtype:>9} in the text "*{dtype:>9}" is no name of an axis'),
    ("op", "3", '23:9 entries.add.op: expected text, found the number 3; put it in quotes: "3"'),
    ("op", "add", '23:9 entries.add.op: expected "namespace::name", found the text "add"'),
    ("op", "a::b::c", '23:9 entries.add.op: expected "namespace::name", found the text "a::b::c"'),
    ("op", "a::1", '23:9 entries.add.op: expected "namespace::name", found the text "a::1"'),
    ("axes", "3", "11:11 entries.add.axes: expected a mapping, found the number 3"),
    ("axes", "[]", "11:11 entries.add.axes: expected a mapping, found a list"),
    ("axes", "{dtype: fp32, align: [1]}", '11:19 entries.add.axes.dtype: expected a list, found the text "fp32"; write [fp32]'),
    ("axes", "{dtype: [], align: [1]}", "11:19 entries.add.axes.dtype: is empty; expected at least one value"),
    ("axes", "{dtype: [fp32, fp32], align: [1]}", "11:19 entries.add.axes.dtype: holds a value twice, or something that is neither text nor a whole number"),
    ("axes", "{dtype: [fp32, null], align: [1]}", "11:19 entries.add.axes.dtype: holds a value twice, or something that is neither text nor a whole number"),
    ("axes", "{dtype: [fp32, 1.5], align: [1]}", "11:19 entries.add.axes.dtype: holds a value twice, or something that is neither text nor a whole number"),
    ("axes", "{dtype: [[fp32]], align: [1]}", "11:19 entries.add.axes.dtype: holds a value twice, or something that is neither text nor a whole number"),
    ("axes", "{dtype: {float32: fp32}, align: [1]}", "11:19 entries.add.axes.dtype: expected a list of values"),
    ("axes", "{dtype: {}, align: [1]}", "11:19 entries.add.axes.dtype: is empty; expected at least one key"),
    ("axes", "{dtype: [fp32], align: [1], n: [1]}", "11:42 entries.add.axes.n: 'n' is a parameter too, and would be two things; rename the axis"),
    ("axes", "{dtype: [fp32], align: [1], BLOCK: [1]}", "12:23 entries.add.configs[0].BLOCK: 'BLOCK' is in configs and in axes"),
    ("axes", "{dtype: [fp32], align: [1], class: [4]}", '11:39 entries.add.axes.class: expected a Python name such as batch or seq_len, found the text "class"'),
    ("axes", "{dtype: [fp32], align: [1], num_warps: [4, 8]}", "11:50 entries.add.axes.num_warps: 'num_warps' is a field of triton.Config; give it in configs"),
    ("axes", "{dtype: [fp32], align: [1], a: [0, 1, 2, 3, 4, 5, 6, 7], b: [0, 1, 2, 3, 4, 5, 6, 7], c: [0, 1, 2, 3, 4, 5, 6, 7], d: [0, 1, 2, 3, 4]}", "11:11 entries.add.axes: 5120 combinations, at most 4096; make a number an argument, or leave values out"),
    ("configs", "3", "12:14 entries.add.configs: expected a list, found the number 3; write [3]"),
    ("configs", "{}", "12:14 entries.add.configs: expected a list, found a mapping"),
    ("configs", "[3]", "12:15 entries.add.configs[0]: expected a mapping such as {num_warps: 4}, found the number 3"),
    ("configs", "[[]]", "12:15 entries.add.configs[0]: expected a mapping such as {num_warps: 4}, found a list"),
    ("configs", "[null]", "12:15 entries.add.configs[0]: expected a mapping such as {num_warps: 4}, found null"),
    ("configs", "[{BLOCK: 64}, {num_warps: 4}]", "12:28 entries.add.configs[1]: 'BLOCK' is given in some configs and not in others; give it in all"),
    ("configs", "[{BLOCK: 64}, {BLOCK: 64}]", "12:28 entries.add.configs[1]: is in the list twice; remove one"),
    ("configs", "[{BLOCK: 64}, {BLOCK: 64, num_warps: 4}]", "12:28 entries.add.configs[1]: is in the list twice; remove one"),
    ("configs", "[{BLOCK: 64, num_warps: 64}]", "12:38 entries.add.configs[0].num_warps: expected a power of two from 1 to 32, found 64"),
    ("configs", "[{BLOCK: 64, num_warps: 3}]", "12:38 entries.add.configs[0].num_warps: expected a power of two from 1 to 32, found 3"),
    ("configs", "[{BLOCK: 64, num_warps: 0}]", "12:38 entries.add.configs[0].num_warps: expected 1 or more, found 0"),
    ("configs", "[{BLOCK: 64, num_warps: '4'}]", '12:38 entries.add.configs[0].num_warps: expected a whole number, found the text "4"'),
    ("configs", "[{BLOCK: 64, num_warps: 4.0}]", "12:38 entries.add.configs[0].num_warps: expected a whole number, found the number 4.0"),
    ("configs", "[{BLOCK: 64, num_warps: true}]", "12:38 entries.add.configs[0].num_warps: expected a whole number, found true (a boolean)"),
    ("configs", "[{BLOCK: null}]", "12:23 entries.add.configs[0].BLOCK: expected a whole number, found null"),
    ("configs", "[{BLOCK: 64, num_stages: 0}]", "12:39 entries.add.configs[0].num_stages: expected 1 or more, found 0"),
    ("configs", "[{BLOCK: 64, maxnreg: 0}]", "12:36 entries.add.configs[0].maxnreg: expected 1 or more, found 0"),
    ("configs", "[{BLOCK: 64, num_ctas: 3}]", "12:37 entries.add.configs[0].num_ctas: expected a power of two from 1 to 32, found 3"),
    ("configs", "[{BLOCK: 64, n: 3}, {BLOCK: 1, n: 3}]", "12:30 entries.add.configs[0].n: 'n' is no field of triton.Config and no constexpr of the kernel"),
    ("configs", "[{BLOCK: 64, numwarps: 4}, {BLOCK: 1, numwarps: 4}]", "12:37 entries.add.configs[0].numwarps: 'numwarps' is no field of triton.Config and no constexpr of the kernel"),
    ("configs", "[{BLOCK: 64, kwargs: {}}]", "12:35 entries.add.configs[0].kwargs: expected a whole number, found a mapping"),
    ("configs", "[]", "12:14 entries.add.configs: is empty; expected at least one config such as {num_warps: 4}"),
    ("where", "3", "13:12 entries.add.where: expected a list, found the number 3; write [3]"),
    ("where", "BLOCK", '13:12 entries.add.where: expected a list, found the text "BLOCK"; write [BLOCK]'),
    ("where", "[nope > 1]", "13:13 entries.add.where[0]: unknown name 'nope'; known: BLOCK, align, dtype, eps, n, num_ctas, num_stages, num_warps, o, rows, x"),
    ("where", '["n > 1"]', "13:13 entries.add.where[0]: 'n' is not a number of the variant"),
    ("where", '["rows > 1"]', "13:13 entries.add.where[0]: 'rows' is not a number of the variant"),
    ("where", '["maxnreg > 1"]', "13:13 entries.add.where[0]: unknown name 'maxnreg'; known: BLOCK, align, dtype, eps, n, num_ctas, num_stages, num_warps, o, rows, x"),
    ("where", '["BLOCK / 2 > 1"]', "13:13 entries.add.where[0]: 'BLOCK / 2' is not allowed in an expression"),
    ("where", '["__import__(\'os\')"]', '13:13 entries.add.where[0]: "__import__(\'os\')" is not allowed in an expression'),
    ("where", '["BLOCK.bit_length() > 1"]', "13:13 entries.add.where[0]: 'BLOCK.bit_length()' is not allowed in an expression"),
    ("where", '["BLOCK.real > 1"]', "13:13 entries.add.where[0]: unknown name 'BLOCK.real'; did you mean 'BLOCK'?"),
    ("where", '["BLOCK ** 2 > 1"]', "13:13 entries.add.where[0]: 'BLOCK ** 2' is not allowed in an expression"),
    ("where", '["BLOCK << 2 > 1"]', "13:13 entries.add.where[0]: 'BLOCK << 2' is not allowed in an expression"),
    ("where", '["(lambda: 1)() > 1"]', "13:13 entries.add.where[0]: '(lambda: 1)()' is not allowed in an expression"),
    ("where", '["[BLOCK] == 1"]', "13:13 entries.add.where[0]: '[BLOCK]' is not allowed in an expression"),
    ("where", '["min(BLOCK) > 1"]', "13:13 entries.add.where[0]: 'min(BLOCK)' is not allowed in an expression"),
    ("where", '["ceil_div(BLOCK, 2, 3) > 1"]', "13:13 entries.add.where[0]: 'ceil_div(BLOCK, 2, 3)' is not allowed in an expression"),
    ("where", '["\'a\' == 1"]', '13:13 entries.add.where[0]: "\'a\'" is not allowed in an expression'),
    ("where", '["BLOCK > 1.5"]', "13:13 entries.add.where[0]: '1.5' is not allowed in an expression"),
    ("where", '["BLOCK in 1"]', "13:13 entries.add.where[0]: 'BLOCK in 1' is not allowed in an expression"),
    ("where", "[true]", '13:13 entries.add.where[0]: expected text, found true (a boolean); put it in quotes: "true"'),
    ("where", "[1.5]", '13:13 entries.add.where[0]: expected text, found the number 1.5; put it in quotes: "1.5"'),
    ("where", "[null]", "13:13 entries.add.where[0]: expected text, found null"),
    ("where", "[[1]]", "13:13 entries.add.where[0]: expected text, found a list"),
    ("where", "['BLOCK // 0 > 1']", "13:13 entries.add.where[0]: BLOCK // 0 > 1 divides by 0 for some values of the axes"),
    ("where", "['BLOCK % (BLOCK - 64) == 0']", "13:13 entries.add.where[0]: BLOCK % (BLOCK - 64) == 0 divides by 0 for some values of the axes"),
    ("where", "['dtype == 1']", "13:13 entries.add.where[0]: 'dtype' is not a number of the variant"),
    ("where", "['BLOCK < 0']", "13:12 entries.add.where: no combination of the axes is left"),
    ("guards", "3", "14:13 entries.add.guards: expected a list, found the number 3; write [3]"),
    ("guards", "n", '14:13 entries.add.guards: expected a list, found the text "n"; write [n]'),
    ("guards", "[nope > 1]", "14:14 entries.add.guards[0]: unknown name 'nope'; known: BLOCK, align, dtype, eps, n, num_ctas, num_stages, num_warps, o, rows, x"),
    ("guards", "[row > 1]", "14:14 entries.add.guards[0]: unknown name 'row'; did you mean 'rows'?"),
    ("guards", "['x.shape[0] > 1']", "14:14 entries.add.guards[0]: unknown name 'x.shape[0]'; known: BLOCK, align, dtype, eps, n, num_ctas, num_stages, num_warps, o, rows, x"),
    ("guards", "['eps > 1']", "14:14 entries.add.guards[0]: 'eps' is not an int argument or a number"),
    ("guards", "['x > 1']", "14:14 entries.add.guards[0]: 'x' is not an int argument or a number"),
    ("guards", "['dtype == 1']", "14:14 entries.add.guards[0]: 'dtype' is not an int argument or a number"),
    ("key", "3", "15:10 entries.add.key: expected a list, found the number 3; write [3]"),
    ("key", "n", '15:10 entries.add.key: expected a list, found the text "n"; write [n]'),
    ("key", "[3]", '15:11 entries.add.key[0]: expected text, found the number 3; put it in quotes: "3"'),
    ("key", '["n + 1"]', '15:11 entries.add.key[0]: expected a Python name such as batch or seq_len, found the text "n + 1"'),
    ("key", "[n, n]", "15:14 entries.add.key[1]: 'n' is in the list twice; remove one"),
    ("key", "[x]", "15:11 entries.add.key[0]: 'x' is no int argument and no axis"),
    ("key", "[BLOCK]", "15:11 entries.add.key[0]: 'BLOCK' is no int argument and no axis"),
    ("key", "[n, nope]", "15:14 entries.add.key[1]: unknown name 'nope'; known: BLOCK, align, dtype, eps, n, num_ctas, num_stages, num_warps, o, rows, x"),
    ("key", "[eps]", "15:11 entries.add.key[0]: 'eps' is no int argument and no axis"),
    ("key", "[num_warps]", "15:11 entries.add.key[0]: 'num_warps' is no int argument and no axis"),
    ("choose", "3", "16:13 entries.add.choose: expected smallest or rules or tuned, found the number 3"),
    ("choose", "best", '16:13 entries.add.choose: expected smallest or rules or tuned, found the text "best"'),
    ("choose", "null", "16:13 entries.add.choose: expected smallest or rules or tuned, found null"),
    ("choose", "tuned", "16:13 entries.add.choose: tuned needs `tuning` (a path) and `key`"),
    ("tuning", "3", '23:13 entries.add.tuning: expected text, found the number 3; put it in quotes: "3"'),
    ("tuning", "[a]", "23:13 entries.add.tuning: expected text, found a list"),
    ("tuning", "{a: b}", "23:13 entries.add.tuning: expected text, found a mapping"),
    ("rules", "3", "17:12 entries.add.rules: expected a list, found the number 3; write [3]"),
    ("rules", "[]", "16:13 entries.add.choose: rules needs `rules`"),
    ("rules", "[3]", "17:13 entries.add.rules[0]: expected a mapping, found the number 3"),
    ("rules", "[{}]", "17:13 entries.add.rules[0]: is empty; expected at least one key"),
    ("rules", "[{config: 2}]", "17:22 entries.add.rules[0].config: config 2 is not one of 0 to 1"),
    ("rules", "[{config: -1}]", "17:22 entries.add.rules[0].config: config -1 is not one of 0 to 1"),
    ("rules", "[{config: true}]", "17:22 entries.add.rules[0].config: config True is not one of 0 to 1"),
    ("rules", "[{config: '0'}]", "17:22 entries.add.rules[0].config: config '0' is not one of 0 to 1"),
    ("rules", "[{config: 0.0}]", "17:22 entries.add.rules[0].config: config 0.0 is not one of 0 to 1"),
    ("rules", "[{config: null}]", "17:22 entries.add.rules[0].config: config None is not one of 0 to 1"),
    ("rules", "[{when: null, config: 0}]", "17:20 entries.add.rules[0].when: 'None' is not allowed in an expression"),
    ("rules", "[{when: [1], config: 0}]", "17:20 entries.add.rules[0].when: expected text, a number, true, false or null, found a list"),
    ("rules", "[{when: 'nope > 1', config: 0}]", "17:20 entries.add.rules[0].when: unknown name 'nope'; known: BLOCK, align, dtype, eps, n, num_ctas, num_stages, num_warps, o, rows, x"),
    ("rules", "[{when: 'dtype > 1', config: 0}]", "17:20 entries.add.rules[0].when: 'dtype' is not an int argument"),
    ("rules", "[{dtype: fp64}]", "17:21 entries.add.rules[0].dtype: 'fp64' is no value of the axis 'dtype'"),
    ("rules", "[{align: '16'}]", "17:21 entries.add.rules[0].align: '16' is no value of the axis 'align'"),
    ("rules", "[{when: '__import__(1, 2)', config: 0}]", "17:20 entries.add.rules[0].when: '__import__(1, 2)' is not allowed in an expression"),
    ("rules", "[{when: 'x > 1', config: 0}]", "17:20 entries.add.rules[0].when: 'x' is not an int argument"),
    ("rules", "[{when: 'eps > 1', config: 0}]", "17:20 entries.add.rules[0].when: 'eps' is not an int argument"),
    ("rules", "[{when: 'BLOCK > 1', config: 0}]", "17:20 entries.add.rules[0].when: 'BLOCK' is not an int argument"),
    ("rules", "[{config: 0, nope: 1}]", "17:31 entries.add.rules[0].nope: unknown name 'nope'; known: align, config, dtype, when"),
    ("rules", "[{when: 'n > 1'}]", "17:13 entries.add.rules[0]: picks nothing; give an axis or `config: N`"),
    ("rules", "[{BLOCK: 128}]", "17:21 entries.add.rules[0].BLOCK: unknown name 'BLOCK'; known: align, config, dtype, when"),
    ("grid", "3", "18:11 entries.add.grid: expected a list, found the number 3; write [3]"),
    ("grid", "[]", "18:11 entries.add.grid: is empty; expected at least one item"),
    ("grid", "rows", '18:11 entries.add.grid: expected a list, found the text "rows"; write [rows]'),
    ("grid", "{a: b}", "18:11 entries.add.grid: expected a list, found a mapping"),
    ("grid", "[rows, rows, rows, rows]", "18:11 entries.add.grid: expected 3 items, found 4"),
    ("grid", "[true]", '18:12 entries.add.grid[0]: expected text, found true (a boolean); put it in quotes: "true"'),
    ("grid", "[1.5]", '18:12 entries.add.grid[0]: expected text, found the number 1.5; put it in quotes: "1.5"'),
    ("grid", "[null]", "18:12 entries.add.grid[0]: expected text, found null"),
    ("grid", "['n.x']", "18:12 entries.add.grid[0]: 'n.x' is not a name; sizes are int arguments"),
    ("grid", "['rows[0]']", "18:12 entries.add.grid[0]: 'rows[0]' is not a name; sizes are int arguments"),
    ("grid", '["__x"]', "18:12 entries.add.grid[0]: '__x' is not a name; sizes are int arguments"),
    ("grid", '["rows / 2"]', "18:12 entries.add.grid[0]: 'rows / 2' is not allowed in an expression"),
    ("grid", '["__import__(1)"]', "18:12 entries.add.grid[0]: '__import__(1)' is not allowed in an expression"),
    ("grid", '["None"]', "18:12 entries.add.grid[0]: 'None' is not allowed in an expression"),
    ("grid", "['x']", "18:12 entries.add.grid[0]: 'x' is not an int argument or a number"),
    ("grid", "['eps']", "18:12 entries.add.grid[0]: 'eps' is not an int argument or a number"),
    ("grid", "['dtype']", "18:12 entries.add.grid[0]: 'dtype' is not an int argument or a number"),
    ("grid", "['-1']", "18:12 entries.add.grid[0]: expected 0 to 2147483647, found -1"),
    ("grid", "['rows >']", "18:12 entries.add.grid[0]: 'rows >' is not an expression: invalid syntax"),
    ("grid", "[n, n, 70000]", "18:18 entries.add.grid[2]: expected 0 to 65535, found 70000"),
    ("shapes", "3", "19:13 entries.add.shapes: expected a mapping, found the number 3"),
    ("shapes", "[]", "19:13 entries.add.shapes: expected a mapping, found a list"),
    ("shapes", "{}", "19:13 entries.add.shapes: points need the shape of the pointer 'o'"),
    ("shapes", "{x: rows, o: [n]}", '19:17 entries.add.shapes.x: expected a list, found the text "rows"; write [rows]'),
    ("shapes", "{x: [rows, n]}", "19:13 entries.add.shapes: points need the shape of the pointer 'o'"),
    ("shapes", "{x: [3.5], o: [n]}", '19:18 entries.add.shapes.x[0]: expected text, found the number 3.5; put it in quotes: "3.5"'),
    ("shapes", "{x: ['n / 2'], o: [n]}", "19:18 entries.add.shapes.x[0]: 'n / 2' is not allowed in an expression"),
    ("shapes", "{x: [dtype], o: [n]}", "19:18 entries.add.shapes.x[0]: 'dtype' is not an int argument or a number"),
    ("shapes", "{x: [eps], o: [n]}", "19:18 entries.add.shapes.x[0]: 'eps' is not an int argument or a number"),
    ("shapes", "{x: [n], o: [n], n: [n]}", "19:33 entries.add.shapes.n: 'n' is no pointer"),
    ("shapes", "{x: [n], o: [n], z: [n]}", "19:33 entries.add.shapes.z: unknown name 'z'; known: BLOCK, eps, n, o, x"),
    ("fill", "3", "20:11 entries.add.fill: expected a mapping, found the number 3"),
    ("fill", "{x: random}", '20:15 entries.add.fill.x: expected one of randn, rand, ones, zeros, found the text "random"; did you mean \'rand\'?'),
    ("fill", "{x: 3}", "20:15 entries.add.fill.x: expected a mapping, found the number 3"),
    ("fill", "{x: null}", "20:15 entries.add.fill.x: expected a mapping, found null"),
    ("fill", "{x: {randint: [3]}}", "20:25 entries.add.fill.x.randint: item [1] is missing"),
    ("fill", "{x: {randint: [5, 3]}}", "20:25 entries.add.fill.x.randint: expected [low, high] with low below high, found [5, 3]"),
    ("fill", "{x: {rand: 3}}", "20:16 entries.add.fill.x: unknown key 'rand'; did you mean 'randint'?"),
    ("fill", "{n: randn}", "20:15 entries.add.fill.n: 'n' is no pointer"),
    ("fill", "{x: randn, z: randn}", "20:25 entries.add.fill.z: unknown name 'z'; known: BLOCK, eps, n, o, x"),
    ("writes", "3", "23:13 entries.add.writes: expected a list, found the number 3; write [3]"),
    ("writes", "o", '23:13 entries.add.writes: expected a list, found the text "o"; write [o]'),
    ("writes", "[]", "23:13 entries.add.writes: is empty; expected at least one item"),
    ("writes", "[3]", '23:14 entries.add.writes[0]: expected text, found the number 3; put it in quotes: "3"'),
    ("writes", "[o, o]", "23:17 entries.add.writes[1]: is in the list twice; remove one"),
    ("writes", "[n]", "23:14 entries.add.writes[0]: 'n' is no pointer"),
    ("writes", "[BLOCK]", "23:14 entries.add.writes[0]: 'BLOCK' is no pointer"),
    ("writes", "[o, z]", "23:17 entries.add.writes[1]: unknown name 'z'; known: BLOCK, eps, n, o, x"),
    ("points", "3", "21:13 entries.add.points: expected a list, found the number 3; write [3]"),
    ("points", "{}", "21:13 entries.add.points: expected a list, found a mapping"),
    ("points", "[3]", "21:14 entries.add.points[0]: expected a mapping of argument names to values, found the number 3"),
    ("points", "[[]]", "21:14 entries.add.points[0]: expected a mapping of argument names to values, found a list"),
    ("points", "[{}]", "21:14 entries.add.points[0]: 'eps' is not given"),
    ("points", "[{rows: 1, n: 1}]", "21:14 entries.add.points[0]: 'eps' is not given"),
    ("points", "[{rows: [], n: 1, eps: 1.0}]", "21:21 entries.add.points[0].rows: is empty; expected at least one value"),
    ("points", "[{rows: [[1]], n: 1, eps: 1.0}]", "21:21 entries.add.points[0].rows: expected a number, a list of numbers or an expression, found a list"),
    ("points", "[{rows: null, n: 1, eps: 1.0}]", "21:21 entries.add.points[0].rows: expected a number, a list of numbers or an expression, found null"),
    ("points", "[{rows: {min: 1}, n: 1, eps: 1.0}]", "21:21 entries.add.points[0].rows: expected a number, a list of numbers or an expression, found a mapping"),
    ("points", "[{rows: 1, n: 1, eps: '1.0'}]", "21:35 entries.add.points[0].eps: '1.0' is not allowed in an expression"),
    ("points", "[{rows: n + z, n: 1, eps: 1.0}]", "21:21 entries.add.points[0].rows: unknown name 'z'; known: eps, n, rows"),
    ("points", "[{rows: 1, rows: 2, n: 1, eps: 1.0}]", "21:24 entries.add.points[0]: duplicate key 'rows' on line 21, first on line 21; remove one"),
    ("points", "[{rows: 1, n: 1, eps: .nan}]", "21:35 entries.add.points[0].eps: 'eps' is a finite number, found the number nan"),
    ("points", "[{rows: 1.5, n: 1, eps: 1.0}]", "21:21 entries.add.points[0].rows: 'rows' is an int, found the number 1.5"),
    ("points", "[{rows: [1, -2], n: 3, eps: 1.0}]", "21:14 entries.add.points[0]: 'x' would have a size of -2: rows"),
    ("points", "[{rows: true, n: 1, eps: 1.0}]", "21:21 entries.add.points[0].rows: 'rows' is an int, found true (a boolean)"),
    ("points", "[{rows: 1, n: 1, eps: 1.0, z: 3}]", "21:43 entries.add.points[0].z: unknown name 'z'; known: eps, n, rows"),
    ("points", "[{rows: 1, n: 1, eps: true}]", "21:35 entries.add.points[0].eps: 'eps' is a finite number, found true (a boolean)"),
    ("targets", "3", "22:14 entries.add.targets: expected a list, found the number 3; write [3]"),
    ("targets", "gpu", '22:14 entries.add.targets: expected a list, found the text "gpu"; write [gpu]'),
    ("targets", "[]", "22:14 entries.add.targets: is empty; expected at least one item"),
    ("targets", "[cpu]", "22:15 entries.add.targets[0]: a kernel needs a target of kind cuda"),
    ("targets", "[gpu, cpu]", "22:20 entries.add.targets[1]: a kernel needs a target of kind cuda"),
    ("targets", "[nope]", "22:15 entries.add.targets[0]: unknown target 'nope'; known: cpu, gpu"),
    ("targets", "[gpu, gpu]", "22:20 entries.add.targets[1]: is in the list twice; remove one"),
    ("targets", "[3]", '22:15 entries.add.targets[0]: expected text, found the number 3; put it in quotes: "3"'),
    ("verify", "3", "23:13 entries.add.verify: expected a mapping, found the number 3"),
    ("verify", "{}", '23:13 entries.add.verify: missing key \'against\': "pkg.module:name", called with the arguments, its tensors in float64'),
    ("verify", "{against: eager}", '23:23 entries.add.verify.against: expected "pkg.module:Name", found the text "eager"'),
    ("verify", "{against: 'k.ref:add', rtol: -1}", "23:42 entries.add.verify.rtol: expected 0 or more, found the number -1"),
    ("verify", "{against: 'k.ref:add', rtol: .nan}", "23:42 entries.add.verify.rtol: expected a finite number, found the number nan"),
    ("verify", "{against: 'k.ref:add', rtol: '1'}", '23:42 entries.add.verify.rtol: expected a number, found the text "1"; remove the quotes'),
    ("verify", "{against: 'k.ref:add', atol: 1.0}", "23:36 entries.add.verify: unknown key 'atol'; did you mean 'rtol'?"),
    ("verify", "{against: 'k.ref:add', samples: 0}", "23:45 entries.add.verify.samples: expected 1 or more, found the number 0"),
    ("on_miss", "3", "23:14 entries.add.on_miss: expected a mapping, found the number 3"),
    ("on_miss", "{policy: pad}", '23:23 entries.add.on_miss.policy: expected jit or eager or error, found the text "pad"'),
    ("on_miss", "{policy: no}", '23:23 entries.add.on_miss.policy: expected jit or eager or error, found the text "no"'),
    ("on_miss", "{policy: jit, pad: {}}", "23:28 entries.add.on_miss: unknown key 'pad'; known: background, max_jit, max_memory, max_seconds, policy, reference, when"),
    ("options", "3", "23:14 entries.add.options: expected a mapping, found the number 3"),
    ("options", "[]", "23:14 entries.add.options: expected a mapping, found a list"),
    ("options", "{a: [1]}", "23:18 entries.add.options.a: expected text, a number, true, false or null, found a list"),
    ("options", "{num_warps: 8}", "23:26 entries.add.options.num_warps: 'num_warps' is a field of triton.Config; give it in configs"),
    ("options", "{maxnreg: 64}", "23:24 entries.add.options.maxnreg: 'maxnreg' is a field of triton.Config; give it in configs"),
    ("kind", "cuda", "8:11 entries.add.kind: kind 'cuda' is not supported by this version; supported: torch_export, triton, nvrtc"),
]  # fmt: skip

PARAMETER_MISTAKES = [
    ("params", '{x: "*fp99", n: i32}', "10:17 entries.add.params.x: unknown type 'fp99'; known: i1, i8, i16, i32, i64, u8, u16, u32, u64, fp16, bf16, fp32, fp64, fp8e4nv, fp8e5"),
    ("params", '{x: "*fp32:8", n: i32}', "10:17 entries.add.params.x: divisible by 8 is not supported; a hint is :16 (divisible by 16) or :1 (nothing known)"),
    ("params", "{x: bf16, n: i32}", "10:17 entries.add.params.x: a scalar of type 'bf16' is not supported; pass fp32 or fp64"),
    ("params", '{x: "{nope}", n: i32}', "10:17 entries.add.params.x: unknown name 'nope'; known: align, dtype"),
    ("params", '{x: "", n: i32}', "10:17 entries.add.params.x: expected a type such as *fp16:16, i32, fp32, constexpr or a number, found ''"),
    ("params", "{x: constexpr, n: i32}", "10:17 entries.add.params.x: constexpr 'x' has no value; give it as an axis or in configs"),
    ("params", '{x: "i32:16:16", n: i32}', "10:17 entries.add.params.x: expected a type such as *fp16:16, i32, fp32, constexpr or a number, found 'i32:16:16'"),
    ("params", '{x: "i1:16", n: i32}', "10:17 entries.add.params.x: a i1 cannot be said to be divisible by 16"),
    ("params", '{x: "fp32:16", n: i32}', "10:17 entries.add.params.x: a fp32 cannot be said to be divisible by 16"),
    ("params", '{x: "**fp32", n: i32}', "10:17 entries.add.params.x: expected a type such as *fp16:16, i32, fp32, constexpr or a number, found '**fp32'"),
    ("params", '{x: "*fp32 : 16", n: i32}', "10:17 entries.add.params.x: expected a type such as *fp16:16, i32, fp32, constexpr or a number, found '*fp32 : 16'"),
    ("params", '{x: "*{{dtype}}", n: i32}', '10:17 entries.add.params.x: a brace in the text "*{{dtype}}" is open; an axis is written {NAME}'),
    ("params", '{x: "i٣٢", n: i32}', "10:17 entries.add.params.x: unknown type 'i٣٢'; known: i1, i8, i16, i32, i64, u8, u16, u32, u64, fp16, bf16, fp32, fp64, fp8e4nv, fp8e5"),
    ("params", "{n: i32, None: i32}", '10:22 entries.add.params.None: expected a Python name such as batch or seq_len, found the text "None"'),
    ("params", "{n: i32, dtype: i32}", "11:19 entries.add.axes.dtype: 'dtype' is a parameter too, and would be two things; rename the axis"),
    ("params", '{x: "*fp32", __memo: i32, n: i32}', "10:34 entries.add.params.__memo: '__memo': names that begin with __ are not for parameters"),
    ("params", '{x: "*fp32", num_warps: i32, n: i32}', "10:37 entries.add.params.num_warps: 'num_warps' is a field of triton.Config; rename the parameter"),
    ("params", '{x: "{dtype", n: i32}', '10:17 entries.add.params.x: a brace in the text "{dtype" is open; an axis is written {NAME}'),
    ("params", '{x: "dtype}", n: i32}', '10:17 entries.add.params.x: a brace in the text "dtype}" is open; an axis is written {NAME}'),
]  # fmt: skip

NVRTC_MISTAKES = [
    ("source", "3", '9:13 entries.top.source: expected text, found the number 3; put it in quotes: "3"'),
    ("source", "top.py", '9:13 entries.top.source: expected a path that ends in .cu, found the text "top.py"'),
    ("source", "'.cu'", '9:13 entries.top.source: expected a path that ends in .cu, found the text ".cu"'),
    ("source", "[k.cu]", "9:13 entries.top.source: expected text, found a list"),
    ("name_expression", "[a]", "10:22 entries.top.name_expression: expected text, found a list"),
    ("name_expression", "top<{X}>", "10:22 entries.top.name_expression: unknown name 'X'; known: B, T"),
    ("name_expression", "'top<{}>'", '10:22 entries.top.name_expression: {} in the text "top<{}>" is no name of an axis'),
    ("name_expression", "'top<{T>'", '10:22 entries.top.name_expression: a brace in the text "top<{T>" is open; an axis is written {NAME}'),
    ("name_expression", "'top<{T}}>'", '10:22 entries.top.name_expression: a brace in the text "top<{T}}>" is open; an axis is written {NAME}'),
    ("template", "3", "11:15 entries.top.template: expected a mapping, found the number 3"),
    ("template", "[]", "11:15 entries.top.template: expected a mapping, found a list"),
    ("template", "{T: {float32: 3}, B: [32]}", '11:29 entries.top.template.T.float32: expected text, found the number 3; put it in quotes: "3"'),
    ("template", "{T: {3: float}, B: [32]}", '11:20 entries.top.template.T: a key is the number 3, expected text; if it is a name, put it in quotes: "3"'),
    ("template", "{T: {}, B: [32]}", "11:19 entries.top.template.T: is empty; expected at least one key"),
    ("template", "{T: {float32: float}, B: [32, 32]}", "11:40 entries.top.template.B: holds a value twice, or something that is neither text nor a whole number"),
    ("template", "{T: {float32: float}, B: 32}", "11:40 entries.top.template.B: expected a list, found the number 32; write [32]"),
    ("template", "{T: {float32: float}, B: [32], n: [1]}", "11:49 entries.top.template.n: 'n' is a parameter too, and would be two things; rename the axis"),
    ("params", "{x: 'float**', n: int}", "12:17 entries.top.params.x: expected a C type such as const float* or int, found 'float**'"),
    ("params", "{x: 'const {T}&', n: int}", "12:17 entries.top.params.x: expected a C type such as const float* or int, found 'const float&'"),
    ("params", "{x: 'int[3]', n: int}", "12:17 entries.top.params.x: expected a C type such as const float* or int, found 'int[3]'"),
    ("params", "{x: 'float*:8', n: int}", "12:17 entries.top.params.x: divisible by 8 is not supported; a hint is :16 (divisible by 16) or :1 (nothing known)"),
    ("params", "{x: '__nv_bfloat16', n: int}", "12:17 entries.top.params.x: a scalar of type '__nv_bfloat16' is not supported; pass fp32 or fp64"),
    ("params", "{x: 'const float* const', n: int}", "12:17 entries.top.params.x: expected a C type such as const float* or int, found 'const float* const'"),
    ("params", "{x: 'half2*', n: int}", "12:17 entries.top.params.x: unknown type 'half2'; known: float, double, __half, half, __nv_bfloat16, nv_bfloat16, int, unsigned int, unsigned, short, unsigned short, long long, unsigned long long, long, unsigned long, signed char, char, unsigned char, bool, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t, size_t, void, __nv_fp8_e4m3, __nv_fp8_e5m2"),
    ("options", "3", "13:14 entries.top.options: expected a list, found the number 3; write [3]"),
    ("options", "[]", "13:14 entries.top.options: is empty; expected at least one item"),
    ("options", "[3]", '13:15 entries.top.options[0]: expected text, found the number 3; put it in quotes: "3"'),
    ("options", "['-G', '-G']", "13:21 entries.top.options[1]: is in the list twice; remove one"),
    ("options", "'-x'", '13:14 entries.top.options: expected a list, found the text "-x"; write [-x]'),
    ("block", "3", "15:12 entries.top.block: expected a list, found the number 3; write [3]"),
    ("block", "[]", "15:12 entries.top.block: is empty; expected at least one item"),
    ("block", "B", '15:12 entries.top.block: expected a list, found the text "B"; write [B]'),
    ("block", "[B, 1, 1, 1]", "15:12 entries.top.block: expected 3 items, found 4"),
    ("block", "['T']", "15:13 entries.top.block[0]: 'T' is not an int argument or a number"),
    ("block", "['x']", "15:13 entries.top.block[0]: 'x' is not an int argument or a number"),
    ("block", "['B // 0']", "15:13 entries.top.block[0]: B // 0 divides by 0"),
    ("block", "[0]", "15:13 entries.top.block[0]: expected 1 to 1024, found 0"),
    ("block", "[2048]", "15:13 entries.top.block[0]: expected 1 to 1024, found 2048"),
    ("smem", "[1]", "16:11 entries.top.smem: expected text, found a list"),
    ("smem", "'B * 4.0'", "16:11 entries.top.smem: '4.0' is not allowed in an expression"),
    ("smem", "true", '16:11 entries.top.smem: expected text, found true (a boolean); put it in quotes: "true"'),
    ("smem", "T", "16:11 entries.top.smem: 'T' is not an int argument or a number"),
    ("smem", "x", "16:11 entries.top.smem: 'x' is not an int argument or a number"),
    ("smem", "-4", "16:11 entries.top.smem: expected 0 to 232448, found -4"),
    ("smem", "B // 0", "16:11 entries.top.smem: B // 0 divides by 0"),
    ("smem", "1000000", "16:11 entries.top.smem: expected 0 to 232448, found 1000000"),
    ("cluster", "3", "19:14 entries.top.cluster: expected a list, found the number 3; write [3]"),
    ("cluster", "[]", "19:14 entries.top.cluster: is empty; expected at least one item"),
    ("cluster", "[0]", "19:15 entries.top.cluster[0]: expected 1 or more, found the number 0"),
    ("cluster", "[2, 2, 2, 2]", "19:14 entries.top.cluster: expected 3 items, found 4"),
    ("cluster", "['2']", '19:15 entries.top.cluster[0]: expected a whole number, found the text "2"; remove the quotes'),
    ("cluster", "[32]", "19:14 entries.top.cluster: 32 blocks a cluster, at most 16"),
    ("cluster", "[3, 3, 3]", "19:14 entries.top.cluster: 27 blocks a cluster, at most 16"),
    ("cooperative", "yes", '19:18 entries.top.cooperative: expected true or false, found the text "yes"; write true'),
    ("cooperative", "1", "19:18 entries.top.cooperative: expected true or false, found the number 1"),
    ("limits", "3", "17:13 entries.top.limits: expected a mapping, found the number 3"),
    ("limits", "{registers: 0}", "17:25 entries.top.limits.registers: expected 1 or more, found the number 0"),
    ("limits", "{registers: '3'}", '17:25 entries.top.limits.registers: expected a whole number, found the text "3"; remove the quotes'),
    ("limits", "{registers: 256.0}", "17:25 entries.top.limits.registers: expected a whole number, found the number 256.0; write 256"),
    ("limits", "{spill_bytes: -1}", "17:27 entries.top.limits.spill_bytes: expected 0 or more, found the number -1"),
    ("limits", "{nope: 3}", "17:14 entries.top.limits: unknown key 'nope'; known: registers, spill_bytes"),
    ("headers", "3", "19:14 entries.top.headers: expected a mapping, found the number 3"),
    ("headers", "[a]", "19:14 entries.top.headers: expected a mapping, found a list"),
    ("headers", "{a.h: 3}", '19:20 entries.top.headers.a.h: expected text, found the number 3; put it in quotes: "3"'),
    ("include_dirs", "3", "19:19 entries.top.include_dirs: expected a list, found the number 3; write [3]"),
    ("include_dirs", "inc", '19:19 entries.top.include_dirs: expected a list, found the text "inc"; write [inc]'),
    ("include_dirs", "[3]", '19:20 entries.top.include_dirs[0]: expected text, found the number 3; put it in quotes: "3"'),
    ("axes", "{a: [1]}", "19:5 entries.top: unknown key 'axes'; did you mean 'shapes'?"),
    ("rules", "[{T: float}]", "19:17 entries.top.rules[0].T: 'float' is no value of the axis 'T'"),
    ("rules", "[{B: 33}]", "19:17 entries.top.rules[0].B: 33 is no value of the axis 'B'"),
    ("rules", "[{B: '32'}]", "19:17 entries.top.rules[0].B: '32' is no value of the axis 'B'"),
]  # fmt: skip


def named(rows: list[tuple[str, str, str]]) -> list[object]:
    return [pytest.param(field, value, line, id=f"{field}={value}") for field, value, line in rows]


@pytest.mark.parametrize(("field", "value", "line"), named(TRITON_MISTAKES))
def test_a_mistake_in_a_triton_entry_is_one_line(field: str, value: str, line: str) -> None:
    assert lines_of(with_field(TRITON, field, value)) == [line]


@pytest.mark.parametrize(("field", "value", "line"), named(PARAMETER_MISTAKES))
def test_a_mistake_in_a_parameter_is_one_line(field: str, value: str, line: str) -> None:
    assert lines_of(with_field(BARE, field, value)) == [line]


@pytest.mark.parametrize(("field", "value", "line"), named(NVRTC_MISTAKES))
def test_a_mistake_in_an_nvrtc_entry_is_one_line(field: str, value: str, line: str) -> None:
    assert lines_of(with_field(NVRTC, field, value)) == [line]


def test_every_mistake_in_other_fields_is_told_at_once() -> None:
    """Fields are judged apart from each other; what spans them is judged once they are read."""
    text = with_field(with_field(with_field(TRITON, "op", "add"), "choose", "best"), "configs", "[{num_warps: 3}]")
    assert [each.path for each in found_in(text)] == [
        "entries.add.configs[0].num_warps",
        "entries.add.choose",
        "entries.add.op",
    ]


def test_a_kernel_needs_a_target_with_a_gpu() -> None:
    text = TRITON.replace("  gpu: {kind: cuda, arch: [sm_90]}\n", "").replace("    targets: [gpu]\n", "")
    assert lines_of(text) == ["7:5 entries.add: a kernel needs a target of kind cuda; the manifest has none"]


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("{kind: cuda}", "5:8 targets.gpu: missing key 'arch': a list of architectures such as [sm_80, sm_90]"),
        ("{kind: cuda, ptx: compute_80}", "5:8 targets.gpu: missing key 'arch': a list of architectures such as [sm_80, sm_90]"),
        ("{kind: cuda, arch: []}", "5:27 targets.gpu.arch: is empty; expected at least one item"),
        ("{kind: cuda, arch: [sm_9]}", '5:28 targets.gpu.arch[0]: expected an architecture such as sm_90, found the text "sm_9"'),
        ("{kind: cuda, arch: [compute_90]}", '5:28 targets.gpu.arch[0]: expected an architecture such as sm_90, found the text "compute_90"'),
        ("{kind: cuda, arch: [sm_90, sm_90]}", "5:35 targets.gpu.arch[1]: is in the list twice; remove one"),
        ("{kind: cuda, arch: [sm_90], ptx: sm_90}", '5:41 targets.gpu.ptx: expected a PTX level such as compute_80, found the text "sm_90"'),
    ],
)  # fmt: skip
def test_an_architecture_is_named_and_never_a_default(target: str, line: str) -> None:
    """A35: without one NVRTC would build for sm_52."""
    assert lines_of(TRITON.replace("{kind: cuda, arch: [sm_90]}", target)) == [line]


@pytest.mark.parametrize("value", [4, 0, -16, 2**31 - 1])
def test_a_number_stands_for_a_parameter_that_is_folded(value: int) -> None:
    """`sak: 1` and `sak: "1"` are the same."""
    variants = []
    for text in (f"{value}", f'"{value}"'):
        Path("m.yaml").write_text(with_field(BARE, "params", f'{{x: "*{{dtype}}", n: i32, s: {text}}}'))
        (plan,) = make_plan(read_manifest(Path("m.yaml"))).entries
        assert isinstance(plan, KernelPlan)
        variants.append(plan.variants)
    assert variants[0] == variants[1]
    assert {variant.words["s"].value for variant in variants[0]} == {value}


@pytest.mark.parametrize(
    ("point", "numbers"),
    [
        ("{rows: [1, 2], n: [8, 16], eps: 0.5}", [(1, 8, 0.5), (1, 16, 0.5), (2, 8, 0.5), (2, 16, 0.5)]),
        ("{rows: 2 * n, n: 8, eps: 0.5}", [(16, 8, 0.5)]),
        ("{rows: [n, 1], n: [8, 9], eps: 0.5}", [(8, 8, 0.5), (9, 9, 0.5), (1, 8, 0.5), (1, 9, 0.5)]),
        ("{rows: 'ceil_div(n, 4)', n: 9, eps: 1.0e-6}", [(3, 9, 1e-6)]),
    ],
)
def test_a_point_is_its_lists_multiplied_and_its_expressions_computed(point: str, numbers: list[object]) -> None:
    Path("m.yaml").write_text(with_field(TRITON, "points", f"[{point}]"))
    entry = read_manifest(Path("m.yaml")).entries["add"]
    assert isinstance(entry, TritonEntry)
    found = [(case["rows"], case["n"], case["eps"]) for case in entry.calls()]
    assert sorted(found) == sorted(numbers)  # type: ignore[type-var]


def test_where_may_name_numbers_that_every_variant_has() -> None:
    """An axis of numbers and words is none of them, though some variants have its number."""
    axes = with_field(TRITON, "axes", "{dtype: [fp32], align: [1], u: [1, 2], v: [1, a]}")
    assert lines_of(with_field(axes, "where", '["u * BLOCK * num_warps > 0"]')) == []
    assert lines_of(with_field(axes, "where", '["u > 0", "v > 0"]')) == [
        "13:22 entries.add.where[1]: 'v' is not a number of the variant"
    ]


def test_the_largest_launch_that_a_gpu_has_is_planned() -> None:
    for field, value in [("block", "[32, 32]"), ("block", "[1024]"), ("smem", "232448"), ("cluster", "[16]")]:
        assert found_in(with_field(NVRTC, field, value), plan=True) == []
    assert found_in(with_field(TRITON, "grid", "[2147483647, 65535, 65535]"), plan=True) == []


@pytest.mark.parametrize(("values", "configs", "planned"), [(8, 1, 4096), (8, 2, 0), (2, 4, 64)])
def test_the_combinations_of_an_entry_are_its_axes_and_configs_multiplied(
    values: int, configs: int, planned: int
) -> None:
    """Four axes; at most 4096 combinations, of which none is made when there are more."""
    axes = ", ".join(f"a{number}: {list(range(values))}" for number in range(4))
    text = with_field(BARE, "axes", f"{{dtype: [fp32], align: [1], {axes}}}")
    text = with_field(text, "configs", str([{"num_stages": 1 + number} for number in range(configs)]))
    if planned:
        Path("m.yaml").write_text(text)
        entry = read_manifest(Path("m.yaml")).entries["add"]
        assert isinstance(entry, TritonEntry)
        assert len(list(entry.combinations())) == planned
    else:
        assert lines_of(text) == [
            "11:11 entries.add.axes: 8192 combinations, at most 4096; make a number an argument, or leave values out"
        ]


def test_axes_of_more_combinations_than_memory_holds_are_refused() -> None:
    axes = ", ".join(f"a{number}: {list(range(10))}" for number in range(30))
    (line,) = lines_of(with_field(BARE, "axes", f"{{dtype: [fp32], align: [1], {axes}}}"))
    assert line.startswith(f"11:11 entries.add.axes: {10**30} combinations, at most 4096; ")


def test_an_operator_is_of_one_entry() -> None:
    text = with_field(TRITON, "op", "ours::add")
    entry = text.partition("entries:\n")[2].replace("  add:", "  other:")
    assert lines_of(text + entry) == ["40:9 entries.other.op: ours::add is the operator of 'add' too; rename one"]


# ------------------------------------------------------------------------------------------------------------- places

PLACES = [
    pytest.param("axes", "{dtype: [fp32], align: [1, true]}", "entries.add.axes.align[1]", id="axis-of-a-boolean",
                 marks=pytest.mark.xfail(strict=True, reason="told twice: as no number and as no text")),
    pytest.param("axes", "{dtype: [fp32], align: [1], u: [a b, ab]}", "entries.add.axes", id="values-of-one-id",
                 marks=pytest.mark.xfail(strict=True, reason="told at line 1: ids are made after reading")),
    pytest.param("points", "[{rows: 1, n: 1, eps: 1.0}, {rows: n // 0, n: 1, eps: 1.0}]", "entries.add.points[1]",
                 id="division-by-0"),
    pytest.param("points", "[{rows: 1, n: 1, eps: 1.0}, {rows: n, n: rows, eps: 1.0}]", "entries.add.points[1]",
                 id="in-terms-of-each-other"),
    pytest.param("points", "[{rows: eps, n: 64, eps: 0.5}]", "entries.add.points[0].rows", id="an-int-of-a-float"),
    pytest.param("shapes", "{x: [-1], o: [n]}", "entries.add.shapes.x[0]", id="a-negative-size"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "path"), PLACES)
def test_a_mistake_is_told_once_and_where_it_is(field: str, value: str, path: str) -> None:
    changed = with_field(TRITON, field, value)
    (problem,) = found_in(changed, plan=True)
    assert problem.path.startswith(path)
    assert changed.splitlines()[problem.line - 1].strip().startswith(f"{field}:")


@pytest.mark.parametrize("word", ["tensordesc<fp16[,]>", "tensordesc<fp16[64 64]>"])
def test_a_block_that_is_none_is_told_in_words_of_the_manifest(word: str) -> None:
    (problem,) = found_in(with_field(BARE, "params", f'{{x: "{word}", n: i32}}'))
    assert "invalid literal" not in problem.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("template", "{T: {float32: float}, B: [32], num_warps: [4]}"),
        ("params", '{x: "const {T}*", o: "{T}*", n: int, num_warps: int}'),
    ],
)
def test_an_entry_of_cpp_is_not_told_of_triton(field: str, value: str) -> None:
    """It has no configs, and the name is free in C++."""
    assert lines_of(with_field(NVRTC, field, value)) == []

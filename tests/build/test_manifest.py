"""Promises of the manifest: defaults, forms, and every mistake at once with its place."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from aotpack import manifest_devices, manifest_inputs, manifest_model, manifest_values, suggest, yaml12
from aotpack.manifest import manifest_schema, read_manifest
from aotpack.manifest_model import (
    CpuTarget,
    CudaTarget,
    Input,
    Linear,
    Manifest,
    Point,
    Precision,
    RandintFill,
    Range,
    TensorInput,
    TorchExportEntry,
)
from aotpack.manifest_values import middle
from aotpack_runtime.errors import ManifestError

SMALLEST = """\
schema: aotpack.manifest/v1
bundle: {name: demo, version: 0.1.0}
targets: {cpu: {kind: cpu}}
entries:
  encoder:
    kind: torch_export
    source: "model:build"          # model.py beside this file
    inputs: {x: {shape: [batch, 256], dtype: float32}}
    points: [{dims: {batch: {min: 1, max: 32}}}]
"""

BERT = """\
schema: aotpack.manifest/v1
bundle:
  name: mini-bert
  version: 1.4.0
  labels: {team: search, tier: prod}
requires:
  torch: ==2.13.*
  transformers: ">=5.20,<6"
targets:
  cpu:  {kind: cpu, march: x86-64-v3, simd: avx2}
  h100: {kind: cuda, arch: [sm_90]}
entries:
  encoder:
    kind: torch_export
    source: "models.bert:build"
    args: {layers: 2, hidden: 128, heads: 2, vocab: 30522, seed: 0}
    weights: external
    inputs:
      input_ids:      {shape: [batch, seq], dtype: int64, fill: {randint: [0, 30522]}}
      attention_mask: {shape: [batch, seq], dtype: int64, fill: ones}
    outputs: [last_hidden_state, pooler_output]
    precisions:
      - {params: float32,  target: cpu}
      - {params: bfloat16, target: h100}
    points:
      - name: online
        tier: hot
        weight: 0.9
        dims:
          batch: [1, 4, 8, 16]
          seq:
            ranges: [{min: 8, max: 64, opt: 32}, {min: 65, max: 128, opt: 96}]
      - name: offline
        tier: warm
        weight: 0.1
        dims:
          batch: {min: 1, max: 16, opt: 8}
          seq:   {min: 129, max: 512, opt: 256}
    inductor: {max_autotune: false}
    verify: {against: eager, rtol: 1.0e-4, atol: 1.0e-5, samples: 3}
    on_miss: {policy: jit, background: true, max_jit: 4}
build: {jobs: auto, reproducible: true}
runtime: {cache_max_size: 2GiB}
"""

POINTS = "points: [{dims: {batch: {min: 1, max: 32}}}]"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str | bytes, *overrides: str) -> Manifest:
    path = Path("m.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_manifest(path, overrides)


def problems(text: str | bytes, *overrides: str) -> list[str]:
    """`line:col path: message` of each problem; the file as well where it is not the manifest."""
    with pytest.raises(ManifestError) as caught:
        read(text, *overrides)
    return [str(each).removeprefix("m.yaml:").replace(": error:", "", 1) for each in caught.value.problems]


def changed(old: str, new: str, text: str = SMALLEST) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def encoder(text: str, *overrides: str) -> TorchExportEntry:
    return torch_entry(read(text, *overrides), "encoder")


def torch_entry(manifest: Manifest, name: str) -> TorchExportEntry:
    entry = manifest.entries[name]
    assert isinstance(entry, TorchExportEntry)
    return entry


def with_dims(batch: str) -> str:
    return changed("{min: 1, max: 32}", batch)


def with_input(form: str) -> str:
    """The smallest manifest with a second input; its dim, if it names one, is `n`."""
    dims = POINTS.replace("dims: {", "dims: {n: [2, 4], ") if "[n," in form else POINTS
    return changed(POINTS, dims).replace("dtype: float32}}", f"dtype: float32}}, y: {form}}}")


# What is meant


def test_the_smallest_manifest_has_the_documented_defaults() -> None:
    manifest = read(SMALLEST)
    entry = torch_entry(manifest, "encoder")
    assert manifest.targets == {"cpu": CpuTarget(kind="cpu", march="x86-64-v3", simd=None)}
    assert (manifest.requires, manifest.bundle.labels) == ({}, {})
    assert (manifest.build.jobs, manifest.build.reproducible) == ("auto", True)
    assert manifest.runtime.cache_max_size == 2 * 2**30
    assert (entry.precisions, entry.outputs, entry.targets) == (None, None, None)
    assert (entry.args, entry.inductor, entry.imports, entry.training) == ({}, {}, (), False)
    assert entry.weights == "external"
    assert entry.inputs == {"x": TensorInput(shape=(Linear("batch"), 256), dtype="float32", fill="randn")}
    assert entry.points == (Point(name="p0", tier="hot", weight=None, dims={"batch": (Range(1, 32, 6),)}),)
    assert entry.verify.model_dump() == {"against": "eager", "rtol": None, "atol": None, "samples": 3}
    assert entry.on_miss.model_dump() == {
        "policy": "jit",
        "background": True,
        "max_jit": 4,
        "when": "pays",
        "max_seconds": 600,
        "max_memory": None,
        "pad": None,
        "pad_values": {},
    }


def test_the_worked_example_is_read_in_full() -> None:
    manifest = read(BERT)
    entry = torch_entry(manifest, "encoder")
    assert (manifest.bundle.name, manifest.bundle.version) == ("mini-bert", "1.4.0")
    assert manifest.bundle.labels == {"team": "search", "tier": "prod"}
    assert manifest.requires == {"torch": "==2.13.*", "transformers": ">=5.20,<6"}
    assert manifest.targets["h100"] == CudaTarget(kind="cuda", arch=("sm_90",), ptx=None)
    assert entry.args == {"layers": 2, "hidden": 128, "heads": 2, "vocab": 30522, "seed": 0}
    assert [getattr(each, "fill", None) for each in entry.inputs.values()] == [RandintFill(randint=(0, 30522)), "ones"]
    assert entry.outputs == ("last_hidden_state", "pooler_output")
    assert entry.precisions == (
        Precision(params="float32", target="cpu"),
        Precision(params="bfloat16", target="h100"),
    )
    online, offline = entry.points
    assert (online.name, online.tier, online.weight) == ("online", "hot", 0.9)
    assert online.dims["batch"] == (Range(1, 1, 1), Range(4, 4, 4), Range(8, 8, 8), Range(16, 16, 16))
    assert online.dims["seq"] == (Range(8, 64, 32), Range(65, 128, 96))
    assert offline.dims == {"batch": (Range(1, 16, 8),), "seq": (Range(129, 512, 256),)}
    assert entry.inductor == {"max_autotune": False}
    assert (entry.verify.rtol, entry.verify.atol) == (1e-4, 1e-5)


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("{value: 3}", {"value": 3}),
        ("{value: null}", {"value": None}),
        ("{value: no}", {"value": "no"}),
        ("{dtype: int, range: [1, 64]}", {"dtype": "int", "range": (1, 64)}),
        ("{list: [{value: 1}, {tuple: [{value: 2}]}]}", {"items": ({"value": 1}, {"items": ({"value": 2},)})}),
        ("{dict: {a: {value: x}}}", {"items": {"a": {"value": "x"}}}),
        ("{class: 'm.n:N', fields: {a: {value: 1.5}}}", {"class_path": "m.n:N", "fields": {"a": {"value": 1.5}}}),
    ],
)
def test_the_keys_of_an_input_tell_its_kind(form: str, value: object) -> None:
    found: Input = encoder(with_input(form)).inputs["y"]
    assert found.model_dump() == value


@pytest.mark.parametrize(
    ("item", "size"),
    [
        ("7", 7),
        ("n", Linear("n")),
        ("2*n", Linear("n", 2)),
        ("n+1", Linear("n", 1, 1)),
        ("2 * n - 1", Linear("n", 2, -1)),
        ("0", 0),
    ],
)
def test_a_shape_holds_sizes_dims_and_linear_forms_of_one_dim(item: str, size: int | Linear) -> None:
    entry = encoder(with_input(f"{{shape: [n, {item}], dtype: float32}}"))
    found = entry.inputs["y"]
    assert isinstance(found, TensorInput)
    assert found.shape[1] == size


def test_a_linear_form_computes_and_spells_itself() -> None:
    assert [Linear("n", 2, -1)(5), Linear("n")(5)] == [9, 5]
    assert [str(each) for each in (Linear("n"), Linear("n", 2), Linear("n", 2, 1), Linear("n", 1, -3))] == [
        "n",
        "2*n",
        "2*n + 1",
        "n - 3",
    ]


@pytest.mark.parametrize(
    ("dtype", "fill"), [("float16", "randn"), ("complex64", "randn"), ("bool", "zeros"), ("int32", {"randint": (0, 2)})]
)
def test_fill_defaults_by_dtype(dtype: str, fill: object) -> None:
    assert encoder(with_input(f"{{shape: [2], dtype: {dtype}}}")).inputs["y"].model_dump()["fill"] == fill


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("2GiB", 2**31), ("1.5 kB", 1500), ("0", 0), ("4096", 4096), ("'7MB'", 7_000_000), ("0.5KiB", 512)],
)
def test_a_cache_size_is_bytes(text: str, size_bytes: int) -> None:
    assert read(SMALLEST + f"runtime: {{cache_max_size: {text}}}\n").runtime.cache_max_size == size_bytes


def test_points_are_named_by_their_place() -> None:
    text = changed(POINTS, "points: [{dims: {batch: 1}}, {name: b, dims: {batch: 2}}, {dims: {batch: 3}}]")
    assert [point.name for point in encoder(text).points] == ["p0", "b", "p2"]


def test_a_manifest_dumps_to_json_without_a_warning() -> None:
    forms = "{list: [{value: 1}, {dict: {a: {shape: [2], dtype: int8}}}]}"
    text = f"{with_input(forms)}    on_miss: {{pad: {{batch: [8, 16]}}}}\n"
    dumped = json.loads(read(text).model_dump_json(by_alias=True))
    assert dumped["entries"]["encoder"]["inputs"]["y"]["list"][0] == {"value": 1}
    assert dumped["entries"]["encoder"]["on_miss"]["pad"] == {"batch": [8, 16]}


def test_a_manifest_is_frozen_and_pickles() -> None:
    manifest = read(BERT)
    with pytest.raises(ValidationError):
        manifest.bundle.name = "other"
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_a_manifest_knows_its_file() -> None:
    assert read(SMALLEST).path == Path("m.yaml")


def test_a_build_that_is_not_reproducible_cannot_be_asked_for() -> None:
    [found] = problems(f"{SMALLEST}build: {{reproducible: false}}\n")
    assert found.endswith("build.reproducible: every build is reproducible; leave it out")


def test_anchors_and_merge_keys_work() -> None:
    text = changed(POINTS, "points:\n      - &p {dims: {batch: 1}, tier: warm}\n      - {<<: *p, dims: {batch: 2}}")
    assert [(point.tier, point.dims["batch"]) for point in encoder(text).points] == [
        ("warm", (Range(1, 1, 1),)),
        ("warm", (Range(2, 2, 2),)),
    ]


# What is wrong


def test_ten_mistakes_are_ten_lines_each_at_its_place() -> None:
    text = """\
schema: aotpack.manifest/v1
bundle: {name: true, version: 1.0}
requires: {torch: "2.13"}
targets:
  cpu: {kind: cpu, mrach: native}
  gpu: {kind: cuda}
entries:
  encoder:
    kind: torch_export
    inputs:
      x: {shape: [batch, -1], dtype: float32}
      x: {shape: [batch, 8], dtype: float32}
    points:
      - dims: {batch: {min: 9, max: 8}}
    verify: {rtol: "1e-3"}
    targets: [cpu, gpo]
"""
    assert problems(text) == [
        '2:16 bundle.name: expected text, found true (a boolean); put it in quotes: "true"',
        '2:31 bundle.version: expected text, found the number 1.0; put it in quotes: "1.0"',
        '3:19 requires.torch: expected a PEP 440 specifier such as ">=5.20,<6", found the text "2.13"; write "==2.13"',
        "5:20 targets.cpu: unknown key 'mrach'; did you mean 'march'?",
        "6:8 targets.gpu: missing key 'arch': a list of architectures such as [sm_80, sm_90]",
        (
            "9:5 entries.encoder: missing key 'source': \"pkg.module:name\" of what gives an nn.Module, "
            "or a path that ends in .pt2"
        ),
        (
            "11:26 entries.encoder.inputs.x.shape[1]: expected a size, a dim name or a form of one dim such as 2*n+1, "
            "found the number -1"
        ),
        "12:7 entries.encoder.inputs: duplicate key 'x' on line 12, first on line 11; remove one",
        "14:29 entries.encoder.points[0].dims.batch.min: min 9 is above max 8",
        '15:20 entries.encoder.verify.rtol: expected a number, found the text "1e-3"',
        "16:20 entries.encoder.targets[1]: unknown target 'gpo'; did you mean 'gpu'?",
    ]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        pytest.param(
            "v1", "v2", '1:9 schema: expected aotpack.manifest/v1, found the text "aotpack.manifest/v2"', id="v2"
        ),
        pytest.param(
            "schema: aotpack.manifest/v1\n", "", "1:1 missing key 'schema': aotpack.manifest/v1", id="no-schema"
        ),
        pytest.param(
            "kind: torch_export",
            "kind: onnx\n    op: x",
            "6:11 entries.encoder.kind: kind 'onnx' is not supported by this version; supported: torch_export, triton, nvrtc",
            id="other-kind",
        ),
        pytest.param(
            "{kind: cpu}", "{}", "3:16 targets.cpu: missing key 'kind': cpu or cuda", id="target-without-kind"
        ),
        pytest.param(
            "kind: torch_export\n",
            "grid: [1]\n",
            "6:5 entries.encoder: missing key 'kind': torch_export, triton or nvrtc",
            id="entry-without-kind",
        ),
        pytest.param(
            "kind: torch_export\n",
            "kimd: triton\n    grid: [1]\n",
            "6:5 entries.encoder.kimd: unknown key 'kimd'; did you mean 'kind'?",
            id="misspelt-kind",
        ),
        pytest.param(
            '"model:build"',
            '"model:build"\n    args: {sizes: [1, {eps: .nan}]}',
            "8:29 entries.encoder.args.sizes[1].eps: expected a finite number, found the number nan; "
            "a source that needs it makes it itself",
            id="nan-for-the-source",
        ),
        pytest.param(
            "{kind: cpu}",
            "{kind: gpu}",
            "3:23 targets.cpu.kind: kind 'gpu' is not supported by this version; supported: cpu, cuda",
            id="target-of-another-kind",
        ),
        pytest.param(
            "{kind: cpu}",
            "{kind: cuda, arch: sm_90}",
            '3:35 targets.cpu.arch: expected a list, found the text "sm_90"; write [sm_90]',
            id="one-arch",
        ),
        pytest.param("{cpu: {kind: cpu}}", "{}", "3:10 targets: is empty; expected at least one key", id="no-targets"),
        pytest.param(
            POINTS, "points: []", "9:13 entries.encoder.points: is empty; expected at least one item", id="no-points"
        ),
        pytest.param(
            '"model:build"',
            "model",
            '7:13 entries.encoder.source: expected "pkg.module:name" or a path that ends in .pt2, '
            'found the text "model"',
            id="source",
        ),
        pytest.param(
            "0.1.0",
            "1.4",
            '2:31 bundle.version: expected text, found the number 1.4; put it in quotes: "1.4"',
            id="float-version",
        ),
        pytest.param(
            "0.1.0",
            "v1.4.0",
            '2:31 bundle.version: expected a semantic version such as 1.4.0, found the text "v1.4.0"',
            id="version",
        ),
        pytest.param(
            "cpu: {",
            "5: {",
            '3:11 targets: a key is the number 5, expected text; if it is a name, put it in quotes: "5"',
            id="number-for-a-name",
        ),
        pytest.param(
            "encoder:",
            "en coder:",
            "5:3 entries.en coder: expected a name (letters, digits, _ . - after a letter or _), "
            'found the text "en coder"',
            id="name-with-a-space",
        ),
        pytest.param(
            "dims: {",
            "dims: {batch2: 1, ",
            "9:22 entries.encoder.points[0].dims.batch2: dim 'batch2' is in no shape of the inputs; "
            "did you mean 'batch'?",
            id="unused-dim",
        ),
        pytest.param(
            "dims: {batch",
            "dims: {btach",
            "9:22 entries.encoder.points[0].dims.btach: dim 'btach' is in no shape of the inputs; "
            "did you mean 'batch'?",
            id="misspelt-dim",
        ),
        pytest.param(
            "256]",
            "seq]",
            "9:21 entries.encoder.points[0].dims: dim 'seq' of inputs.x.shape[1] is not given; "
            "add a size, a list of sizes or a range",
            id="dim-not-given",
        ),
        pytest.param(
            POINTS,
            "points: [{name: p1, dims: {batch: 1}}, {dims: {batch: 2}}]",
            "9:44 entries.encoder.points[1]: a point before this one has the name 'p1' too; rename one",
            id="two-points-of-one-name",
        ),
    ],
)
def test_a_mistake_is_one_line_with_what_was_expected_and_found(old: str, new: str, line: str) -> None:
    assert problems(changed(old, new)) == [line]


@pytest.mark.parametrize(
    ("member", "line"),
    [
        ("targets: [cpu, cpu]", "targets[1]: is in the list twice; remove one"),
        ("targets: []", "targets: is empty; expected at least one item"),
        ("outputs: []", "outputs: is empty; expected at least one item"),
        ("outputs: [a, a]", "outputs[1]: is in the list twice; remove one"),
        (
            "precisions: [{params: float16, target: cup}]",
            "precisions[0].target: unknown target 'cup'; did you mean 'cpu'?",
        ),
        (
            "on_miss: {pad: {btch: 8}}",
            "on_miss.pad.btch: dim 'btch' is in no shape of the inputs; did you mean 'batch'?",
        ),
        ("on_miss: {pad: {batch: [8, 0]}}", "on_miss.pad.batch[1]: expected 1 or more, found the number 0"),
        (
            "on_miss: {policy: jti}",
            "on_miss.policy: expected one of jit, eager, pad, error, found the text \"jti\"; did you mean 'jit'?",
        ),
        ("verify: {samples: 65}", "verify.samples: expected 64 or less, found the number 65"),
        ("verify: {atol: .inf}", "verify.atol: expected a finite number, found the number inf"),
        ("inductor: {a: [1]}", "inductor.a: expected text, a number, true, false or null, found a list"),
        ("weights: embedded", 'weights: expected external, found the text "embedded"'),
        ("training: no", 'training: expected true or false, found the text "no"; write false'),
        ("imports: [a b]", 'imports[0]: expected a module name such as pkg.ops, found the text "a b"'),
    ],
)
def test_a_mistake_in_an_entry_has_the_path_of_its_value(member: str, line: str) -> None:
    [found] = problems(f"{SMALLEST}    {member}\n")
    assert found.split(" ", 1)[1] == f"entries.encoder.{line}"


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("3", ": expected {shape: [...], dtype: ...} for a tensor or {value: ...} for a constant, found the number 3"),
        ("{valeu: 3}", ": unknown key 'valeu'; did you mean 'value'?"),
        ("{shpae: [2], dtype: float32}", ": unknown key 'shpae'; did you mean 'shape'?"),
        ("{dtype: int}", ": missing key 'range': smallest and largest value, both included"),
        ("{shape: 3, dtype: bool}", ".shape: expected a list, found the number 3; write [3]"),
        ("{value: [1]}", ".value: expected text, a number, true, false or null, found a list"),
        (
            "{list: [{value: 1}, {value: {}}]}",
            ".list[1].value: expected text, a number, true, false or null, found a mapping",
        ),
        (
            "{shape: [2], dtype: bool, fill: rand}",
            ".fill: rand needs a float dtype, not bool; use {randint: [low, high]}",
        ),
        ("{shape: [2], dtype: bool, layout: channels_last}", ".layout: channels_last needs 4 dims, the shape has 1"),
        (
            "{shape: [2], dtype: int8, fill: {randint: [2, 2]}}",
            ".fill.randint: expected [low, high] with low below high, found [2, 2]",
        ),
    ],
)
def test_a_mistake_in_an_input_is_about_the_kind_that_was_meant(form: str, line: str) -> None:
    [found] = problems(with_input(form))
    assert found.split(" ", 1)[1] == f"entries.encoder.inputs.y{line}"


@pytest.mark.parametrize("item", ["m*n", "n*n", "n//2", "2*(n+1)", "class", "-1", "true", "1.5", "'8'", "0*n", "null"])
def test_what_is_no_size_is_refused(item: str) -> None:
    [found] = problems(with_input(f"{{shape: [2, {item}], dtype: bool}}"))
    assert "inputs.y.shape[1]: expected a size, a dim name or a form of one dim such as 2*n+1, found" in found


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read_is_one_line(name: str) -> None:
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(Path(name))


def test_a_problem_is_one_line_whatever_the_text_holds() -> None:
    lines = problems(changed("demo", '"a\\nb\\e[2J"') + '"x\\ny": 1\nbuild: {jobs: "\\n"}\n', "bundle.x\ny=1")
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)


# A36 and A37


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(
            changed("name: demo", "name: true"), "2:16 bundle.name: expected text, found true", id="boolean-name"
        ),
        pytest.param(
            f"{SMALLEST}    training: no\n", "10:15 entries.encoder.training: expected true or false", id="no-for-false"
        ),
        pytest.param(
            f"{SMALLEST}schema: x\n", "10:1 duplicate key 'schema' on line 10, first on line 1", id="duplicate-top"
        ),
        pytest.param(
            changed("{min: 1, max: 32}", "{min: 1, max: 32,\n      max: 8}"),
            "10:7 entries.encoder.points[0].dims.batch: duplicate key 'max' on line 10, first on line 9",
            id="duplicate-inside",
        ),
        pytest.param(f"{SMALLEST}dynamc: 1\n", "10:1 unknown key 'dynamc'; known: build, bundle,", id="unknown-key"),
        pytest.param(
            f"{SMALLEST}    on_mis: 1\n",
            "10:5 entries.encoder: unknown key 'on_mis'; did you mean 'on_miss'?",
            id="typo",
        ),
        pytest.param("entries:\n\tencoder: 1\n", "2:1 while scanning", id="tab"),
        pytest.param("", "1:1 the file is empty", id="empty"),
        pytest.param("# nothing\n", "1:1 there is nothing but comments", id="only-comments"),
        pytest.param(f"{SMALLEST}---\na: 1\n", "10:1 a second document starts here", id="two-documents"),
        pytest.param("- a\n", "1:1 the top level is a list; expected a mapping", id="list"),
        pytest.param(SMALLEST.encode() + b"x: caf\xe9\n", "10:7 byte 0xe9 is not UTF-8", id="latin-1"),
        pytest.param(SMALLEST + "x: a\0b\n", "10:5 character U+0000 (a NUL byte)", id="nul"),
        pytest.param(changed("demo", "*nope"), "2:16 bundle.name: alias *nope has no anchor &nope", id="alias"),
        pytest.param(
            changed("max: 32", "max: 99999999999999999999"),
            "9:43 entries.encoder.points[0].dims.batch.max: the number 99999999999999999999 does not fit 64 bits",
            id="huge-int",
        ),
        pytest.param(
            changed("demo", "!!python/object/apply:os.system [id]"),
            "2:16 bundle.name: tag !!python/object/apply:os.system is not allowed",
            id="python-tag",
        ),
    ],
)
def test_a36_yaml_that_does_not_mean_what_it_says_is_one_line(text: str | bytes, line: str) -> None:
    [found] = problems(text)
    assert found.startswith(line)


def test_a36_a_number_with_an_exponent_is_a_number() -> None:
    assert encoder(f"{SMALLEST}    verify: {{rtol: 1e-3}}\n").verify.rtol == 0.001


def test_a36_no_is_a_name_like_others() -> None:
    assert read(changed("name: demo", "name: no")).bundle.name == "no"


def test_a36_merge_keys_work_and_are_no_duplicates() -> None:
    text = changed("{cpu: {kind: cpu}}", "{a: &a {kind: cpu, march: x86-64-v2}, b: {<<: *a, march: x86-64-v4}}")
    assert [getattr(target, "march", "") for target in read(text).targets.values()] == ["x86-64-v2", "x86-64-v4"]


@pytest.mark.parametrize(
    ("batch", "ranges"),
    [
        pytest.param("{min: 1000, max: 1200}", (Range(1000, 1200, 1095),), id="opt-inside"),
        pytest.param("{min: 0, max: 8}", (Range(0, 8, 3),), id="min-0"),
        pytest.param("{min: 1, max: null}", (Range(1, None, 16),), id="unbounded"),
        pytest.param("[1, 2, 4, 8]", tuple(Range(size, size, size) for size in (1, 2, 4, 8)), id="exactly-these"),
        pytest.param("3", (Range(3, 3, 3),), id="one-size"),
        pytest.param("{ranges: [{min: 5, max: 8}, {min: 1, max: 4}]}", (Range(5, 8, 6), Range(1, 4, 2)), id="ranges"),
    ],
)
def test_a37_a_dim_becomes_ranges(batch: str, ranges: tuple[Range, ...]) -> None:
    assert encoder(with_dims(batch)).points[0].dims == {"batch": ranges}


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ("{min: 9, max: 8}", ".min: min 9 is above max 8"),
        ("{min: -1, max: 8}", ".min: expected 0 or more, found the number -1"),
        ("{min: 1, max: 8, opt: 9}", ".opt: opt 9 is outside the range, 1 to 8"),
        ("{min: 2, max: null, opt: 1}", ".opt: opt 1 is outside the range, 2 and up"),
        ('{min: "8", max: 9}', '.min: expected a whole number, found the text "8"; remove the quotes'),
        ("{min: 8.0, max: 9}", ".min: expected a whole number, found the number 8.0; write 8"),
        ("{min: true, max: 9}", ".min: expected a whole number, found true (a boolean)"),
        ("{min: 1}", ": missing key 'max': largest size; null for no end"),
        ("{min: 1, max: 8, otp: 3}", ": unknown key 'otp'; did you mean 'opt'?"),
        ("[]", ": is empty; expected at least one item"),
        ("[1, 2, 2]", "[2]: 2 overlaps 2, given before it; a size belongs to one variant"),
        ("[{min: 1, max: 2}]", ": expected a list of sizes, found mappings in it; for ranges write {ranges: [...]}"),
        ("{ranges: []}", ".ranges: is empty; expected at least one item"),
        (
            "{ranges: [{min: 1, max: null}, {min: 8, max: 9}]}",
            ".ranges[1]: 8 to 9 overlaps 1 and up, given before it; a size belongs to one variant",
        ),
        ('"8"', ': expected a whole number, found the text "8"; remove the quotes'),
        ("null", ": expected a whole number, found null"),
    ],
)
def test_a37_a_wrong_range_is_one_line_with_its_path(batch: str, line: str) -> None:
    [found] = problems(with_dims(batch))
    assert found.split(" ", 1)[1] == f"entries.encoder.points[0].dims.batch{line}"


@pytest.mark.parametrize(
    ("dim", "line"),
    [
        (
            "5",
            ': a key is the number 5, expected text; if it is a name, put it in quotes: "5"',
        ),
        (
            "-2",
            ': a key is the number -2, expected text; if it is a name, put it in quotes: "-2"',
        ),
        (
            "xx",
            ".xx: dim 'xx' is in no shape of the inputs; dims of the inputs: batch",
        ),
    ],
)
def test_a37_dims_go_by_the_names_in_shapes_and_never_by_index(dim: str, line: str) -> None:
    [found] = problems(changed("{batch: {min: 1, max: 32}}", f"{{batch: [1, 2], {dim}: 4}}"))
    assert found == f"9:37 entries.encoder.points[0].dims{line}"


def test_a37_another_max_is_another_manifest() -> None:
    eight, sixteen = read(with_dims("{min: 1, max: 8}")), read(with_dims("{min: 1, max: 16}"))
    assert eight.entries != sixteen.entries


@pytest.mark.parametrize("low", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("width", [0, 1, 2, 200, 10**6])
def test_a37_the_default_opt_is_inside_and_not_empty(low: int, width: int) -> None:
    opt = middle(low, low + width)
    assert low <= opt <= low + width
    assert opt > 0 or low + width == 0
    assert middle(low, None) >= max(low, 2)


# Overrides


@pytest.mark.parametrize(
    ("override", "ranges"),
    [
        ("entries.encoder.points[0].dims.batch=4", (Range(4, 4, 4),)),
        ("entries.encoder.points.p0.dims.batch=[1, 2]", (Range(1, 1, 1), Range(2, 2, 2))),
        ("entries.encoder.points[0].dims.batch.max=1", (Range(1, 1, 1),)),
        ("entries.encoder.points[0].dims={batch: {min: 2, max: 8, opt: 8}}", (Range(2, 8, 8),)),
    ],
)
def test_an_override_replaces_the_value_at_a_path(override: str, ranges: tuple[Range, ...]) -> None:
    assert encoder(SMALLEST, override).points[0].dims == {"batch": ranges}


def test_overrides_reach_named_points_absent_sections_and_names_with_dots() -> None:
    text = changed("encoder:", "enc.v1:", BERT)
    manifest = read(
        text,
        "entries.enc.v1.points.offline.dims.batch=2",
        "bundle.version=2.0.0",
        "bundle.version=2.0.1",
        "build.jobs=3",
    )
    assert torch_entry(manifest, "enc.v1").points[1].dims["batch"] == (Range(2, 2, 2),)
    assert (manifest.bundle.version, manifest.build.jobs) == ("2.0.1", 3)
    assert read(SMALLEST, "build.jobs=3", "entries.encoder.args.width=1e-3").build.jobs == 3


def test_an_override_of_a_shared_anchor_changes_one_place() -> None:
    text = changed("{cpu: {kind: cpu}}", "{a: &a {kind: cpu}, b: *a}")
    targets = read(text, "targets.a.march=x86-64-v4").targets
    assert [getattr(target, "march", "") for target in targets.values()] == ["x86-64-v4", "x86-64-v3"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("bundle.version", '1 expected K=V such as bundle.version=1.2.3, found the text "bundle.version"'),
        ("bundle.versoin=1.2.3", "1 bundle: unknown key 'versoin'; did you mean 'version'?"),
        ("bundle.version=1.2", '16 bundle.version: expected text, found the number 1.2; put it in quotes: "1.2"'),
        ("entries.encodr.source=a:b", "1 entries.encodr.source=a:b: nothing is at 'encodr'; did you mean 'encoder'?"),
        ("buld.jobs=1", "1 buld.jobs=1: nothing is at 'buld'; did you mean 'build'?"),
        ("entries.encoder.points[1].tier=hot", "1 entries.encoder.points[1].tier=hot: no item [1] in a list of 1"),
        (
            "entries.encoder.points.x.tier=hot",
            "1 entries.encoder.points.x.tier=hot: no item 'x' in the list; known: p0",
        ),
        ("bundle.name.x=1", "1 bundle.name.x=1: 'x' leads into the text \"demo\", expected a mapping or a list"),
        ("bundle.name=[1", "15 while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"),
        ("bundle.name=*x", "13 alias *x has no anchor &x above it"),
    ],
)
def test_a_wrong_override_is_a_line_at_set(override: str, line: str) -> None:
    assert problems(SMALLEST, "build.jobs=1", override) == [f"--set:2:{line}"]


def test_mistakes_in_the_file_and_in_overrides_come_together() -> None:
    lines = problems(changed("demo", "5"), "build.jobs=0", "x=1")
    assert [line.split(" ")[0] for line in lines] == ["2:16", "--set:1:12", "--set:2:1"]


# Editors


def test_the_schema_covers_every_key_and_says_what_it_is() -> None:
    schema = manifest_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert list(schema["properties"]) == [
        "schema",
        "bundle",
        "requires",
        "targets",
        "devices",
        "entries",
        "build",
        "runtime",
    ]
    assert schema["required"] == ["schema", "bundle", "targets", "entries"]
    assert schema["additionalProperties"] is False
    definitions = schema["$defs"]
    assert all("description" in definition for definition in definitions.values())
    assert {"list", "tuple", "dict", "class"} <= {key for each in definitions.values() for key in each["properties"]}
    forms = definitions["Point"]["properties"]["dims"]["additionalProperties"]["oneOf"]
    assert [form.get("type", form.get("$ref")) for form in forms] == [
        "integer",
        "array",
        "#/$defs/RangeForm",
        "#/$defs/RangesForm",
    ]


@pytest.mark.parametrize(
    "module", [manifest_devices, manifest_inputs, manifest_model, manifest_values, suggest, yaml12]
)
def test_public_names_exist_and_are_sorted(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert names == sorted(names)
    assert all(hasattr(module, name) for name in names)

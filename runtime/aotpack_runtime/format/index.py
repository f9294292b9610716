"""The index of a bundle: entries, variants, weights. `index_json` writes and reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from aotpack_runtime.format import layout
from aotpack_runtime.format.guard import Guards
from aotpack_runtime.format.output import Outputs
from aotpack_runtime.format.target import Target
from aotpack_runtime.format.tensor import Scalar
from aotpack_runtime.format.tree import Tree
from aotpack_runtime.record import EMPTY, Record

if TYPE_CHECKING:  # what only kernels have is not imported for models
    from aotpack_runtime.format.choice import Axes, Choice
    from aotpack_runtime.format.launch import Launch

Json = Any
Example = tuple[tuple[int, ...] | int | None, ...]
Tier = Literal["hot", "warm", "rare"]


class Default(Record):
    """A default value: a tree of scalars."""

    tree: Tree
    leaves: tuple[Scalar, ...]


class Parameter(Record):
    """One parameter of forward(), as `inspect.Parameter` names its kind; `default` None when there is none."""

    name: str
    kind: str
    default: Default | None = None


class File(Record):
    """One member: its digest and size."""

    digest: str
    size_bytes: int


class ArtifactRef(Record):
    """The files of one artifact; `digest` names its folder."""

    kind: str
    digest: str
    files: Mapping[str, File]

    def members(self) -> Mapping[str, File]:
        """Member path -> file."""
        return {layout.artifact(self.kind, self.digest, name): file for name, file in self.files.items()}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


class RecipeTarget(Record, kw_only=True):
    """What a variant compiled for it would need of a host, and what a job of the toolchain says of it."""

    target: Target
    job: Mapping[str, Json]


class Recipe(Record, kw_only=True):
    """How variants are compiled from a program: what they return, the toolchain's options, and the targets of the
    manifest, of which a host takes the first that it meets."""

    outputs: Outputs
    options: Mapping[str, Json]
    targets: tuple[RecipeTarget, ...]


class Variant(Record, kw_only=True):
    """One compiled specialization of an entry.

    `constants` maps each constant the artifact asks for, in its order, to a name in the weight set `weights`.
    `examples` are calls that fit, the first for warm-up and all of them for verification: for each leaf the shape of a
    tensor, the value of a symbolic int, or None. Of a kernel, `launch` says how it is launched and `axes` what it was
    compiled with. Of a program, `recipe` is how a miss compiles variants from it; None where it cannot.
    """

    id: str
    point: str
    tier: Tier
    target: Target
    artifact: ArtifactRef
    guards: Guards
    outputs: Outputs
    weights: str
    constants: tuple[tuple[str, str], ...]
    examples: tuple[Example, ...]
    axes: Axes = EMPTY
    launch: Launch | None = None
    recipe: Recipe | None = None


class Source(Record):
    """Where eager lives: `pkg.mod:name` or a saved program; `files` are the source files seen while it was built."""

    text: str
    args: Mapping[str, Json]
    files: Mapping[str, str]


class KernelRecipe(Record, kw_only=True):
    """How a miss compiles variants of a kernel: `manifest` is the entry as the manifest has it, `files` are those that
    its source is read from, by their path beside it, and `archs` what the targets name ("sm_90a")."""

    manifest: Mapping[str, Json]
    files: Mapping[str, File]
    archs: tuple[str, ...]

    def members(self) -> dict[str, File]:
        """Member path -> file."""
        return {layout.source(file.digest, layout.source_suffix(path)): file for path, file in self.files.items()}


class Kernel(Record, kw_only=True):
    """What makes an entry a kernel: its text, the arguments it writes, which variant is best, and its torch operator.

    `operator` is "ns::name", or "" for none; `types` gives the type of each parameter in a schema of torch ("Tensor",
    "int", "float", "bool"); `recipe` is how a miss compiles further variants, None where it cannot.
    """

    text: File
    suffix: str
    writes: tuple[str, ...]
    types: tuple[str, ...]
    operator: str = ""
    choice: Choice
    recipe: KernelRecipe | None = None


class Entry(Record, kw_only=True):
    """A callable with a name: a model, or a kernel if `kernel` is there. `variants` and `programs` are in the order in
    which they are tried."""

    name: str
    parameters: tuple[Parameter, ...]
    variants: tuple[Variant, ...]
    programs: tuple[Variant, ...]
    source: Source
    fills: Mapping[str, Json]
    on_miss: Mapping[str, Json]
    verify: Mapping[str, Json]
    imports: tuple[str, ...] = ()
    operators: Mapping[str, str] = EMPTY
    output_names: tuple[str, ...] | None = None
    training: bool = False
    kernel: Kernel | None = None

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)


class WeightRef(Record):
    """One weight: its tensor in the weights file, and the order of dims it is stored in when not row-major. A `host`
    one stays in host memory when the model is on a GPU, as a literal of forward() does."""

    tensor: str
    order: tuple[int, ...] | None = None
    host: bool = False


class WeightSet(Record):
    """The weights of an entry at one precision. Names that share a tensor are tied. `state` is written by calls.

    `dtype` is what the source was converted to ("" for its own dtypes).
    """

    weights: Mapping[str, WeightRef]
    state: tuple[str, ...] = ()
    dtype: str = ""


class Index(Record, kw_only=True):
    """What is in a bundle."""

    name: str
    version: str
    labels: Mapping[str, str]
    requires: Mapping[str, str]
    entries: Mapping[str, Entry]
    weights_file: File | None
    weight_sets: Mapping[str, WeightSet]
    provenance: Mapping[str, Json]
    settings: Mapping[str, Json] = EMPTY

    def variants(self) -> list[Variant]:
        """All variants and programs of all entries."""
        return [variant for entry in self.entries.values() for variant in (*entry.variants, *entry.programs)]

    def members(self) -> dict[str, File]:
        """Member path -> file, of everything but the index itself."""
        members: dict[str, File] = {}
        for variant in self.variants():
            members.update(variant.artifact.members())
        for entry in self.entries.values():
            if entry.kernel:
                members[layout.source(entry.kernel.text.digest, entry.kernel.suffix)] = entry.kernel.text
                members |= entry.kernel.recipe.members() if entry.kernel.recipe else {}
        if self.weights_file:
            members[layout.weights(self.weights_file.digest)] = self.weights_file
        return members

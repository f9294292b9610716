"""What must hold between the records of an index, beyond the form of each: ValueError says what does not.

An index that breaks one of these would fail later, in the middle of a call or of a warm-up, or answer with another
variant's result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

from aotpack_runtime.format import layout
from aotpack_runtime.format.expression import Expression, variable
from aotpack_runtime.format.guard import (
    DescriptorGuard,
    IntGuard,
    LeafGuard,
    NumberGuard,
    PointerGuard,
    TensorGuard,
    ValueGuard,
)
from aotpack_runtime.format.index import Entry, File, Index, Parameter, Recipe, Variant, WeightSet
from aotpack_runtime.format.output import Argument, OutputLeaf, Result, Size, View
from aotpack_runtime.format.tree import LEAF, Tree, children, paths

PARAMETER_KINDS = ("positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword")
"""Kinds of parameters, in the order in which a signature has them."""


def check_parameters(parameters: Sequence[Parameter]) -> None:
    """They are a signature that Python can have, with defaults that can be rebuilt from plain values."""
    places = [PARAMETER_KINDS.index(each.kind) for each in parameters]
    if places != sorted(places):
        raise ValueError(f"wrong parameter order: {', '.join(each.kind for each in parameters)}")
    names = Counter(each.name for each in parameters)
    if len(names) != len(parameters):
        raise ValueError(f"duplicate parameter name: {names.most_common(1)[0][0]!r}")
    defaulted = [each.default is not None for each in parameters if each.kind.startswith("positional_")]
    if defaulted != sorted(defaulted):
        raise ValueError("a parameter without a default follows one with a default")
    if any(each.default is not None for each in parameters if each.kind.startswith("var_")):
        raise ValueError("*args and **kwargs have no defaults")
    kinds = Counter(each.kind for each in parameters)
    if kinds["var_positional"] > 1 or kinds["var_keyword"] > 1:
        raise ValueError("more than one *args or **kwargs")
    for each in parameters:
        if each.default and (
            _has_class(each.default.tree) or _leaf_count(each.default.tree) != len(each.default.leaves)
        ):
            raise ValueError(f"the default of {each.name!r} cannot be rebuilt")


def check_variant(variant: Variant, parameters: Sequence[Parameter], checked: set[Hashable]) -> None:
    """Guards are of these parameters, and name only sizes that calls have; so do outputs and examples.

    `checked` is what variants of this entry have in common and was found good: parts by their ids, which live as long
    as the entry is checked, and the form of guards without their numbers.
    """
    guards = variant.guards
    parts = (id(guards), id(variant.outputs), id(variant.launch))
    if parts not in checked:
        form = (guards.trees, tuple(map(_form, guards.leaves)), id(variant.outputs))
        if form not in checked:
            _check_form(variant, parameters)
            checked.add(form)
        _check_relations(variant)
        checked.add(parts)
    if variant.launch is not None:
        if len(variant.artifact.files) != 1 or variant.artifact.kind not in layout.KERNELS:
            raise ValueError(f"the artifact of a kernel is one file, {' or '.join(layout.KERNELS)}")
    elif variant.artifact.kind in layout.KERNELS:
        raise ValueError(f"a {variant.artifact.kind} without a launch")
    elif not variant.examples:
        raise ValueError("no examples")
    if variant.recipe is not None:
        _check_recipe(variant, variant.recipe, _sizes(guards.leaves))
    for example in variant.examples:
        if len(example) != len(guards.leaves) or not all(map(_is_example, guards.leaves, example)):
            raise ValueError(f"the example {list(example)} is not of its guards")


def _form(guard: LeafGuard) -> Hashable:
    """What of a guard is looked at where its sizes are only named."""
    return guard.path, len(guard.dims) if isinstance(guard, TensorGuard) else type(guard)


def _check_form(variant: Variant, parameters: Sequence[Parameter]) -> None:
    """Guards are of the parameters, and outputs can be put together from results and from the sizes that calls have."""
    guards, outputs = variant.guards, variant.outputs
    if len(guards.trees) != len(parameters):
        raise ValueError(f"{len(guards.trees)} trees for {len(parameters)} parameters")
    places = [each.name for each in parameters]
    if any(tree != LEAF for tree in guards.trees):
        places = [path for tree, name in zip(guards.trees, places, strict=True) for path in paths(tree, name)]
    if places != [guard.path for guard in guards.leaves]:
        raise ValueError(f"guards are of {[guard.path for guard in guards.leaves]}, the parameters have {places}")
    sizes = _sizes(guards.leaves)
    if _has_class(outputs.tree) or _leaf_count(outputs.tree) != len(outputs.leaves):
        raise ValueError("outputs cannot be put together")
    for leaf in outputs.leaves:
        _check_output(leaf, guards.leaves, sizes)


def _check_relations(variant: Variant) -> None:
    """Layouts and relations name the sizes that calls have, and a launch passes what the guards let in."""
    guards = variant.guards
    sizes = _sizes(guards.leaves) if guards.where or not all(map(_is_plain, guards.leaves)) else ()
    for guard in guards.leaves:
        if isinstance(guard, TensorGuard):
            _check_layout(guard, sizes)
    _check_names(guards.where, sizes)
    if variant.launch is not None:
        from aotpack_runtime.format.launch import check_launch  # models do without

        check_launch(variant.launch, guards.leaves)
        if any(tree != LEAF for tree in guards.trees):
            raise ValueError("a kernel takes no containers")


def _is_plain(guard: LeafGuard) -> bool:
    return not isinstance(guard, TensorGuard) or isinstance(guard.layout, str)


def _check_recipe(variant: Variant, recipe: Recipe, sizes: Collection[str]) -> None:
    """It is a program's, and what it says of results can be put together as the program's own."""
    if variant.artifact.kind != layout.EXPORTED:
        raise ValueError("a recipe belongs to a program")
    if recipe.outputs.tree != variant.outputs.tree or len(recipe.outputs.leaves) != len(variant.outputs.leaves):
        raise ValueError("a recipe gives other outputs than its program")
    for leaf in recipe.outputs.leaves:
        _check_output(leaf, variant.guards.leaves, sizes)


def check_kernel(entry: Entry) -> None:
    """A kernel's variants are all launched, and take the leaves that its operator's types say; no other's are."""
    kernel = entry.kernel
    for variant in entry.variants:
        if (variant.launch is None) != (kernel is None):
            raise ValueError(f"{variant.id}: an entry is a model or a kernel, not both")
    if kernel is None:
        return
    if entry.programs:
        raise ValueError("a kernel has no programs")
    if len(kernel.types) != len(entry.parameters) or not set(kernel.types) <= {"Tensor", "int", "float", "bool"}:
        raise ValueError(f"types {list(kernel.types)} for {len(entry.parameters)} parameters")
    if any(parameter.kind not in ("positional_or_keyword", "keyword_only") for parameter in entry.parameters):
        raise ValueError("a kernel takes plain parameters")
    for variant in {id(variant.guards): variant for variant in entry.variants}.values():
        for kind, guard in zip(kernel.types, variant.guards.leaves, strict=True):
            if _schema_type(guard) != kind:
                raise ValueError(f"{variant.id}: {guard.words()} is not of type {kind}")
    tensors = {name for name, kind in zip(entry.parameter_names, kernel.types, strict=True) if kind == "Tensor"}
    ints = {name for name, kind in zip(entry.parameter_names, kernel.types, strict=True) if kind == "int"}
    for names, known in ((kernel.writes, tensors), (kernel.choice.names(), ints)):
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is none of {sorted(known)}")
    if kernel.operator and not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", kernel.operator):
        raise ValueError(f"{kernel.operator[:80]!r} is not ns::name")


def _schema_type(guard: LeafGuard) -> str:
    """The type in torch's schemas of what a guard of a kernel lets in, "" for a guard that is none of a kernel."""
    match guard:
        case PointerGuard(device="cuda") | DescriptorGuard(device="cuda"):
            return "Tensor"
        case IntGuard():
            return "int"
        case ValueGuard(value=value) if type(value) is int:
            return "int"
        case NumberGuard(kind=kind):
            return kind
    return ""


def check_members(index: Index) -> None:
    """Every id, and every member's bytes, stand for one thing only."""
    variants = index.variants()
    names = Counter(variant.id for variant in variants)
    if len(names) != len(variants):
        raise ValueError(f"two variants have the id {names.most_common(1)[0][0]!r}")
    known: dict[tuple[bool, str, str], File] = {}
    for variant in variants:
        artifact = variant.artifact
        is_program = artifact.kind == layout.EXPORTED
        if is_program and [file.digest for file in artifact.files.values()] != [artifact.digest]:
            raise ValueError(f"{variant.id}: an exported program is one file, named by its digest")
        for name, file in artifact.files.items():
            place = (is_program, artifact.digest, "" if is_program else name)  # what its path is made of
            if known.setdefault(place, file) != file:
                member = layout.artifact(artifact.kind, artifact.digest, name)
                raise ValueError(f"{member} is said to have two contents")


def check_weights(index: Index) -> None:
    """Every constant of every variant has its weight: a missing one would be a crash at the first call."""
    for name, item in index.weight_sets.items():
        _check_set(name, item, present=index.weights_file is not None)
    checked: set[tuple[str, int]] = set()
    for variant in index.variants():
        key = (variant.weights, id(variant.constants))  # variants share what is the same, which lives as long as they
        if (not variant.constants and not variant.weights) or key in checked:
            continue
        checked.add(key)
        known = index.weight_sets.get(variant.weights)
        if known is None:
            raise ValueError(f"variant {variant.id} names the weight set {variant.weights!r}, which is not there")
        for _, weight in variant.constants:
            if weight not in known.weights:
                raise ValueError(f"variant {variant.id} needs the weight {weight!r}, which is not there")


def _check_set(name: str, item: WeightSet, *, present: bool) -> None:
    if item.weights and not present:
        raise ValueError(f"the set {name!r} names weights, and there is no weights file")
    for state in item.state:
        if state not in item.weights:
            raise ValueError(f"the state {state!r} of the set {name!r} is no weight of it")
    for weight, ref in item.weights.items():
        if ref.order is not None and sorted(ref.order) != list(range(len(ref.order))):
            raise ValueError(f"the order of {weight!r} is {list(ref.order)}, no permutation of its dims")


def _check_layout(guard: TensorGuard, sizes: Collection[str]) -> None:
    if isinstance(guard.layout, str):
        if guard.layout not in ("any", "contiguous", "channels_last"):
            raise ValueError(f"{guard.path}: unknown layout {guard.layout!r}")
        if guard.layout == "channels_last" and len(guard.dims) < 3:
            raise ValueError(f"{guard.path}: channels_last with {len(guard.dims)} dims")
        return
    if len(guard.layout) != len(guard.dims):
        raise ValueError(f"{guard.path}: {len(guard.layout)} strides for {len(guard.dims)} dims")
    _check_names(guard.layout, sizes)


def _check_output(leaf: OutputLeaf, guards: Sequence[LeafGuard], sizes: Collection[str]) -> None:
    match leaf:
        case Result(index, _, shape):
            if index < 0:
                raise ValueError(f"an output is result {index}")
            _check_names(shape or (), sizes)
        case Argument(index):
            if not 0 <= index < len(guards):
                raise ValueError(f"an output is argument {index} of {len(guards)}")
        case Size(size):
            _check_names([size], sizes)
        case View(of=of, shape=shape, strides=strides, offset=offset):
            _check_output(of, guards, sizes)
            _check_names([*shape, *strides, offset], sizes)


def _check_names(expressions: Iterable[Expression], sizes: Collection[str]) -> None:
    for expression in expressions:
        for name in expression.names:
            if name not in sizes:
                raise ValueError(f"{expression} names {name!r}, which is no size of a call")


def _sizes(guards: Sequence[LeafGuard]) -> set[str]:
    """What expressions may name."""
    sizes: set[str] = set()
    for guard in guards:
        if isinstance(guard, TensorGuard):
            sizes.update(variable(guard.path, axis) for axis in range(len(guard.dims)))
        elif isinstance(guard, IntGuard):
            sizes.add(variable(guard.path))
    return sizes


def _is_example(guard: LeafGuard, example: Any) -> bool:
    if isinstance(guard, TensorGuard):
        if not isinstance(example, tuple) or len(example) != len(guard.dims):
            return False
        for size in example:  # noqa: SIM110 - a generator would take three times as long
            if type(size) is not int or size < 0:
                return False
        return True
    return type(example) is int if isinstance(guard, IntGuard) else example is None


def _leaf_count(tree: Tree) -> int:
    return 1 if tree == LEAF else sum(_leaf_count(child) for _, child in children(tree))


def _has_class(tree: Tree) -> bool:
    return tree != LEAF and (tree[0] == "class" or any(_has_class(child) for _, child in children(tree)))

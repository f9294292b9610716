"""What a manifest may say of kernels: entries of kind triton and nvrtc.

Both are a list of parameters, axes that multiply into variants, and how each variant is launched; they differ in what
their compilers are told.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from aotpack.manifest_inputs import RandintFill
from aotpack.manifest_values import (
    Bytes,
    Distinct,
    Identifier,
    Limit,
    Many,
    Name,
    ObjectPath,
    Positive,
    Scalar,
    Size,
    Strict,
    matching,
    wrong,
)
from aotpack.suggest import describe
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.words import Word, c_word, triton_word

AxisValue = Annotated[int | str, Field()]


def _text(value: object) -> object:
    """Numbers stand for expressions and words too: `grid: [1]`, `sak: 1`."""
    return str(value) if type(value) is int else value


def _expression(text: str) -> str:
    try:
        return parse(text).text
    except ValueError as error:
        raise wrong(str(error)) from None


def _braces(text: str) -> str:
    for name in re.findall(r"\{([^{}]*)\}", text):
        if not name.isidentifier():
            raise wrong(f"{{{name}}} in {describe(text)} is no name of an axis")
    if re.search(r"[{}]", re.sub(r"\{\w+\}", "", text)):
        raise wrong(f"a brace in {describe(text)} is open; an axis is written {{NAME}}")
    return text


ExpressionText = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | int), AfterValidator(_expression)]
Template = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | int), AfterValidator(_braces)]
KernelFill = Annotated[
    Annotated[Literal["randn", "rand", "ones", "zeros"], Tag("<fill>")] | Annotated[RandintFill, Tag("<randint>")],
    Discriminator(lambda value: "<fill>" if isinstance(value, str) else "<randint>"),
]


def _axis(value: object) -> object:
    """[16, 1], or (of C types) {float32: float}."""
    if isinstance(value, list) and not value:
        raise wrong("is empty; expected at least one value")
    if isinstance(value, list) and len({(type(item), item) for item in value if isinstance(item, int | str)}) < len(
        value
    ):
        raise wrong("holds a value twice, or something that is neither text nor a whole number")
    return value


AxisForm = Annotated[
    Annotated[tuple[AxisValue, ...], Field(strict=False), Tag("<values>")]
    | Annotated[Mapping[str, str], Field(min_length=1), Tag("<types>")],
    Discriminator(lambda value: "<types>" if isinstance(value, Mapping) else "<values>"),
    BeforeValidator(_axis),
]


def _point(value: Any) -> Any:
    """A point: name -> a number, a list of numbers, or an expression over the others."""
    if not isinstance(value, dict):
        raise wrong(f"expected a mapping of argument names to values, found {describe(value)}")
    for name, item in value.items():
        for one in item if isinstance(item, list) else [item]:
            if isinstance(one, str):
                try:
                    parse(one)
                except ValueError as error:
                    raise wrong(str(error), name) from None
            elif not isinstance(one, int | float):
                raise wrong(f"expected a number, a list of numbers or an expression, found {describe(one)}", name)
        if isinstance(item, list) and not item:
            raise wrong("is empty; expected at least one value", name)
    return value


KernelPoint = Annotated[dict[str, Any], BeforeValidator(_point)]
Rule = Annotated[dict[str, Scalar], Field(min_length=1)]


class KernelVerify(Strict):
    """How a kernel is compared, on a GPU, with a reference in torch."""

    against: ObjectPath = Field(description='"pkg.module:name", called with the arguments, its tensors in float64')
    rtol: Limit | None = Field(default=None, description="bound on ||out - ref|| / ||ref||; default: by dtype")
    samples: Annotated[int, Field(ge=1, le=64)] = Field(default=1, description="inputs drawn for each point")


class KernelOnMiss(Strict):
    """What serves a call that no variant fits."""

    policy: Literal["jit", "eager", "error"] = "jit"
    reference: bool = Field(
        default=False, description="`verify.against` serves it, for contiguous tensors of the shapes in `shapes`"
    )
    background: bool = Field(
        default=True, description="compile behind the call that the reference serves; without one the call waits"
    )
    max_jit: Size = Field(default=4, description="variants that misses may add")
    when: Literal["at_once", "never"] = Field(default="at_once", description="compile at the first miss, or never here")
    max_seconds: Positive = Field(default=120, description="what one compile may take, and a call that waits for it")
    max_memory: Bytes | None = Field(default=None, description="for each process of such a compile; default: 32GiB")


class KernelEntry(Strict):
    """What both kinds share."""

    kind: str
    source: str
    op: Annotated[str, matching(r"[A-Za-z_]\w*::[A-Za-z_]\w*", '"namespace::name"')] | None = Field(
        default=None, description="also register the entry as this torch operator"
    )
    params: Mapping[Identifier, Template] = Field(min_length=1, description="the kernel's parameters, in order")
    where: Annotated[tuple[ExpressionText, ...], Field(strict=False)] = Field(
        default=(), description="over numeric axes: combinations for which one does not hold are not built"
    )
    guards: Annotated[tuple[ExpressionText, ...], Field(strict=False)] = Field(
        default=(), description="over int arguments and axes: what must hold at a call"
    )
    key: Annotated[tuple[Identifier, ...], Field(strict=False)] = Field(
        default=(), description="arguments and axes that decide which variant is fastest, as @triton.autotune(key=...)"
    )
    choose: Literal["smallest", "rules", "tuned"] = Field(
        default="smallest", description="among variants that fit: the first, by rules, or by the table of aotpack tune"
    )
    rules: Annotated[tuple[Rule, ...], Field(strict=False)] = Field(
        default=(), description="{when: expression, AXIS: value}; the first that holds wins"
    )
    tuning: str | None = Field(default=None, description="the table that aotpack tune writes, beside the manifest")
    grid: Annotated[Many[ExpressionText], Field(max_length=3)] = Field(description="blocks: one to three expressions")
    writes: Distinct[Identifier] | None = Field(
        default=None, description="pointers that the kernel writes; default: all that are not const"
    )
    shapes: Mapping[Identifier, Annotated[tuple[ExpressionText, ...], Field(strict=False)]] = Field(
        default={}, description="pointer -> its dims, for verify, tune and bench"
    )
    points: Annotated[tuple[KernelPoint, ...], Field(strict=False)] = Field(
        default=(), description="hot shapes: the numbers of a call; lists multiply"
    )
    fill: Mapping[Identifier, KernelFill] = Field(default={}, description="pointer -> example values")
    verify: KernelVerify | None = None
    on_miss: KernelOnMiss = KernelOnMiss()
    targets: Distinct[Name] | None = Field(default=None, description="names of targets; default: all CUDA targets")

    # ---------------------------------------------------------------------------------- what the two kinds differ in

    def axis_values(self) -> dict[str, tuple[int | str, ...]]:
        """Axis -> its values, in the manifest's order."""
        raise NotImplementedError

    def spelling(self, axis: str, value: int | str) -> str:
        """What stands for a value of an axis in templates."""
        return str(value)

    def word(self, text: str) -> Word:
        """A parameter's word; ValueError when it is none."""
        raise NotImplementedError

    def config_names(self) -> frozenset[str]:
        """Names besides axes that each variant has a value of."""
        return frozenset()

    def config_picks(self) -> tuple[Mapping[str, Any], ...]:
        """What `config: N` of a rule stands for."""
        return ()

    def axis_field(self) -> str:
        """The key under which axes stand."""
        raise NotImplementedError

    def templates(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Texts in which {AXIS} stands for a value, with their places."""
        for name, text in self.params.items():
            yield ("params", name), text

    # ------------------------------------------------------------------------------------------------------- rules

    def launch_expressions(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Expressions in which a new name becomes an int argument, with their places."""
        for index, text in enumerate(self.grid):
            yield ("grid", index), text
        for name, dims in self.shapes.items():
            for index, text in enumerate(dims):
                yield ("shapes", name, index), text

    def extra_names(self) -> tuple[str, ...]:
        """Names of the launch that are no parameter and no axis: keyword-only int arguments of the entry."""
        known = {*self.params, *self.axis_values(), *self.config_names()}
        found: dict[str, None] = {}
        for _, text in self.launch_expressions():
            found |= dict.fromkeys(name for name in in_order(text) if name not in known)
        return tuple(found)

    def combinations(self) -> Iterator[dict[str, int | str]]:
        """Every choice of the axes, and of the config, that `where` lets through."""
        axes = self.axis_values()
        relations = [parse(text) for text in self.where]
        for values in itertools.product(*axes.values()):
            for config in self.config_picks() or ({},):
                chosen = {**dict(zip(axes, values, strict=True)), **config}
                numbers = {name: value for name, value in chosen.items() if isinstance(value, int)}
                if all(relation(numbers) for relation in relations):
                    yield chosen

    def calls(self) -> list[dict[str, int | float]]:
        """Every point as numbers: lists multiply, expressions are computed from the others."""
        return [call for point in self.points for call in calls_of(point)]

    @model_validator(mode="after")
    def _sound(self) -> Self:
        from aotpack.manifest_kernel_rules import check_kernel_entry  # which knows this class

        check_kernel_entry(self)
        return self


def calls_of(point: Mapping[str, Any]) -> Iterator[dict[str, int | float]]:
    """ValueError for values in terms of each other, ZeroDivisionError as it comes."""
    lists = [item if isinstance(item, list) else [item] for item in point.values()]
    for values in itertools.product(*lists):
        given = dict(zip(point, values, strict=True))
        numbers: dict[str, Any] = {name: value for name, value in given.items() if not isinstance(value, str)}
        waiting = {name: parse(value) for name, value in given.items() if isinstance(value, str)}
        while waiting:
            ready = {name: text(numbers) for name, text in waiting.items() if text.names <= numbers.keys()}
            if not ready:
                raise ValueError(f"{' and '.join(sorted(waiting))} cannot be computed: each is given by what it gives")
            numbers |= ready
            waiting = {name: text for name, text in waiting.items() if name not in ready}
        yield {name: numbers[name] for name in given}


def in_order(text: str) -> list[str]:
    """Variables of an expression, as they come."""
    names = parse(text).names
    found = [ast.unparse(node) for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.expr)]
    return [name for name in dict.fromkeys(found) if name in names]


# ------------------------------------------------------------------------------------------------------------- kinds


class Config(Strict):
    """The fields of a triton.Config; values of constexprs stand beside them."""

    num_warps: Positive = 4
    num_stages: Positive = 3
    num_ctas: Positive = 1
    maxnreg: Positive | None = None


def _config(value: Any) -> Any:
    """Fields of triton.Config are read by its model; what else there is are constexprs."""
    if not isinstance(value, dict):
        raise wrong(f"expected a mapping such as {{num_warps: 4}}, found {describe(value)}")
    for name, item in value.items():
        if not isinstance(item, int) or isinstance(item, bool):
            raise wrong(f"expected a whole number, found {describe(item)}", name)
        if name in Config.model_fields and item < 1:
            raise wrong(f"expected 1 or more, found {item}", name)
        if name in ("num_warps", "num_ctas") and (item & (item - 1) or item > 32):
            raise wrong(f"expected a power of two from 1 to 32, found {item}", name)
    return value


def _whole(configs: tuple[dict[str, int], ...]) -> tuple[dict[str, int], ...]:
    """The same with Triton's own defaults filled in, so that a config is known by its content."""
    if not configs:
        raise wrong("is empty; expected at least one config such as {num_warps: 4}")
    whole = [{"num_warps": 4, "num_stages": 3, "num_ctas": 1, **config} for config in configs]
    for index, config in enumerate(whole):
        if config in whole[:index]:
            raise wrong("is in the list twice; remove one", index)
        if config.keys() != whole[0].keys():
            other = min(config.keys() ^ whole[0].keys())
            raise wrong(f"{other!r} is given in some configs and not in others; give it in all", index)
    return tuple(whole)


class TritonEntry(KernelEntry):
    """A Triton kernel, compiled ahead of time for each architecture."""

    kind: Literal["triton"] = Field(description="triton")
    source: ObjectPath = Field(description='"pkg.module:name" of a function under @triton.jit')
    axes: Mapping[Identifier, AxisForm] = Field(default={}, description="name -> values; all axes multiply")
    configs: Annotated[
        tuple[Annotated[dict[str, int], BeforeValidator(_config)], ...], Field(strict=False), AfterValidator(_whole)
    ] = Field(default=({"num_warps": 4, "num_stages": 3, "num_ctas": 1},), description="fields of triton.Config")
    options: Mapping[str, Scalar] = Field(default={}, description="further options of Triton's compiler")

    def axis_values(self) -> dict[str, tuple[int | str, ...]]:
        return {name: tuple(values) for name, values in self.axes.items()}

    def word(self, text: str) -> Word:
        return triton_word(text)

    def axis_field(self) -> str:
        return "axes"

    def config_names(self) -> frozenset[str]:
        return frozenset(self.configs[0]) if self.configs else frozenset()

    def config_picks(self) -> tuple[Mapping[str, Any], ...]:
        return self.configs


class Limits(Strict):
    """What a cubin may take; a build that takes more fails."""

    registers: Positive | None = Field(default=None, description="registers a thread")
    spill_bytes: Size | None = Field(default=None, description="bytes of registers spilled to local memory")


class NvrtcEntry(KernelEntry):
    """A CUDA C++ kernel or template, compiled by NVRTC."""

    kind: Literal["nvrtc"] = Field(description="nvrtc")
    source: Annotated[str, matching(r".+\.cuh?", "a path that ends in .cu")] = Field(description="a .cu file")
    include_dirs: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        description='folders for #include, beside the manifest; "@cuda": the headers of NVRTC\'s own version',
    )
    headers: Mapping[str, str] = Field(default={}, description="name -> text of a header, for #include")
    name_expression: Template = Field(description='the kernel, such as "topk<{T}, {BLOCK}>"')
    template: Mapping[Identifier, AxisForm] = Field(
        default={}, description="name -> values, or {torch dtype: C type}; all of them multiply"
    )
    options: Distinct[str] | None = Field(default=None, description="flags of NVRTC, such as --use_fast_math")
    block: Annotated[Many[ExpressionText], Field(max_length=3)] = Field(description="threads: one to three expressions")
    smem: ExpressionText = Field(default="0", description="dynamic shared memory, in bytes")
    cluster: Annotated[Many[Positive], Field(max_length=3)] | None = None
    cooperative: bool = False
    limits: Limits = Limits()

    def axis_values(self) -> dict[str, tuple[int | str, ...]]:
        return {name: tuple(values) for name, values in self.template.items()}

    def axis_field(self) -> str:
        return "template"

    def templates(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        yield from super().templates()
        yield ("name_expression",), self.name_expression

    def spelling(self, axis: str, value: int | str) -> str:
        values = self.template[axis]
        return values[str(value)] if isinstance(values, Mapping) else str(value)

    def word(self, text: str) -> Word:
        return c_word(text)

    def launch_expressions(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        yield from super().launch_expressions()
        for index, text in enumerate(self.block):
            yield ("block", index), text
        yield ("smem",), self.smem

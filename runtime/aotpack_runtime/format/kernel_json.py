"""What makes an entry a kernel, as JSON: the record's writer and reader. Models do without this room."""

from __future__ import annotations

from typing import Any

from aotpack_runtime.format import layout
from aotpack_runtime.format.choice import dump_choice, parse_choice
from aotpack_runtime.format.index import Kernel
from aotpack_runtime.format.kernel_recipe import dump_kernel_recipe, parse_kernel_recipe
from aotpack_runtime.format.plain import dump_file, parse_file, text

Json = Any


def dump_kernel(kernel: Kernel) -> Json:
    recipe = {} if kernel.recipe is None else {"recipe": dump_kernel_recipe(kernel.recipe)}
    return {
        "text": dump_file(kernel.text),
        "suffix": kernel.suffix,
        "writes": list(kernel.writes),
        "types": list(kernel.types),
        "operator": kernel.operator,
        "choice": dump_choice(kernel.choice),
        **recipe,
    }


def parse_kernel(value: Json) -> Kernel:
    kernel = Kernel(
        text=parse_file(value["text"]),
        suffix=text(value["suffix"]),
        writes=tuple(text(name) for name in value["writes"]),
        types=tuple(text(item) for item in value["types"]),
        operator=text(value["operator"]),
        choice=parse_choice(value["choice"]),
        recipe=parse_kernel_recipe(value["recipe"]) if "recipe" in value else None,
    )
    layout.source(kernel.text.digest, kernel.suffix)
    return kernel

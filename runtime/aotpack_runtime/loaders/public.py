"""The way back for torch versions whose private runner is not known: torch's public `aoti_load_package`.

It wants an archive, unpacks it to a temporary folder at every load, imports `torch._inductor` and compiles probe
programs (5 s with an empty compiler cache), so it is only taken where `loaders/aoti.py` has nothing better.
"""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from aotpack_runtime import forks

_MEMBERS = {"archive_format": "pt2", "archive_version": "0", "byteorder": "little", ".data/version": "3\n"}


class PublicRunner:
    """A package behind torch's public loader, with the methods of the private runner that we use."""

    def __init__(self, path: str, device: torch.device) -> None:
        metadata = {"AOTI_DEVICE_KEY": device.type, "AOTI_PLATFORM": "linux"}
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "model.pt2")
            with zipfile.ZipFile(archive, "w") as out:
                for name, text in _MEMBERS.items():
                    out.writestr(f"model/{name}", text)
                out.writestr("model/data/aotinductor/model/model.wrapper_metadata.json", json.dumps(metadata))
                out.write(path, "model/data/aotinductor/model/model.wrapper.so")
            on_gpu = device.type == "cuda"
            with torch.cuda.device(device) if on_gpu else nullcontext():  # a container leaves its device as the current
                self._model = torch._inductor.aoti_load_package(
                    str(archive), device_index=device.index if on_gpu else -1
                )
        self._lock = forks.lock(forks.LAST)
        # Inside the library a constant's name is its dotted name with everything else written as "_".
        self._names = {re.sub(r"\W", "_", fqn): fqn for fqn in self._model.get_constant_fqns()}

    def get_constant_names_to_original_fqns(self) -> Mapping[str, str]:
        return self._names

    def update_constant_buffer(
        self,
        tensors: Mapping[str, torch.Tensor],
        use_inactive: bool,  # noqa: FBT001 - the private runner's own signature, called by position
        validate_full: bool,  # noqa: FBT001
        user_managed: bool,  # noqa: FBT001
    ) -> None:
        """Bind constants; there is no second buffer here, so calls wait meanwhile."""
        with self._lock:
            named = {self._names[name]: tensor for name, tensor in tensors.items()}
            self._model.load_constants(named, check_full_update=validate_full, user_managed=user_managed)

    def swap_constant_buffer(self) -> None:
        """Nothing to do: the constants are current when `update_constant_buffer` returns."""

    def run(self, inputs: list[Any]) -> list[torch.Tensor]:
        with self._lock:
            results: list[torch.Tensor] = self._model.loader.run(inputs)
            return results

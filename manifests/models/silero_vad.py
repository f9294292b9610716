"""Silero's voice activity detector at 16 kHz, as a module written from its tensor shapes.

The weights are those of the TorchScript in the silero-vad wheel. The safetensors file beside it holds others, whose
probabilities differ by up to 0.11.
"""

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from models.wheels import wheel_file

REQUIREMENT = "silero-vad==6.2.3"
MEMBER = "silero_vad/data/silero_vad.jit"
SHA256 = "e1122837f4154c511485fe0b9c64455f7b929c96fbb8d79fbdb336383ebd3720"

FRAME = 512  # new samples a call: 32 ms at 16 kHz
CONTEXT = 64  # samples of the frame before, which the caller puts in front
STATE = 128  # width of the LSTM's two state vectors


def build() -> nn.Module:
    """The 16 kHz network in eval mode, 309,633 parameters and buffers, float32."""
    prefix = "_model."  # the 8 kHz twin is `_model_8k.`
    weights = packaged().state_dict()
    network = SileroVad()
    network.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    return network.eval()


def packaged() -> torch.jit.ScriptModule:
    """The wheel's own TorchScript, which keeps context and state inside; the reference in tests."""
    path = wheel_file(REQUIREMENT, MEMBER, sha256=SHA256)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.load` is deprecated", category=DeprecationWarning)
        return torch.jit.load(path, map_location="cpu")


class SileroVad(nn.Module):
    """Spectrum, four convolutions, one LSTM step, a probability. Names follow the packaged state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = Spectrum()
        self.encoder = nn.Sequential(Conv(129, 128, 1), Conv(128, 64, 2), Conv(64, 64, 2), Conv(64, 128, 1))
        self.decoder = Decoder()

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Speech probability [batch, 1] and the next state [2, batch, 128].

        `x` is [batch, 576]: the last 64 samples of the frame before (zeros at the start), then 512 new ones in -1..1.
        `state` is [2, batch, 128], zeros at the start.
        """
        return self.decoder(self.encoder(self.stft(x)).squeeze(-1), state)


class Spectrum(nn.Module):
    """Magnitudes [batch, 129, 4] of a short-time Fourier transform written as a convolution."""

    forward_basis_buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forward_basis_buffer", torch.zeros(258, 1, 256))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x.unsqueeze(1), (0, 64), mode="reflect")
        real, imaginary = F.conv1d(x, self.forward_basis_buffer, stride=128).chunk(2, dim=1)
        return torch.sqrt(real**2 + imaginary**2)


class Conv(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.reparam_conv = nn.Conv1d(channels_in, channels_out, kernel_size=3, stride=stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.reparam_conv(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTMCell(STATE, STATE)
        self.decoder = nn.Sequential(nn.Dropout(0.1), nn.ReLU(), nn.Conv1d(STATE, 1, kernel_size=1), nn.Sigmoid())

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = self.rnn(x, (state[0], state[1]))
        return self.decoder(hidden.unsqueeze(-1)).squeeze(-1), torch.stack([hidden, cell])

"""Our own part of every fingerprint: count one up when a change here changes what a job gives."""

EXPORT_REVISION = 11
GPU_EXPORT_REVISION = 2
"""Of what is exported on a GPU alone."""
AOTI_REVISION = 7
CROSS_REVISION = 7
TRITON_REVISION = 2
NVRTC_REVISION = 1
VERIFY_REVISION = 1
PROOF_REVISION = 1

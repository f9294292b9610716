# syntax=docker/dockerfile:1
#
#   docker build --build-arg MANIFEST=quickstart.yaml -t quickstart .     a manifest of manifests/, built into the image
#   docker run --read-only --tmpfs /tmp -p 8000:8000 quickstart
#
# Kernels need no torch in either stage, and no C++ compiler:
#
#   docker build --target serve-kernels --build-arg MANIFEST=llm_kernels.yaml -t llm-kernels .
#
# Models without torch's Python, of torch the shared libraries alone:
#
#   docker build --target serve-slim -t quickstart-slim .
#
# Models for a GPU that the build has not (a target with a `device`): a CUDA build of torch, whose packages bring CUDA's
# headers, and the same in the serve stage.
#
#   docker build --build-arg TORCH=2.11.0 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 \
#       --build-arg MANIFEST=my_gpu.yaml -t my-gpu .
#
# The build stage has a C++ compiler and the builder. The serve stage has the runtime, torch and the bundle: nothing in
# it can compile, and what it runs is what `aotpack build` compared with eager.

ARG PYTHON=3.11
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

FROM python:${PYTHON}-slim AS base
ARG TORCH
ARG TORCH_INDEX
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN pip install --index-url "${TORCH_INDEX}" "torch==${TORCH}"

FROM base AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY runtime runtime
COPY bench/results/cross bench/results/cross
COPY aotpack aotpack
RUN pip wheel --no-deps --wheel-dir /wheels ./runtime \
 && pip install ./runtime '.[torch]'
COPY manifests manifests
# Packages that the manifest's model is made of; PACKAGES="transformers" for vit.yaml and llama_prefill.yaml.
ARG PACKAGES=""
RUN if [ -n "${PACKAGES}" ]; then pip install ${PACKAGES}; fi
ARG MANIFEST=quickstart.yaml
RUN aotpack build "manifests/${MANIFEST}" --output /bundle

FROM python:${PYTHON}-slim AS build-kernels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY runtime runtime
COPY bench/results/cross bench/results/cross
COPY aotpack aotpack
RUN pip wheel --no-deps --wheel-dir /wheels ./runtime \
 && pip install ./runtime '.[triton,nvrtc]'
COPY manifests manifests
ARG MANIFEST=llm_kernels.yaml
RUN aotpack build "manifests/${MANIFEST}" --output /bundle

# What a server of kernels stands on: Python, the runtime, cuda-bindings, and the driver of its host.
FROM python:${PYTHON}-slim AS serve-kernels
RUN --mount=type=bind,from=build-kernels,source=/wheels,target=/wheels \
    pip install --no-cache-dir /wheels/*.whl 'cuda-bindings>=12.9'
COPY --from=build-kernels /bundle /bundle

# A server of models without torch's Python: `docker build --target serve-slim`. Its callers bring arrays; NumPy is
# theirs to add.
FROM build AS slim
RUN aotpack export slim /bundle /slim

FROM python:${PYTHON}-slim AS serve-slim
COPY --from=slim /slim /slim
ENV PYTHONPATH=/slim/python
COPY examples/serve_arrays.py /app/serve_arrays.py
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin serve
USER serve
EXPOSE 8000
CMD ["python", "/app/serve_arrays.py", "/slim/bundle", "--host", "0.0.0.0"]

FROM base AS serve
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-index --no-deps /wheels/*.whl \
 && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin serve
COPY --from=build /bundle /bundle
COPY examples/serve.py /app/serve.py
USER serve
EXPOSE 8000
CMD ["python", "/app/serve.py", "/bundle", "--host", "0.0.0.0"]

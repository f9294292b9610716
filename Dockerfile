# syntax=docker/dockerfile:1
#
#   docker build --build-arg MANIFEST=quickstart.yaml -t quickstart .     a manifest of manifests/, built into the image
#   docker run --read-only --tmpfs /tmp -p 8000:8000 quickstart
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
COPY aotpack aotpack
RUN pip wheel --no-deps --wheel-dir /wheels ./runtime \
 && pip install ./runtime '.[torch]'
COPY manifests manifests
# Packages that the manifest's model is made of; PACKAGES="transformers" for vit.yaml and llama_prefill.yaml.
ARG PACKAGES=""
RUN if [ -n "${PACKAGES}" ]; then pip install ${PACKAGES}; fi
ARG MANIFEST=quickstart.yaml
RUN aotpack build "manifests/${MANIFEST}" --output /bundle

FROM base AS serve
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-index --no-deps /wheels/*.whl \
 && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin serve
COPY --from=build /bundle /bundle
COPY examples/serve.py /app/serve.py
USER serve
EXPOSE 8000
CMD ["python", "/app/serve.py", "/bundle", "--host", "0.0.0.0"]

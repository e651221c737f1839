# For CPU, the default:
#   docker build -t accel-train .
# For CUDA, a CUDA base and the torch build of its version; the driver's libraries come from the host (--gpus all):
#   docker build -t accel-train --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 --build-arg EXTRAS=deepspeed,kernels .
# (`devel` because DeepSpeed and Triton compile; `base` is enough without both.)
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=pde

ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
# The CUDA bases bring no Python, the Python bases their own.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git \
 && (command -v python3 || apt-get install -y --no-install-recommends python3 python3-dev python3-venv) \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/venv
# Before the sources, so that a change of them does not install torch again.
RUN pip install --no-cache-dir torch --index-url "${TORCH_INDEX}"

WORKDIR /workspace
COPY pyproject.toml README.md LICENSE ./
COPY accel_train accel_train
COPY recipes recipes
COPY accelerate_configs accelerate_configs
RUN pip install --no-cache-dir -e ".[${EXTRAS}]"

# Process 1 gets the signals of `docker stop` and Kubernetes, and passes them on.
ENTRYPOINT ["accel-train"]
CMD ["doctor"]

# The environments of a GPU cluster, two that cannot be one: Transformer Engine and apex are built for the torch of
# NVIDIA's image, vLLM for the torch that its wheel pins.
#
#   docker build --target trainer -t dapo-megatron:trainer .    torchrun, Megatron-core
#   docker build --target fleet   -t dapo-megatron:fleet .      vLLM servers on nodes of their own
#   docker build --target node    -t dapo-megatron:node .       both, for a run whose servers share the trainer's node
#
# None of them was built on the machine that this repository is tested on; CI checks this file with hadolint.
ARG PYTORCH_TAG=26.06-py3
ARG VLLM_TAG=v0.32.0

FROM nvcr.io/nvidia/pytorch:${PYTORCH_TAG} AS trainer
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# What the image was built around. pip's own constraint file of the image is replaced by ours: it also pins packages
# that Transformer Engine does not care for, at versions older than we need.
RUN pip list --format=freeze \
    | grep -iE '^(torch|torchvision|torchao|pytorch[-_]triton|triton|transformer[-_]engine|apex|flash[-_]attn|nvidia[-_]|numpy)' \
    | tee /opt/image-constraints.txt
ENV PIP_CONSTRAINT=/opt/image-constraints.txt
WORKDIR /opt/dapo-megatron
COPY . .
# pip stops with an error where a dependency asks for another torch; the comparison also finds one that it replaced.
RUN python -c "import torch, transformer_engine as te; print(torch.__version__, te.__version__)" >/tmp/before \
    && pip install --no-cache-dir . \
    && python -c "import torch, transformer_engine as te; print(torch.__version__, te.__version__)" >/tmp/after \
    && diff /tmp/before /tmp/after \
    && rm /tmp/before /tmp/after \
    && dapo-megatron --version
CMD ["bash"]

FROM vllm/vllm-openai:${VLLM_TAG} AS fleet
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/dapo-megatron
COPY . .
# Without dependencies: of ours a server needs vLLM, which is here, and OmegaConf, which reads the configuration.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN python3 -c "import torch; print(torch.__version__)" >/tmp/before \
    && python3 -m pip install --no-cache-dir --no-deps omegaconf==2.4.0 . \
    && python3 -c "import torch; print(torch.__version__)" >/tmp/after \
    && diff /tmp/before /tmp/after \
    && rm /tmp/before /tmp/after \
    && python3 -m dapo_megatron.cli serve --help
ENTRYPOINT []
CMD ["bash"]

FROM trainer AS node
# fleet.python: /opt/fleet/bin/python. A torch of its own, several GB; nothing of the trainer's environment changes.
RUN PIP_CONSTRAINT="" \
    && export PIP_CONSTRAINT \
    && python -m venv /opt/fleet \
    && /opt/fleet/bin/pip install --no-cache-dir vllm==0.32.0 \
    && /opt/fleet/bin/pip install --no-cache-dir --no-deps omegaconf==2.4.0 .

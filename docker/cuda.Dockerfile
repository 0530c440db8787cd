# MegaTrain for NVIDIA GPUs. PyTorch brings its own CUDA libraries; the host needs the driver and nvidia-container-toolkit.
#   docker build -f docker/cuda.Dockerfile -t megatrain .
#   docker run --gpus all --ulimit memlock=-1 --shm-size 16g -v $PWD/runs:/work/runs megatrain plan Qwen/Qwen3-8B
# memlock: host memory that the GPU copies from is pinned. What is cached (models of the hub, encoded data, compiled
# kernels) is in /work/.cache: `-v $HOME/.cache:/work/.cache` keeps it. `--user $(id -u)` works.
FROM python:3.12-slim

# Triton compiles the launcher of each kernel when it is first used.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY constraints.txt pyproject.toml README.md LICENSE /src/
COPY megatrain /src/megatrain
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[adapters]" "triton>=3.3,<3.10"
# For `--user`, which has no home of its own.
ENV HOME=/work
RUN mkdir runs && chmod a+rwx . runs
COPY configs configs
ENTRYPOINT ["megatrain"]
CMD ["--help"]

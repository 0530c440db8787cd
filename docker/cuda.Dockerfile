# MegaTrain for NVIDIA GPUs. PyTorch brings its own CUDA libraries; the host needs the driver and nvidia-container-toolkit.
#   docker build -f docker/cuda.Dockerfile -t megatrain .
#   docker run --gpus all --ulimit memlock=-1 --shm-size 16g -v $PWD/runs:/work/runs megatrain plan Qwen/Qwen3-8B
# memlock: host memory that the GPU copies from is pinned.
FROM python:3.12-slim

WORKDIR /work
COPY constraints.txt pyproject.toml README.md LICENSE /src/
COPY megatrain /src/megatrain
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[adapters]" "triton>=3.3,<3.10"
COPY configs configs
ENTRYPOINT ["megatrain"]
CMD ["--help"]

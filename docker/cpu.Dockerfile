# MegaTrain without a GPU: small models, planning for other machines. A tenth of the size of the CUDA image.
#   docker build -f docker/cpu.Dockerfile -t megatrain-cpu .
#   docker run megatrain-cpu plan meta-llama/Llama-3.1-8B --hardware rtx-4090
#   docker run -v $PWD/runs:/work/runs megatrain-cpu train configs/quickstart.yaml
# What is cached (models of the hub, encoded data, compiled kernels) is in /work/.cache. `--user $(id -u)` works.
FROM python:3.12-slim

WORKDIR /work
COPY constraints.txt pyproject.toml README.md LICENSE /src/
COPY megatrain /src/megatrain
RUN pip install --no-cache-dir -c /src/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
    "torch==2.13.0+cpu" "/src[adapters]"
# For `--user`, which has no home of its own.
ENV HOME=/work
RUN mkdir runs && chmod a+rwx . runs
COPY configs configs
ENTRYPOINT ["megatrain"]
CMD ["--help"]

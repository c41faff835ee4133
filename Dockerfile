# The image of a training job. Base with Python 3.11 or newer; for GPUs take one with the CUDA libraries torch needs.
#   docker build -t evenhand --build-arg COMMIT=$(git rev-parse HEAD) .
# TORCH_OPTIONS goes to pip when it installs torch: --build-arg TORCH_OPTIONS="--index-url URL" takes a build for another CUDA version.
#   docker run --rm -v $PWD:/work -w /work --user $(id -u) evenhand --nproc-per-node=2 -- train.epochs=3
ARG BASE=python:3.11-slim
FROM ${BASE} AS build
ARG TORCH_OPTIONS=""
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY pipeline pipeline
COPY shards shards
COPY launch launch
RUN python3 -m venv /opt/evenhand \
 && /opt/evenhand/bin/pip install --no-cache-dir -c constraints.txt ${TORCH_OPTIONS} torch==2.13.0 torchvision==0.28.0 \
 && /opt/evenhand/bin/pip install --no-cache-dir -c constraints.txt ".[deepspeed,s3]"

FROM ${BASE}
ARG COMMIT=""
COPY --from=build /opt/evenhand /opt/evenhand
COPY configs /app/configs
WORKDIR /app
# The store variable makes in-place restarts of torchrun work; telemetry has no place in a training job.
ENV PATH=/opt/evenhand/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    EVENHAND_COMMIT=${COMMIT} \
    HOME=/tmp
USER 10001:10001
# Exec form: signals reach the entry, which passes them on and returns an exit code that says what happened.
ENTRYPOINT ["python3", "-m", "launch.entry"]

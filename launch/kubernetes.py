"""A training as a Kubernetes batch job: prints the manifests, talks to no cluster.

    python -m launch.kubernetes image=registry/evenhand:1 nodes=2 gpus=8 name=c10 -- \\
        --config configs/cifar10_lt.yaml shards.url=s3://bucket/c10 checkpoint.url=s3://bucket/runs/c10 \\
        tracking.uri=http://mlflow:5000 | kubectl apply -f -

Settings of the job stand before the `--`, settings of the training after it, as for `python -m pipeline.train`. Both are
checked here, before any pod starts. The config file becomes a ConfigMap.

task=build builds shards instead: each pod writes its share, and settings of `python -m shards.build` stand after the `--`.

kind=job needs only Kubernetes: an Indexed Job and a headless Service by which the pods find the first pod.
kind=jobset and kind=trainjob are for clusters with JobSet or the Kubeflow Trainer: a lost pod restarts the whole group.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt

from pipeline import config as training
from pipeline.process.exit_status import EXIT_CODES
from shards.base import cli
from shards.base.errors import UserError
from shards.base.redact import redact
from shards.base.settings import Settings, find_config
from shards.config import BuildConfig, combine

PROG = "python -m launch.kubernetes"
CONTAINER = "node"  # the name the Kubeflow Trainer expects
PORT = 29500
WORK = "/work"  # for all output: the volume, or the disk of the pod, which is deleted with it
CONFIG = "/config/settings.yaml"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
USER = 10001  # of the image
MAX_NAME = 52  # names of pods are made from it and must have fewer than 64 letters
CACHED = 0.8  # of the pod's disk, for shards
UNITS = {"M": 1e6, "G": 1e9, "T": 1e12, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

Size = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(M|G|T|Mi|Gi|Ti)$")]
Manifest = dict[str, Any]


class JobConfig(Settings):
    name: str = Field("evenhand", description="of the job; a second job with the same name is the same job")
    image: str = Field("", description="container image made with the Dockerfile")
    task: Literal["train", "build"] = Field("train", description="train, or pack shards")
    kind: Literal["job", "jobset", "trainjob"] = Field(
        "job", description="plain Kubernetes, JobSet, or Kubeflow TrainJob"
    )
    namespace: str = Field("", description="empty = the one kubectl is set to")
    nodes: PositiveInt = Field(1, description="pods, one per machine")
    gpus: NonNegativeInt = Field(8, description="GPUs and ranks of a pod; 0 = one rank on CPUs")
    cpu: PositiveInt = Field(8, description="CPUs of a pod, for decoding and augmentation")
    memory: Size = Field("64Gi", description="memory of a pod, shared memory included")
    shared_memory: Size = Field("8Gi", description="/dev/shm, for the ranks of a pod")
    disk: Size = Field("100Gi", description="disk of a pod for cached shards and, without a volume, its output")
    volume: str = Field("", description="PersistentVolumeClaim for all output; with nodes > 1 it must be ReadWriteMany")
    secret: str = Field("", description="Secret whose keys become environment variables (AWS_..., MLFLOW_TRACKING_...)")
    service_account: str = Field("", description="for clusters that give storage rights to accounts")
    restarts: NonNegativeInt = Field(
        10, description="failures before giving up; preemption and drained machines do not count"
    )
    grace_seconds: Annotated[int, Field(ge=30)] = Field(150, description="between SIGTERM and SIGKILL; saving must fit")
    hours: NonNegativeInt = Field(0, description="end the job after this long, restarts included; 0 = never")
    keep_days: NonNegativeInt = Field(7, description="remove the finished job and its logs after this long; 0 = never")
    queue: str = Field("", description="Kueue queue")
    priority: str = Field("", description="PriorityClass")
    nodes_with: dict[str, str] = Field(
        {}, description="labels the machines must have, as nodes_with.label=value in a file"
    )
    tolerate: list[str] = Field([], description="taints to tolerate, such as nvidia.com/gpu or a spot taint")


COMMAND = cli.Command(PROG, __doc__ or "", JobConfig, passes_on="settings of the training")
BUILD = cli.Command("python -m shards.build", "", BuildConfig, combine=combine)


def main(argv: list[str]) -> int:
    job, options = COMMAND.load_own(argv)
    file, options = _take_config(options, training.CONFIGS if job.task == "train" else None)
    from_file = ["--config", str(file)] if file else []
    if job.task == "train":
        run = training.load(from_file + options)
        durable = {"checkpoint.url": run.checkpoint.url, "tracking.uri": run.tracking.uri}
        options += _default_paths(job, run)
        if job.nodes > 1:
            durable["shards.url"] = run.shards.url
    else:
        shards = BUILD.load(from_file + options)
        durable = {"output": shards.output}
        options += [] if shards.writers else [f"writers={job.cpu}"]
    text = file.read_text("utf-8") if file else ""
    _check(job, durable, [*options, *text.splitlines()])
    print(yaml.safe_dump_all(manifests(job, options, text), sort_keys=False), end="")
    return 0


def _take_config(options: list[str], shipped: Path | None) -> tuple[Path | None, list[str]]:
    """The config file among the train options, and the rest of them."""
    rest, name = list(options), ""
    for at, word in enumerate(options):
        if word == "--config" and at + 1 < len(options):
            name, rest = options[at + 1], options[:at] + options[at + 2 :]
        elif word.startswith("--config="):
            name, rest = word.partition("=")[2], options[:at] + options[at + 1 :]
    return find_config(name, shipped) if name else None, rest


def _check(job: JobConfig, durable: dict[str, str], written: list[str]) -> None:
    """Refuse what the API server would refuse late, or accept although it cannot work.

    durable: URLs of what must outlive a pod, by setting; written: what the manifests will show.
    """
    if not job.image:
        raise UserError("image is empty. Build one with `docker build -t NAME .`, push it, and give image=NAME.")
    if not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?", job.name):
        raise UserError(
            f"name={job.name}: pods get their DNS names from it, so it must be small letters, digits and '-', begin with "
            f"a letter, and have at most {MAX_NAME} characters. Give another name."
        )
    secrets = [redact(text) for text in written if redact(text) != text]
    if secrets:
        raise UserError(
            f"{secrets[0].strip()}: everybody who may read jobs would see these credentials. Put them into a Secret as "
            "environment variables (MLFLOW_TRACKING_USERNAME, AWS_SECRET_ACCESS_KEY, ...) and give secret=ITS-NAME."
        )
    if _bytes(job.shared_memory) >= _bytes(job.memory):
        raise UserError("shared_memory is a part of memory and must be smaller. Raise memory or lower shared_memory.")
    if job.task == "build" and job.kind != "job":
        raise UserError(f"kind={job.kind} is for trainings; building shards needs no group. Leave it out.")
    lost = [key for key, url in durable.items() if not _is_remote(url)]
    if lost and not job.volume:
        raise UserError(
            f"{' and '.join(lost)} would be on the disk of a pod, which is deleted with the pod"
            f"{' and not visible to the others' if job.nodes > 1 else ''}. Give {'URLs' if len(lost) > 1 else 'a URL'} outside "
            "(s3://bucket/..., http://mlflow:5000), or volume=CLAIM for everything."
        )


def _is_remote(url: str) -> bool:
    return url.startswith("databricks") or ("://" in url and not url.startswith(("file://", "sqlite://")))


def _default_paths(job: JobConfig, run: training.Config) -> list[str]:
    """Output and cache folders in a pod, if the training does not set them; the cache must fit its disk. What the
    environment says of MLflow is written out.
    """
    room = CACHED * _bytes(job.disk) / 1e9
    given = training.tracking_environment()  # of this machine: the pods do not have it, nor its files
    given = {key: value for key, value in given.items() if key != "uri" or _is_remote(value)}
    return [
        *([] if run.output else [f"output={WORK}/{job.name}"]),
        *(f"tracking.{key}={value}" for key, value in given.items() if getattr(run.tracking, key) == value),
        *([] if run.data.cache.folder else ["data.cache.folder=/cache"]),
        *([] if run.data.cache.max_gb <= room else [f"data.cache.max_gb={room:.0f}"]),
    ]


def _bytes(size: str) -> float:
    number = size.rstrip("MGTi")
    return float(number) * UNITS[size[len(number) :]]


def manifests(job: JobConfig, options: list[str], config_text: str) -> list[Manifest]:
    """The manifests, in the order to apply them. `options`: of the training, without its config file."""
    config = _config_map(job, config_text) if config_text else None
    container = _container(job, options, config is not None)
    pod = _pod(job, container, config["metadata"]["name"] if config else "")
    documents = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[job.kind](job, pod)
    return [*([config] if config else []), *documents]


def _metadata(job: JobConfig, name: str = "") -> Manifest:
    labels = {"app.kubernetes.io/name": "evenhand", "app.kubernetes.io/instance": job.name}
    return {"name": name or job.name, **({"namespace": job.namespace} if job.namespace else {}), "labels": labels}


def _queue_metadata(job: JobConfig) -> Manifest:
    """Metadata of what Kueue starts."""
    about = _metadata(job)
    if job.queue:
        about["labels"] = about["labels"] | {"kueue.x-k8s.io/queue-name": job.queue}
    return about


def _config_map(job: JobConfig, text: str) -> Manifest:
    """Named by its content: all pods of a job read the same file."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    about = _metadata(job, f"{job.name}-{digest}")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": about,
        "immutable": True,
        "data": {"settings.yaml": text},
    }


def _command(job: JobConfig, options: list[str], with_config: bool) -> Manifest:
    """What runs in the container, and its environment."""
    words = [_escape(word) for word in [*(["--config", CONFIG] if with_config else []), *options]]
    if job.task == "build":
        # Not $(JOB_COMPLETION_INDEX): only variables that come earlier in the list are replaced in another's value.
        rank = {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
        environment = [rank, {"name": "WORLD_SIZE", "value": str(job.nodes)}]
        return {"command": ["python3", "-m", "shards.build"], "args": words, "env": environment}
    group: list[str] = []
    if job.kind != "trainjob":  # the Trainer sets PET_ variables for torchrun
        first = f"{job.name}-0.{job.name}" if job.kind == "job" else f"{job.name}-node-0-0.{job.name}"
        group = [
            f"--nnodes={job.nodes}",
            f"--nproc-per-node={job.gpus or 1}",
            "--node-rank=$(JOB_COMPLETION_INDEX)",
            f"--master-addr={first}",
            f"--master-port={PORT}",
        ]
    environment = [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(job.grace_seconds - 20)}]
    return {"command": ["python3", "-m", "launch.entry"], "args": [*group, "--", *words], "env": environment}


def _container(job: JobConfig, options: list[str], with_config: bool) -> Manifest:
    size: Manifest = {"cpu": str(job.cpu), "memory": job.memory, "ephemeral-storage": job.disk}
    if job.gpus and job.task == "train":
        size["nvidia.com/gpu"] = str(job.gpus)
    mounts: list[Manifest] = [
        {"name": "disk", "mountPath": "/tmp", "subPath": "tmp"},
        {"name": "disk", "mountPath": "/cache", "subPath": "cache"},
        {"name": "volume", "mountPath": WORK} if job.volume else {"name": "disk", "mountPath": WORK, "subPath": "work"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if with_config:
        mounts.append({"name": "config", "mountPath": "/config", "readOnly": True})
    return {
        "name": CONTAINER,
        "image": job.image,
        **_command(job, options, with_config),
        "workingDir": WORK,
        **({"envFrom": [{"secretRef": {"name": job.secret}}]} if job.secret else {}),
        "resources": {"requests": dict(size), "limits": dict(size)},
        "terminationMessagePolicy": "FallbackToLogsOnError",  # `kubectl describe` shows the last sentence
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _escape(word: str) -> str:
    """Kubernetes replaces $(NAME) in arguments; $$ keeps it."""
    return word.replace("$(", "$$(")


def _pod(job: JobConfig, container: Manifest, config_map: str) -> Manifest:
    """The pod template's spec. Everything Pod Security 'restricted' asks for."""
    volumes: list[Manifest] = [
        {"name": "disk", "emptyDir": {"sizeLimit": job.disk}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}},
    ]
    if job.volume:
        volumes.append({"name": "volume", "persistentVolumeClaim": {"claimName": job.volume}})
    if config_map:
        volumes.append({"name": "config", "configMap": {"name": config_map}})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        "automountServiceAccountToken": False,
        **({"serviceAccountName": job.service_account} if job.service_account else {}),
        **({"priorityClassName": job.priority} if job.priority else {}),
        **({"nodeSelector": job.nodes_with} if job.nodes_with else {}),
        **({"tolerations": [{"key": key, "operator": "Exists"} for key in job.tolerate]} if job.tolerate else {}),
        **({"affinity": _one_per_machine(job)} if job.nodes > 1 else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # otherwise every file of a large volume is visited at every start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _one_per_machine(job: JobConfig) -> Manifest:
    apart = {
        "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": job.name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]
        }
    }


def _template(job: JobConfig, pod: Manifest, **labels: str) -> Manifest:
    return {"metadata": {"labels": _metadata(job)["labels"] | labels}, "spec": pod}


_REFUSED = {"containerName": CONTAINER, "operator": "In", "values": [EXIT_CODES["refused"]]}
_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


def _indexed_job(job: JobConfig, pod: Manifest, backoff: int, disrupted: str, **labels: str) -> Manifest:
    """A Job whose pods have an index. A refusal is final; `disrupted`: the action when a pod is evicted."""
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": backoff,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": disrupted, "onPodConditions": _DISRUPTED},
                {"action": "FailJob", "onExitCodes": _REFUSED},
            ]
        },
        "template": _template(job, pod, **labels),
    }


def _time_limits(job: JobConfig) -> Manifest:
    out: Manifest = {"activeDeadlineSeconds": 3600 * job.hours} if job.hours else {}
    return out | ({"ttlSecondsAfterFinished": 86400 * job.keep_days} if job.keep_days else {})


def _job(job: JobConfig, pod: Manifest) -> list[Manifest]:
    group = job.task == "train"  # the pods of a training must find each other
    # When one pod fails the others end too, and each is counted: one failure of the group counts once per pod.
    spec = _indexed_job(job, ({"subdomain": job.name} if group else {}) | pod, job.restarts * job.nodes, "Ignore")
    document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _queue_metadata(job),
        "spec": _time_limits(job) | spec,
    }
    if not group:
        return [document]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods look for the first while it is starting
            "selector": {"app.kubernetes.io/instance": job.name},
            "ports": [{"name": "torchrun", "port": PORT}],
        },
    }
    return [service, document]


def _jobset(job: JobConfig, pod: Manifest) -> list[Manifest]:
    spec = _indexed_job(job, pod, 0, "FailJob") | ({"activeDeadlineSeconds": 3600 * job.hours} if job.hours else {})
    body = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
        "failurePolicy": _group_restarts(job),
        **({"ttlSecondsAfterFinished": 86400 * job.keep_days} if job.keep_days else {}),
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
    }
    return [
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _queue_metadata(job), "spec": body}
    ]


def _group_restarts(job: JobConfig) -> Manifest:
    """JobSet's rules: a refusal is final, an evicted pod is not counted, any other failure is counted once."""
    return {
        "maxRestarts": job.restarts,
        "rules": [
            {
                "name": "refused",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f".*exit code {EXIT_CODES['refused']} .*"],
            },
            {
                "name": "disrupted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def _trainjob(job: JobConfig, pod: Manifest) -> list[Manifest]:
    """Pod details are in a TrainingRuntime of our own; the TrainJob sets number and size of the pods."""
    api = "trainer.kubeflow.org/v1alpha1"
    container = pod["containers"][0]
    shape = {
        key: value for key, value in container.items() if key not in ("image", "command", "args", "resources", "env")
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    inner = _indexed_job(job, pod | {"containers": [shape | {"image": job.image}]}, 0, "FailJob")
    del inner["completions"], inner["parallelism"]  # the Trainer's
    template = {"metadata": {"labels": labels}, "spec": inner}
    replicated = [{"name": "node", "replicas": 1, "template": template}]
    jobset = {"failurePolicy": _group_restarts(job), "replicatedJobs": replicated}
    runtime = {
        "apiVersion": api,
        "kind": "TrainingRuntime",
        "metadata": _metadata(job) | {"labels": _metadata(job)["labels"] | {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": jobset}},
    }
    trainer = {
        "image": job.image,
        "command": container["command"],
        "args": container["args"],
        "env": container["env"],
        "numNodes": job.nodes,
        "numProcPerNode": job.gpus or 1,
        "resourcesPerNode": container["resources"],
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    body = {
        "runtimeRef": reference,
        "trainer": trainer,
        **({"activeDeadlineSeconds": 3600 * job.hours} if job.hours else {}),
    }
    return [runtime, {"apiVersion": api, "kind": "TrainJob", "metadata": _queue_metadata(job), "spec": body}]


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()

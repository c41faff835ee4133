"""Manifests: accepted by the schemas, true to what the job needs, and their command trains on two pods."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import free_port, worker_env

from launch import kubernetes
from shards.base.errors import UserError
from shards.build import ensure
from shards.config import BuildConfig

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.29", "1.33", "1.37")
OUTSIDE = ["shards.url=s3://bucket/c10", "checkpoint.url=s3://bucket/run", "tracking.uri=http://mlflow:5000"]
FULL = [
    "name=c10", "image=registry/evenhand:1", "nodes=2", "namespace=vision", "queue=spare", "priority=low", "hours=48",
    "secret=keys", "service_account=trainer", "tolerate=[nvidia.com/gpu]", "nodes_with.zone=a",
]  # fmt: skip
BARE = ["image=registry/evenhand:1", "gpus=0", "volume=claim", "keep_days=0"]


def rendered(job: list[str], train: list[str]) -> list[dict[str, Any]]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert kubernetes.main([*job, "--", *train]) == 0
    return list(yaml.safe_load_all(out.getvalue()))


def with_file(*words: str) -> list[str]:
    return ["--config", str(ROOT / "configs/cifar10_lt.yaml"), *OUTSIDE, *words]


CASES = {
    f"{kind}-{size}": ([*job, f"kind={kind}"], train)
    for kind in ("job", "jobset", "trainjob")
    for size, job, train in (("full", FULL, with_file()), ("bare", BARE, []))
} | {"job-build": ([*BARE, "task=build", "nodes=3"], ["source=digits", "output=/work/shards"])}


@pytest.fixture(scope="module")
def documents() -> dict[str, list[dict[str, Any]]]:
    return {name: rendered(job, train) for name, (job, train) in CASES.items()}


def jobs_in(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs of all Jobs a manifest leads to."""
    spec = document["spec"]
    if document["kind"] == "Job":
        return [spec]
    if document["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [part["template"]["spec"] for part in spec.get("replicatedJobs", [])]


def of_kind(documents: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] in kinds]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_fits_the_schemas(documents, version: str, tmp_path: Path) -> None:
    """Kinds of other projects have none, but the Jobs inside them do. An unknown kind is a warning, so it is looked for."""
    files = []
    for name, found in documents.items():
        core = of_kind(found, "ConfigMap", "Service", "Job")
        for document in of_kind(found, "JobSet", "TrainingRuntime"):
            for spec in jobs_in(document):
                core.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": spec})
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump_all(core))
    tool = Path(sys.executable).parent / "kubernetes-validate"
    done = subprocess.run([tool, "--strict", "-k", version, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARN" not in done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed") >= len(files)


def test_kinds_of_other_projects_have_only_fields_their_models_know(documents) -> None:
    """Unknown fields are dropped by the models: what goes in must come out."""
    import kubeflow_trainer_api.models as models

    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    seen = set()
    for found in documents.values():
        for document in of_kind(found, *kinds):
            assert kinds[document["kind"]].from_dict(document).to_dict() == document
            seen.add(document["kind"])
    assert seen == set(kinds)


def test_what_no_schema_knows(documents) -> None:
    """Rules that the API server checks late or not at all, each of which would lose a job."""
    for name, found in documents.items():
        named = {(d["kind"], d["metadata"]["name"]) for d in found}
        assert all(d["metadata"].get("namespace") == ("vision" if "full" in name else None) for d in found)
        for document in of_kind(found, "Job", "JobSet", "TrainingRuntime"):
            for job in jobs_in(document):
                pod, labels = job["template"]["spec"], job["template"]["metadata"]["labels"]
                container = pod["containers"][0]
                assert job.get("parallelism") == job.get("completions")  # fewer at a time would wait for ever
                assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
                assert job["podReplacementPolicy"] == "Failed"
                mounted = [mount["name"] for mount in container["volumeMounts"]]
                assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
                assert all("sizeLimit" in v["emptyDir"] for v in pod["volumes"] if "emptyDir" in v)
                assert all(("ConfigMap", v["configMap"]["name"]) in named for v in pod["volumes"] if "configMap" in v)
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert pod["securityContext"]["runAsNonRoot"] is True
                assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
                waits = {variable["name"]: variable.get("value") for variable in container.get("env", ())}
                if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in waits:
                    assert int(waits["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
                if document["kind"] == "Job" and name != "job-build":
                    service = of_kind(found, "Service")[0]
                    assert pod["subdomain"] == service["metadata"]["name"]
                    assert service["spec"]["selector"].items() <= labels.items()
                    assert f"--master-addr={document['metadata']['name']}-0.{pod['subdomain']}" in container["args"]
                if "full" in name and document["kind"] != "TrainingRuntime":
                    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_a_refusal_is_final_and_a_lost_machine_is_not(documents) -> None:
    rules = {
        name: jobs_in(of_kind(found, "Job", "JobSet", "TrainingRuntime")[0])[0]["podFailurePolicy"]["rules"]
        for name, found in documents.items()
    }
    for name, (disrupted, refused) in rules.items():
        assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert disrupted["action"] == ("Ignore" if name.startswith("job-") else "FailJob")
        assert refused == {
            "action": "FailJob",
            "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]},
        }
    policy = of_kind(documents["jobset-full"], "JobSet")[0]["spec"]["failurePolicy"]
    final, free = policy["rules"]
    said = "Container node for pod vision/c10-node-0-1-x2vkq failed with exit code 2 matching FailJob rule at index 1"
    assert final["action"] == "FailJobSet"
    assert re.match(final["onJobFailureMessagePatterns"][0], said)
    assert not re.match(final["onJobFailureMessagePatterns"][0], said.replace("code 2", "code 255"))
    assert free["action"] == "RestartJobSetAndIgnoreMaxRestarts"


def test_the_trainer_is_told_sizes_and_not_addresses(documents) -> None:
    """It sets PET_ variables, which torchrun's flags would override."""
    trainer = of_kind(documents["trainjob-full"], "TrainJob")[0]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["args"][0] == "--"
    runtime = of_kind(documents["trainjob-full"], "TrainingRuntime")[0]["spec"]["template"]["spec"]
    labels = runtime["replicatedJobs"][0]["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_the_config_file_travels_as_it_is(documents) -> None:
    found = of_kind(documents["job-full"], "ConfigMap")[0]
    assert found["data"]["settings.yaml"] == (ROOT / "configs/cifar10_lt.yaml").read_text()
    assert found["immutable"] is True


def test_what_the_training_says_of_places_stands(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("output: /work/mine\ndata: {cache: {folder: /work/copies, max_gb: 5}}\n")
    job = of_kind(rendered(["image=i", "volume=claim"], ["--config", str(file), "method.name=elr"]), "Job")[0]
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--") :] == ["--", "--config", "/config/settings.yaml", "method.name=elr"]
    assert "$$(HOME)" in " ".join(
        jobs_in(of_kind(rendered(BARE, ["output=$(HOME)/x"]), "Job")[0])[0]["template"]["spec"]["containers"][0]["args"]
    )


@pytest.mark.parametrize(
    ("job", "train", "sentence"),
    [
        ([], OUTSIDE, r"image is empty\. Build one with"),
        (["image=i", "name=Big_Name"], OUTSIDE, "small letters, digits and '-'"),
        (["image=i", "name=" + "a" * 53], OUTSIDE, "at most 52 characters"),
        (["image=i", "gpu=2"], OUTSIDE, "There is no setting 'gpu'. Did you mean 'gpus'"),
        (["image=i", "memory=64"], OUTSIDE, "memory"),
        (["image=i", "memory=8Gi"], OUTSIDE, "shared_memory is a part of memory"),
        (["image=i"], [*OUTSIDE, "train.epoch=3"], "There is no setting 'train.epoch'. Did you mean 'train.epochs'"),
        (["image=i"], ["shards.url=s3://b/c"], "checkpoint.url and tracking.uri would be on the disk of a pod"),
        (["image=i", "nodes=2"], OUTSIDE[1:], "shards.url would be on the disk of a pod.*not visible to the others"),
        (
            ["image=i"],
            [*OUTSIDE[:2], "tracking.uri=http://me:word@mlflow:5000"],
            r"\*\*\*@mlflow.*give secret=ITS-NAME",
        ),
        (["image=i"], ["--config", "configs/cifar10lt.yaml", *OUTSIDE], "Did you mean configs/cifar10_lt.yaml"),
        (["image=i", "task=build"], ["source=digits", "output=x"], "output would be on the disk of a pod"),
        (["image=i", "task=build"], ["sorce=digits"], "There is no setting 'sorce'. Did you mean 'source'"),
        (["image=i", "task=build", "kind=jobset"], ["output=s3://b/x"], "kind=jobset is for trainings"),
        (["image=i", "train.epochs=3"], [], "There is no setting 'train'"),
    ],
)
def test_mistakes_are_told_before_a_pod_exists(job, train, sentence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=sentence) as caught:
        rendered(job, train)
    assert ":word@" not in str(caught.value)


def test_credentials_in_the_config_file_are_refused_too(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("tracking:\n  uri: https://me:word@mlflow\n")
    with pytest.raises(UserError, match=r"^uri: https://\*\*\*@mlflow: everybody who may read jobs"):
        rendered(["image=i", "volume=claim"], ["--config", str(file)])


def test_the_image_and_the_manifest_agree() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.M)[0]) == ["python3", "-m", "launch.entry"]
    assert re.findall(r"^USER (.*)$", text, re.M) == [f"{kubernetes.USER}:{kubernetes.USER}"]
    tool = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([tool, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


class Pods:
    """The pods of a rendered Job, as processes: the same command, with this machine's addresses and folders."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.job, self.folder = job["spec"], folder

    def start(self) -> list[subprocess.Popen[str]]:
        container = self.job["template"]["spec"]["containers"][0]
        here = {
            "--master-port=29500": f"--master-port={free_port()}",
            "/config/": f"{self.folder}/config/",
            "/work": f"{self.folder}/work",
            "/cache": f"{self.folder}/cache",
        }
        words = [re.sub(r"--master-addr=.*", "--master-addr=127.0.0.1", word) for word in container["args"]]
        for old, new in here.items():
            words = [word.replace(old, new) for word in words]
        (self.folder / "work").mkdir(exist_ok=True)
        env = worker_env() | {v["name"]: v["value"] for v in container["env"] if "value" in v}
        by_index = [v["name"] for v in container["env"] if "job-completion-index" in str(v.get("valueFrom"))]
        started = []
        for index in range(self.job["completions"]):
            args = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)).replace("$$(", "$(") for word in words]
            started.append(
                subprocess.Popen(
                    [sys.executable, *container["command"][1:], *args],
                    cwd=self.folder / "work",
                    env=env
                    | dict.fromkeys(["JOB_COMPLETION_INDEX", *by_index], str(index))
                    | {"PYTHONPATH": str(ROOT)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started


def ended(pods: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    told = [pod.communicate(timeout=240)[1] for pod in pods]
    return [(pod.returncode, said) for pod, said in zip(pods, told)]


@pytest.mark.dist
def test_two_pods_train_are_evicted_and_go_on(digits: str, tmp_path: Path) -> None:
    """One pod gets SIGTERM, as from a drained machine: both save and end with 75; new pods finish the training."""
    (tmp_path / "config").mkdir()
    quick = {
        "model": {"width": 4, "norm": "group"},
        "data": {"batch": 64, "threads": 1},
        "tracking": {"uri": ""},
    }  # no sums over ranks in every layer
    file = tmp_path / "config" / "settings.yaml"
    file.write_text(yaml.safe_dump(quick))
    train = ["--config", str(file), f"shards.url={digits}", "train.epochs=15", "method.name=cross_entropy"]
    job = of_kind(rendered(["image=i", "volume=claim", "gpus=0", "nodes=2", "name=pair"], train), "Job")[0]
    folder = tmp_path / "work" / "pair"
    pods = Pods(job, tmp_path).start()
    end = time.monotonic() + 120
    while not list(folder.glob("checkpoints/*/manifest.json")):
        assert time.monotonic() < end, [pod.poll() for pod in pods]
        time.sleep(0.2)
    pods[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in ended(pods)] == [75, 75]
    done = json.loads(max(folder.glob("checkpoints/step-*")).joinpath("state.json").read_text())
    assert 0 < len(done["history"]) < 15
    results = ended(Pods(job, tmp_path).start())
    assert [code for code, _ in results] == [0, 0], results
    assert json.loads((folder / "summary.json").read_text())["ranks"] == 2


@pytest.mark.dist
def test_a_refused_training_ends_every_pod_with_two(tmp_path: Path) -> None:
    """What the rule FailJob waits for."""
    job = of_kind(rendered(["image=i", "volume=claim", "gpus=0", "nodes=2"], ["shards.url=/nowhere"]), "Job")[0]
    assert [code for code, _ in ended(Pods(job, tmp_path).start())] == [2, 2]


@pytest.mark.dist
def test_three_pods_pack_what_one_would(tmp_path: Path) -> None:
    words = ["source=digits", "output=/work/shards", "shard_samples=50", "rho=10", "noise=0.5"]
    job = of_kind(rendered([*BARE, "task=build", "nodes=3", "cpu=1"], words), "Job")[0]
    assert [code for code, _ in ended(Pods(job, tmp_path).start())] == [0, 0, 0]
    alone = ensure(BuildConfig(source="digits", output=str(tmp_path / "alone"), shard_samples=50, rho=10, noise=0.5))
    tars = {file.name: file.read_bytes() for file in Path(alone).glob("*.tar")}
    assert len(tars) > 10
    assert {file.name: file.read_bytes() for file in (tmp_path / "work/shards").glob("*.tar")} == tars

"""The guide for new methods, followed word by word in a copy of the project."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ranks import worker_env

ROOT = Path(__file__).parents[2]


def test_the_guide_leads_to_a_method_that_trains(tmp_path, digits) -> None:
    for package in ("pipeline", "shards", "launch"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/methods").mkdir(parents=True)
    for name in ("conftest.py", "ranks.py", "rivals.py", "methods/test_rivals_together.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    guide = (ROOT / "docs" / "adding_a_method.md").read_text()
    blocks = re.findall(r"`((?:pipeline|tests)/\w+(?:/\w+)?\.py)`[^`]*?(?:`\w+`:)?\s*```python\n(.*?)```", guide, re.S)
    blocks += re.findall(r"`(pipeline/methods/options\.py)` above `MethodOptions`:\n\n```python\n(.*?)```", guide, re.S)
    texts = dict(blocks)
    assert set(texts) == {
        "pipeline/methods/label_smoothing.py",
        "pipeline/methods/options.py",
        "tests/methods/test_label_smoothing.py",
    }
    options = tmp_path / "pipeline/methods/options.py"
    source = options.read_text()
    block = texts.pop("pipeline/methods/options.py")
    source = re.sub(r"(?m)^MethodOptions = ", lambda _: f"{block}\n\nMethodOptions = ", source)
    options.write_text(
        re.sub(r"(MethodOptions = Annotated\[\s*CrossEntropyOptions)", r"\1 | LabelSmoothingOptions", source)
    )
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    words = ["method.name=label_smoothing", "method.doubt=0.2", "train.epochs=1", "data.batch=128", "tracking.uri="]
    run = [
        sys.executable,
        "-m",
        "pipeline.train",
        *words,
        f"shards.url={digits}",
        "output=run",
        "tracking.log_model=false",
    ]
    environment = {**worker_env(), "PYTHONPATH": str(tmp_path)}
    subprocess.run(run, cwd=tmp_path, env=environment, check=True, timeout=200)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["method"] == "label_smoothing"
    for tool in (["pipeline.audit", "run"], ["pipeline.evaluate", "run"]):
        subprocess.run([sys.executable, "-m", *tool], cwd=tmp_path, env=environment, check=True, timeout=200)
    names = [sys.executable, "-c", "from launch.sweep import method_names; print(*method_names())"]
    assert "label_smoothing" in subprocess.check_output(names, cwd=tmp_path, env=environment, text=True).split()
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-k", "label_smoothing"]
    told = subprocess.run(test, cwd=tmp_path, env=environment, check=True, timeout=200, capture_output=True, text=True)
    assert "\n13 passed" in told.stdout, told.stdout  # the guide's own, and twelve that find every method by themselves

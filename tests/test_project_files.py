"""Files for people who join or run on a cluster: what they name exists, and the scripts do what they say."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train import __version__, cli
from accel_train.cli.arguments import build_parser
from accel_train.commands.check import check
from accel_train.commands.launch import Launch
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.store import manifest
from tests.distributed.launching import environment
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
YAMLS = sorted(
    path
    for pattern in ("*.yaml", "*.yml", "*.cff", ".*.yaml", ".github/**/*.yml", "examples/**/*.yaml")
    for path in ROOT.glob(pattern)
)
TOOLS = {"pytest": "pytest", "ruff": "ruff", "pyright": "pyright", "mkdocs": "mkdocs-material"}
"""Command -> the package that brings it."""


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_parses(path: Path) -> None:
    assert all(isinstance(document, dict) for document in documents(path))


def test_there_are_yaml_files_to_parse() -> None:
    names = {str(path.relative_to(ROOT)) for path in YAMLS}
    assert {".github/workflows/tests.yml", ".pre-commit-config.yaml", "mkdocs.yml", "CITATION.cff"} <= names


# ------------------------------------------------------------------------------------------------------- commands
def requirements(extra: str) -> set[str]:
    """Packages of an extra, with those of the extras that it includes."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        inner = re.fullmatch(r"accel-train\[(.*)\]", requirement)
        found |= requirements(inner[1]) if inner else {re.split(r"[<>=\[]", requirement)[0]}
    return found


def lines_of_workflows() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        (workflow,) = documents(path)
        for job, body in workflow["jobs"].items():
            for step in body["steps"]:
                assert ("run" in step) != ("uses" in step), step
                for line in step.get("run", "").splitlines():
                    yield f"{path.name}: {job}", line.replace("${{ matrix.part }}", "matrix.part")


def lines_of_agents() -> Iterator[tuple[str, str]]:
    fence = re.search(r"## Commands\n\n```\n(.*?)```", (ROOT / "AGENTS.md").read_text(), flags=re.DOTALL)
    assert fence is not None
    for line in fence[1].splitlines():
        yield "AGENTS.md", line


def lines_of_hooks() -> Iterator[tuple[str, str]]:
    (config,) = documents(ROOT / ".pre-commit-config.yaml")
    for repository in config["repos"]:
        for hook in repository["hooks"]:
            yield ".pre-commit-config.yaml", hook["entry"]


def commands() -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for place, line in (*lines_of_workflows(), *lines_of_agents(), *lines_of_hooks()):
        found += [(place, shlex.split(part)) for part in line.split("&&")]
    return found


@pytest.mark.parametrize(("place", "words"), [pytest.param(p, w, id=f"{p}: {shlex.join(w)}") for p, w in commands()])
def test_commands_exist(place: str, words: list[str]) -> None:
    program, *arguments = words[words[0] == "uv" :]
    if program == "pip":
        extras = [name for word in arguments for name in re.findall(r"\[(.*)\]", word)]
        assert all(name in EXTRAS for names in extras for name in names.split(","))
    elif program == "accel-train":
        build_parser().parse_args(arguments)
    elif program == "python":
        assert arguments[0] == "-m"
        assert find_spec(arguments[1]) is not None
    else:
        assert TOOLS[program] in requirements("test-all"), f"{place}: {program} is in no extra"
        files = [word for word in arguments if "/" in word and "matrix.part" not in word]
        assert all((ROOT / file).exists() for file in files)
    if program == "pytest" and "-m" in arguments:
        words_of_markers = set(re.findall(r"\w+", arguments[arguments.index("-m") + 1])) - {"not", "and"}
        known = {marker.partition(":")[0].partition("(")[0] for marker in markers()}
        assert words_of_markers <= known


def markers() -> list[str]:
    return PROJECT["tool"]["pytest"]["ini_options"]["markers"]


@pytest.mark.parametrize(
    "words",
    [
        ["ruff", "check", "--force-exclude", "tests/test_rng.py"],
        ["ruff", "format", "--check", "--force-exclude", "tests/test_rng.py"],
    ],
    ids=shlex.join,
)
def test_the_hooks_run(words: list[str]) -> None:
    """With the tools of the extra, as pre-commit calls them: with the names of changed files at the end."""
    entries = [" ".join(line) for _, line in commands()]
    assert " ".join(words[:-1]) in entries
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_versions_of_the_workflow_are_those_of_the_package() -> None:
    (workflow,) = documents(ROOT / ".github" / "workflows" / "tests.yml")
    versions: list[str] = workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    named = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if "Python :: 3." in c]
    assert (versions[0], versions[-1]) == (named[0], named[-1])
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"


def test_a_night_has_all_parts_of_the_slow_tests() -> None:
    (workflow,) = documents(ROOT / ".github" / "workflows" / "slow.yml")
    parts: list[int] = workflow["jobs"]["slow"]["strategy"]["matrix"]["part"]
    (command,) = [line for _, line in lines_of_workflows() if "--part" in line]
    assert command.endswith(f"/{len(parts)}")
    assert parts == list(range(len(parts)))


def test_the_citation_names_the_version_of_the_package() -> None:
    (citation,) = documents(ROOT / "CITATION.cff")
    assert citation["version"] == PROJECT["project"]["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_entry_point_of_the_command() -> None:
    assert PROJECT["project"]["scripts"] == {"accel-train": "accel_train.cli:main"}
    try:
        version("accel-train")
    except PackageNotFoundError:
        pytest.skip("the package is not installed: it is on PYTHONPATH")
    assert [e.value for e in entry_points(group="console_scripts", name="accel-train")] == ["accel_train.cli:main"]


# ----------------------------------------------------------------------------------------------------- containers
def test_the_dockerfile_copies_what_there_is_and_installs_extras_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text().replace(" \\\n", " ")
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", text, flags=re.MULTILINE))
    assert set(arguments) == {"BASE", "TORCH_INDEX", "EXTRAS"}
    assert all(f"${{{name}}}" in text for name in arguments)
    given = dict(re.findall(r"--build-arg (\w+)=(\S+)", text))
    assert set(given) <= set(arguments)
    for extras in (arguments["EXTRAS"], given["EXTRAS"]):
        assert all(extra in EXTRAS for extra in extras.split(","))
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {word for line in re.findall(r"^COPY (.*)$", text, flags=re.MULTILINE) for word in line.split()[:-1]}
    assert sources == kept
    assert all((ROOT / source).exists() for source in sources)
    # What the build backend reads must be among them.
    forced = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {*forced, PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= sources


# ------------------------------------------------------------------------------------------------------- clusters
def launches() -> dict[str, list[str]]:
    """The command of each cluster file that is no script."""
    found: dict[str, list[str]] = {}
    for name in ("kubernetes_job", "kubernetes_multi_node"):
        *_, job = documents(CLUSTER / f"{name}.yaml")
        words: list[str] = job["spec"]["template"]["spec"]["containers"][0]["command"]
        found[name] = [word.replace("$(MACHINE_RANK)", "1") for word in words]
    (task,) = documents(CLUSTER / "skypilot.yaml")
    line = task["run"].replace("\\\n", " ").replace("$SKYPILOT_NUM_GPUS_PER_NODE", "8")
    found["skypilot"] = shlex.split(line)[1:]  # behind exec
    for script in ("slurm", "slurm_multi_node"):
        text = (CLUSTER / f"{script}.sbatch").read_text()
        line = re.search(r"(accel-train launch .*?--checkpoints.grace_seconds \d+)", text, flags=re.DOTALL)
        usage = re.search(r"#   sbatch \S+ (.*)", text)
        assert line is not None
        assert usage is not None
        for variable, value in {
            "launch_file": "accelerate_configs/ddp.yaml",
            "LAUNCH_FILE": "accelerate_configs/multi_node.yaml",
            "SLURM_GPUS_ON_NODE": "8",
            "PROCESSES": "16",
            "SLURM_NODEID": "1",
            "FIRST": "first",
            "PORT": "20042",
            "RUN": "runs/x",
        }.items():
            line = line if isinstance(line, str) else line[1]
            line = line.replace(f'"${variable}"', value)
        found[script] = shlex.split(line.replace("\\\n", " ").replace('"$@"', usage[1]))
    return found


@pytest.mark.parametrize("name", launches())
def test_the_command_of_a_cluster_file_is_accepted(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``accel-train check`` reads it: launcher's flags, launch file, preset and the recipe's flags."""
    program, command, *words = launches()[name]
    assert (program, command) == ("accel-train", "launch")
    monkeypatch.chdir(ROOT)
    assert cli._main(["check", *words]) == 0
    shown = capsys.readouterr().out
    processes = 16 if "multi_node" in name else 8
    assert f"{processes} process(es) on {2 if 'multi_node' in name else 1} machine(s)" in shown


def test_a_flag_that_does_not_exist_is_seen() -> None:
    """The check of the test above can fail."""
    with pytest.raises(ValueError, match="unknown option"):
        check(
            Launch(str(ROOT / "accelerate_configs" / "ddp.yaml"), str(ROOT / "recipes" / "mmdit.py"), ("--nope", "1"))
        )


@pytest.mark.parametrize("name", ["kubernetes_job", "kubernetes_multi_node"])
def test_a_pod_has_time_to_save(name: str) -> None:
    *_, job = documents(CLUSTER / f"{name}.yaml")
    pod = job["spec"]["template"]["spec"]
    grace = pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["command"][-1] == str(grace)
    values = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert int(values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules if rule.get("onExitCodes", {}).get("values") == [75]} == {"Ignore"}
    # A refused start of a second pod would end the whole job.
    assert job["spec"]["podReplacementPolicy"] == "Failed"


def test_the_pods_of_several_nodes_find_each_other() -> None:
    service, job = documents(CLUSTER / "kubernetes_multi_node.yaml")
    spec = job["spec"]
    assert service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    command = launches()["kubernetes_multi_node"]
    main = command[command.index("--main_process_ip") + 1]
    assert main == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    machine = read_machine_config(ROOT / "accelerate_configs" / "multi_node.yaml")
    assert spec["completions"] == spec["parallelism"] == machine.num_machines


SRUN = """\
codes=0
pids=()
for ((task = 0; task < SLURM_NNODES; task++)); do
  SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || codes=$?; done
exit $codes
"""
"""What srun does with one task on each node, here on this machine."""
ON_CPU = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\n"
SEVERAL = "machine_rank: 0\nmain_process_ip: 127.0.0.1\nmain_process_port: 29500\n"


@pytest.mark.parametrize("script", ["slurm", "slurm_multi_node"])
def test_a_slurm_script_needs_gpus_and_keeps_the_tasks_of_an_array_apart(script: str, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/bash\necho "run: $RUN"\nkill -USR1 $PPID\n')
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho first\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_NNODES": "1"}
    variables |= {"SLURM_ARRAY_TASK_ID": "3", "RUN": str(tmp_path / "run")}
    command = ["bash", str(CLUSTER / f"{script}.sbatch"), "recipe.py"]
    refused = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "SLURM_GPUS_ON_NODE: is not set: request GPUs with --gpus-per-node" in refused.stderr
    variables["SLURM_GPUS_ON_NODE"] = "8"
    # The signal comes before anything has made the directory.
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout == f"run: {tmp_path / 'run-3'}\n"
    assert (tmp_path / "run-3" / "STOP").exists()
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "nodes", "gpus", "anywhere"),
    [("slurm", 1, 2, False), ("slurm_multi_node", 2, 1, False), ("slurm", 1, 2, True)],
    ids=["one node", "two nodes", "run --anywhere"],
)
def test_a_slurm_script_trains_and_saves(script: str, nodes: int, gpus: int, anywhere: bool, tmp_path: Path) -> None:
    """Really run, on the recipe of docs/recipes.md, with stand-ins for SLURM alone.

    Slow: ``test_table.py`` runs the trap and the requeue every day.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "srun": SRUN,
        "scontrol": 'case $1 in show) echo 127.0.0.1;; *) echo "$@" >> "$CALLS";; esac',
        "accel-train": f'exec {shlex.quote(sys.executable)} -m accel_train.cli "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    launch_file = tmp_path / "cpu.yaml"
    machines = f"num_machines: {nodes}\nnum_processes: {nodes * gpus}\n"
    launch_file.write_text(ON_CPU + machines + (SEVERAL if nodes > 1 else ""))
    run = tmp_path / "run"
    variables = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "first", "SLURM_NNODES": str(nodes)}
    variables |= {"SLURM_GPUS_ON_NODE": str(gpus), "RUN": str(run), "LAUNCH_FILE": str(launch_file)}
    variables |= {"CALLS": str(tmp_path / "calls"), "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    fences = re.findall(
        r"^```\w*\n(.*?)^```", (ROOT / "docs" / "recipes.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    recipe, preset = tmp_path / "train.py", tmp_path / "presets" / "default.yaml"
    recipe.write_text(next(text for text in fences if "(experiment.ExperimentConfig)" in text))
    preset.parent.mkdir()
    preset.write_text(next(text for text in fences if text.startswith("# presets/default.yaml")))
    text = (CLUSTER / f"{script}.sbatch").read_text()
    if anywhere:
        # As docs/anywhere.md says: in the place of `accel-train launch`, which has a flag more.
        (tmp_path / "devices").write_text(f"{gpus}\n")
        changed = f"accel-train run --anywhere --devices {tmp_path / 'devices'}"
        text, count = re.subn(r"accel-train launch (.*?) --num_processes \S+", rf"{changed} \1", text)
        assert count == 1
    (tmp_path / "job.sbatch").write_text(text)
    command = ["bash", str(tmp_path / "job.sbatch"), str(recipe), "--max_steps", "2"]
    job = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=PATIENCE_SECONDS)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)  # the script and all that it has started
    assert job.returncode == 0, output
    assert f"ddp: {nodes * gpus} process(es)" in output
    assert [step for step, _ in manifest.committed(run / "checkpoints")] == [2]
    assert not (tmp_path / "calls").exists()


# ----------------------------------------------------------------------------------------------------------- site
@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    landing = (tmp_path / "site" / "index.html").read_text()
    assert "start/" in landing
    assert "contributing/" in landing
    pages = {path.parent.name for path in (tmp_path / "site").glob("*/index.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} <= pages


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    (site,) = documents(ROOT / "mkdocs.yml")
    links = (ROOT / "docs" / "site_links.py").read_text()
    of_root = set(re.findall(r'"\S+\.md": "(\S+\.md)"', links))

    def pages(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                yield from pages(value) if isinstance(value, list) else [value]

    listed = list(pages(site["nav"]))
    assert len(listed) == len(set(listed))
    assert listed[0] == "index.md"
    assert set(listed) == {path.name for path in (ROOT / "docs").glob("*.md")} | of_root

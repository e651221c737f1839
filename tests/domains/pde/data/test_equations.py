"""Generated fields against closed forms, and files against what was written into them."""

import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.data import artifacts
from accel_train.data.grouping.task_sampler import TaskSampler
from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard
from accel_train.domains.pde.data import equations as pde
from accel_train.domains.pde.data import prepare
from accel_train.domains.pde.data.assets import load_field_assets
from accel_train.domains.pde.data.equations import PdeDataConfig
from accel_train.domains.pde.data.pdebench import parameter_of, spacing_of
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.data.rows import FieldData
from accel_train.domains.pde.data.solvers import solve_burgers, solve_darcy
from accel_train.options.loading import from_tree
from tests import zygote

Float = NDArray[np.float64]


def demo(cache: Path, **options: Any) -> FieldData:
    small: dict[str, Any] = {"train_samples": 40, "heldout_samples": 8, "cache_dir": str(cache)}
    spaces = {pde.KINDS[task].space for task in options.get("tasks", ("advection", "darcy"))}
    small |= {"resolution_1d": 32, "snapshots": 6} if 1 in spaces else {}
    small |= {"resolution_2d": 8} if 2 in spaces else {}
    return prepare_pde(PdeDataConfig(**{**small, **options}))


def generated(cache: Path, task: str, split: str = "train") -> tuple[Float, Float]:
    [file] = (cache / "pde").glob(f"{task}-*/{task}_{split}.h5")
    with h5py.File(file) as content:
        return content["fields"][...].astype(float), content["parameters"][...].astype(float)


# ------------------------------------------------------------------------------------------------------- equations
def test_advection_is_the_initial_field_moved_by_its_speed(tmp_path: Path) -> None:
    data = demo(tmp_path, tasks=("advection",), dt=0.07)
    fields, speed = generated(tmp_path, "advection")
    assert fields.shape == (40, 6, 1, 1, 32)
    assert 0.2 <= speed.min() < 0.4 < 1.0 < speed.max() <= 1.2
    assert data.tasks[0].dt == pytest.approx(0.14)
    spectrum, x = np.fft.rfft(fields[:, 0, 0, 0]) / 32, np.arange(32) / 32
    assert np.abs(spectrum[:, pde.MODES + 1 :]).max() < 1e-6
    for time in range(6):
        place = x - speed * time * 0.07  # (40, 32)
        waves = [
            np.real(spectrum[:, [k]] * np.exp(2j * np.pi * k * place)) * (2 if k else 1) for k in range(pde.MODES + 1)
        ]
        np.testing.assert_allclose(fields[:, time, 0, 0], sum(waves), atol=2e-5)


def test_advection_at_one_speed_is_a_rotation(tmp_path: Path) -> None:
    demo(tmp_path, tasks=("advection",), speed=(0.5, 0.5), dt=4 / 32)
    fields, speed = generated(tmp_path, "advection")
    assert (speed == 0.5).all()
    for time in range(6):
        np.testing.assert_allclose(fields[:, time], np.roll(fields[:, 0], 2 * time, axis=-1), atol=2e-5)


def cole_hopf(initial: Float, viscosity: float, mean: float, times: Float) -> Float:
    """u = c - 2 nu (log phi)_x of the heat equation, for an initial field of mean c, moving with it."""
    points = len(initial)
    number = np.fft.rfftfreq(points, 1 / points)
    integral = np.zeros(points // 2 + 1, complex)
    integral[1:] = np.fft.rfft(initial)[1:] / (2j * np.pi * number[1:])
    heat = np.fft.rfft(np.exp(-np.fft.irfft(integral, points) / (2 * viscosity)))
    fields = []
    for time in times:
        now = heat * np.exp(-viscosity * (2 * np.pi * number) ** 2 * time)
        u = -2 * viscosity * np.fft.irfft(2j * np.pi * number * now, points) / np.fft.irfft(now, points)
        moved = np.fft.rfft(u) * np.exp(-2j * np.pi * number * mean * time)
        fields.append(mean + np.fft.irfft(moved, points))
    return np.array(fields)


def test_burgers_is_cole_hopf() -> None:
    x = np.arange(256) / 256
    initial = np.stack([0.3 + np.sin(2 * np.pi * x) + 0.5 * np.cos(4 * np.pi * x), np.cos(2 * np.pi * x)])
    viscosity = np.array([0.05, 0.03])
    fields = solve_burgers(np.fft.rfft(initial), viscosity, dt=0.1, snapshots=6)
    for i, mean in enumerate((0.3, 0.0)):
        exact = cole_hopf(initial[i], float(viscosity[i]), mean, np.arange(6) * 0.1)
        np.testing.assert_allclose(fields[i], exact, atol=1e-8)
    assert np.abs(fields[:, 5] - fields[:, 0]).max() > 0.5


def test_burgers_is_of_fourth_order_in_time() -> None:
    x = np.arange(128) / 128
    spectrum = np.fft.rfft(np.sin(2 * np.pi * x) + 0.5 * np.cos(6 * np.pi * x))[None]
    best = solve_burgers(spectrum, np.array([0.05]), 0.2, 2, courant=0.05)
    errors = [
        np.abs(solve_burgers(spectrum, np.array([0.05]), 0.2, 2, courant=c) - best).max() for c in (2.0, 1.0, 0.5)
    ]
    orders = [np.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert all(3.7 < order < 4.6 for order in orders), orders


def test_burgers_leaves_the_upper_third_empty() -> None:
    """So that products of two modes do not come back as a third, also where a shock is too thin for the grid."""
    spectrum = np.fft.rfft(np.sin(2 * np.pi * np.arange(64) / 64))[None]
    modes = np.abs(np.fft.rfft(solve_burgers(spectrum, np.array([0.002]), 0.1, 4)[0, -1]))
    assert modes[64 // 3] > 1e-3
    assert modes[64 // 3 + 1 :].max() < 1e-12


def test_generated_burgers_resolves_its_shocks(tmp_path: Path) -> None:
    """At the lowest viscosity, on the default grid; a grid twice as fine, and half the step, change nothing."""
    demo(tmp_path, tasks=("burgers",), viscosity=(0.02, 0.02), resolution_1d=128, train_samples=8, dt=0.15, snapshots=4)
    fields, viscosity = generated(tmp_path, "burgers")
    assert viscosity.ravel() == pytest.approx(0.02)
    spectrum = np.zeros((8, 257), complex)
    spectrum[:, : pde.MODES + 1] = np.fft.rfft(fields[:, 0, 0, 0])[:, : pde.MODES + 1] * 4
    finer = solve_burgers(spectrum, viscosity[:, 0], 0.15, 4, courant=0.25)[:, :, ::4]
    assert np.abs(fields[:, :, 0, 0] - finer).max() < 1e-4
    assert np.abs(np.diff(fields[:, :, 0, 0])).max() > 0.3  # there are shocks
    np.testing.assert_allclose(
        fields.mean((2, 3, 4)), np.broadcast_to(fields[:, :1].mean((2, 3, 4)), (8, 4)), atol=1e-6
    )


def test_a_coarser_grid_has_the_same_solutions_of_burgers(tmp_path: Path) -> None:
    """Whatever the viscosities: the grid of the solver resolves the thinnest shock."""
    found: list[Any] = []
    for points in (32, 128):
        demo(tmp_path / str(points), tasks=("burgers",), resolution_1d=points, train_samples=8, dt=0.15, snapshots=4)
        found.append(generated(tmp_path / str(points), "burgers")[0])
    np.testing.assert_allclose(found[0], found[1][:, :, :, :, ::4], atol=1e-5)


def error_of_darcy(height: int, width: int, coefficient: Any, solution: Any, source: Any) -> float:
    y, x = (np.arange(height)[:, None] + 0.5) / height, (np.arange(width) + 0.5) / width
    x, y = np.broadcast_arrays(x, y)
    found = solve_darcy(coefficient(x, y), source(x, y))
    return float(np.abs(found - solution(x, y)).max())


def test_darcy_with_a_smooth_coefficient_is_of_second_order() -> None:
    pi = np.pi

    def source(x: Float, y: Float) -> Float:
        # a = 1 + x + y^2, u = sin(pi x) sin(2 pi y)
        u, along_x = np.sin(pi * x) * np.sin(2 * pi * y), pi * np.cos(pi * x) * np.sin(2 * pi * y)
        along_y = 2 * pi * np.sin(pi * x) * np.cos(2 * pi * y)
        return 5 * pi**2 * (1 + x + y**2) * u - along_x - 2 * y * along_y

    errors = [
        error_of_darcy(
            n, n + n // 2, lambda x, y: 1 + x + y**2, lambda x, y: np.sin(pi * x) * np.sin(2 * pi * y), source
        )
        for n in (16, 32, 64)
    ]
    assert all(1.8 < np.log2(a / b) < 2.3 for a, b in itertools.pairwise(errors)), errors


@pytest.mark.parametrize("turned", [False, True])
def test_darcy_with_a_jump_is_of_second_order(turned: bool) -> None:
    """u = sin(2 pi x) sin(pi y) / a, whose flux is continuous where a jumps from 3 to 12 at x = 1/2."""

    def coefficient(x: Float, y: Float) -> Float:
        return np.where((y if turned else x) < 0.5, 3.0, 12.0)

    def wave(x: Float, y: Float) -> Float:
        return np.sin(2 * np.pi * (y if turned else x)) * np.sin(np.pi * (x if turned else y))

    errors = [
        error_of_darcy(
            n, n, coefficient, lambda x, y: wave(x, y) / coefficient(x, y), lambda x, y: 5 * np.pi**2 * wave(x, y)
        )
        for n in (16, 32, 64)
    ]
    assert all(1.8 < np.log2(a / b) < 2.3 for a, b in itertools.pairwise(errors)), errors


def test_generated_darcy_problems_are_those_of_the_equation(tmp_path: Path) -> None:
    demo(tmp_path, tasks=("darcy",), resolution_2d=16)
    fields, parameters = generated(tmp_path, "darcy")
    assert fields.shape == (40, 1, 2, 16, 16)
    assert parameters.shape == (40, 0)
    coefficient, solution = fields[:, 0, 0], fields[:, 0, 1]
    assert set(np.unique(coefficient)) == {3.0, 12.0}
    shares = (coefficient > 5).mean((1, 2))
    assert 0.2 < shares.mean() < 0.8
    assert shares.std() > 0.2
    np.testing.assert_allclose(solution[7], solve_darcy(coefficient[7], np.ones((16, 16))), rtol=1e-5)
    demo(tmp_path / "finer", tasks=("darcy",), resolution_2d=64)
    finer, _ = generated(tmp_path / "finer", "darcy")
    of_cells = finer[:, 0, 0].reshape(40, 16, 4, 16, 4).mean((2, 4))
    assert ((of_cells > 7.5) == (coefficient > 7.5)).mean() > 0.9  # the same problems on a finer grid


# ------------------------------------------------------------------------------------------------------ generation
@pytest.mark.distributed
def test_sample_i_does_not_depend_on_how_many_nor_on_the_workers(tmp_path: Path) -> None:
    demo(tmp_path / "one")
    demo(tmp_path / "more", train_samples=107)
    for task in ("advection", "darcy"):
        one, more = (generated(tmp_path / folder, task) for folder in ("one", "more"))
        assert np.array_equal(more[0][:40], one[0])
        assert np.array_equal(more[1][:40], one[1])
        assert len(np.unique(more[0].reshape(107, -1), axis=0)) == 107
    demo(tmp_path / "workers", tasks=("darcy",), train_samples=107, workers=2)
    assert np.array_equal(generated(tmp_path / "workers", "darcy")[0], generated(tmp_path / "more", "darcy")[0])


def test_more_workers_than_the_host_has_use_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.workers: 2147483648: .* at most \d+ are started; give \d+ or less"):
        demo(tmp_path, tasks=("darcy",), train_samples=107, workers=2**31)


def test_splits_seeds_and_tasks_have_draws_of_their_own(tmp_path: Path) -> None:
    demo(tmp_path / "a", tasks=("advection", "burgers"), dt=0.01), demo(tmp_path / "b", tasks=("advection",), seed=1)
    initial = [
        generated(tmp_path / folder, task, split)[0][:8, 0, 0, 0].tobytes()
        for folder, task, split in (
            ("a", "advection", "train"), ("a", "advection", "heldout"), ("b", "advection", "train"),
            ("a", "burgers", "train"),
        )
    ]  # fmt: skip
    assert len(set(initial)) == 4


READ = {
    "seed": {"advection", "burgers", "darcy"},
    "snapshots": {"advection", "burgers"},
    "dt": {"advection", "burgers"},
    "speed": {"advection"},
    "viscosity": {"burgers"},
    "train_samples": {"advection", "burgers", "darcy"},
    "heldout_samples": {"advection", "burgers", "darcy"},
    "resolution_1d": {"advection", "burgers"},
    "resolution_2d": {"darcy"},
    "time_stride": set[str](),
    "workers": set[str](),
}
OTHER: dict[str, Any] = {
    "seed": 1, "snapshots": 7, "dt": 0.01, "speed": (0.3, 0.4), "viscosity": (0.1, 0.3), "train_samples": 50,
    "heldout_samples": 9, "resolution_1d": 32, "resolution_2d": 16, "time_stride": 3, "workers": 1,
}  # fmt: skip


@pytest.mark.parametrize("option", READ)
def test_data_are_made_anew_for_what_they_depend_on_alone(option: str) -> None:
    tasks = tuple(pde.KINDS)
    config, changed = PdeDataConfig(tasks=tasks), PdeDataConfig(tasks=tasks, **{option: OTHER[option]})
    assert {task for task in tasks if pde.key_of(config, task) != pde.key_of(changed, task)} == READ[option]


def test_made_once_and_again_when_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = prepare.generate
    monkeypatch.setattr(prepare, "generate", lambda config, task, *rest: made.append(task) or real(config, task, *rest))
    first = demo(tmp_path)
    assert made == ["advection", "darcy"]
    assert demo(tmp_path, time_stride=3).fingerprint != first.fingerprint
    assert demo(tmp_path, speed=(0.1, 0.2)).fingerprint != first.fingerprint
    assert made == ["advection", "darcy", "advection"]  # only what depends on it
    [file] = (tmp_path / "pde").glob("darcy-*/darcy_train.h5")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert demo(tmp_path).fingerprint == first.fingerprint
    assert made[3:] == ["darcy"]
    assert not list(tmp_path.rglob("*.part"))


def prepared_by_rank(rank: int, cache: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{cache / 'store'}", rank=rank, world_size=2)
    made: list[str] = []
    real = prepare.generate
    prepare.generate = lambda config, task, *rest: made.append(task) or real(config, task, *rest)
    config = PdeDataConfig(train_samples=40, heldout_samples=8, resolution_2d=8, cache_dir=str(cache))
    data = prepare_pde(config, rank=rank, world_size=2, barrier=torch.distributed.barrier)
    (cache / f"{rank}.json").write_text(json.dumps([made, data.fingerprint]))
    torch.distributed.destroy_process_group()


@pytest.mark.distributed
def test_rank_0_generates_and_the_others_wait(tmp_path: Path) -> None:
    zygote.call(prepared_by_rank, 2, tmp_path)
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [zero[0], one[0]] == [["advection", "darcy"], []]
    assert zero[1] == one[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_hosts_with_caches_of_their_own_are_named_once(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for texts; who sees what is tested there, with real processes."""
    monkeypatch.setattr(artifacts, "hosts_without", lambda cache, *place: f"b does not see {cache}, {place}")
    config = PdeDataConfig(tasks=("advection",), train_samples=8, heldout_samples=2, cache_dir=str(tmp_path))
    prepare_pde(config, rank=rank, world_size=2)
    assert (f"b does not see {tmp_path}, (0, 2)\n" in capsys.readouterr().out) == (rank == 0)


# ------------------------------------------------------------------------------------------------------------ rows
def test_rows_are_pairs_of_the_trajectory_each_once(tmp_path: Path) -> None:
    data = demo(tmp_path)
    rows, task = data.training["advection"], data.tasks[0]
    fields, speed = generated(tmp_path, "advection")
    assert (len(rows), rows.samples, rows.pairs) == (40 * 4, 40, 4)
    found: set[tuple[int, int]] = set()
    for row in (rows[i] for i in range(len(rows))):
        assert [row[name].shape for name in ("input", "target", "parameters", "dt")] == [(1, 1, 32)] * 2 + [(1,), ()]
        physical = task.input.denormalise(row["input"]).numpy()
        [[sample, time]] = np.argwhere(np.abs(fields - physical).max((2, 3, 4)) < 1e-5)
        np.testing.assert_allclose(task.target.denormalise(row["target"]), fields[sample, time + 2], atol=1e-5)
        beta = row["parameters"] * task.parameter.std[0] + task.parameter.mean[0]
        assert float(beta) == pytest.approx(speed[sample, 0], rel=1e-5)
        assert float(row["dt"]) == pytest.approx(0.1)
        found.add((sample, time))
    assert found == set(itertools.product(range(40), range(4)))
    first = [
        np.abs(fields - task.input.denormalise(rows[i]["input"]).numpy()).max((2, 3, 4)).argmin() for i in range(40)
    ]
    assert {place // 6 for place in first} == set(range(40))  # all trajectories in the first 40 rows
    assert {place % 6 for place in first} == {0, 1, 2, 3}  # and all times


def test_rows_without_time_give_the_coefficient_and_ask_for_the_solution(tmp_path: Path) -> None:
    data = demo(tmp_path)
    fields, _ = generated(tmp_path, "darcy", "heldout")
    for i in range(8):
        row = data.heldout["darcy"][i]
        np.testing.assert_allclose(
            data.assets.task("darcy").input.denormalise(row["input"])[0], fields[i, 0, 0], rtol=1e-5
        )
        np.testing.assert_allclose(
            data.assets.task("darcy").target.denormalise(row["target"])[0], fields[i, 0, 1], rtol=1e-4, atol=1e-7
        )
        assert row["parameters"].tolist() == [0.0]  # filled up: advection has one
        assert float(row["dt"]) == 0.0
    with pytest.raises(ValueError, match="darcy has no time"):
        data.heldout["darcy"].trajectory(0)


def test_the_facts_of_the_tasks(tmp_path: Path) -> None:
    data = demo(tmp_path, tasks=("darcy", "burgers", "advection"), viscosity=(0.2, 0.2))
    facts = [(t.name, t.grid, t.boundary, t.conserved, t.has_time, t.parameters, round(t.dt, 9)) for t in data.tasks]
    assert facts == [
        ("darcy", (8, 8), "dirichlet", False, False, (), 0.0),
        ("burgers", (1, 32), "periodic", True, True, ("Nu",), 0.1),
        ("advection", (1, 32), "periodic", True, True, ("beta",), 0.1),
    ]
    assert data.train.sizes == (40, 160, 160)
    assert list(data.heldout) == ["darcy", "burgers", "advection"]
    assert data.notices[0] == "darcy: 40 training samples; 8 held out"
    assert data.notices[1] == "burgers: 40 training samples of 6 snapshots, 160 pairs 0.1 apart; 8 held out"


def test_a_trajectory_is_every_stride_th_snapshot(tmp_path: Path) -> None:
    heldout = demo(tmp_path).heldout["advection"]
    fields, _ = generated(tmp_path, "advection", "heldout")
    trajectory = heldout.trajectory(5)
    np.testing.assert_allclose(heldout.task.input.denormalise(trajectory.fields), fields[5, ::2], atol=1e-5)
    assert torch.equal(trajectory.fields[0], heldout[5 + 8 * ((0 - 5) % 4)]["input"])
    assert trajectory.parameters.shape == (1,)


def test_training_data_alone_is_normalised_to_mean_0_and_deviation_1(tmp_path: Path) -> None:
    data = demo(tmp_path)
    fields, speed = generated(tmp_path, "advection")
    task = data.tasks[0]
    assert task.input == task.target
    assert task.input.mean == pytest.approx([fields.mean()], rel=1e-5)
    assert task.input.std == pytest.approx([fields.std()], rel=1e-5)
    assert task.parameter.std == pytest.approx([speed.std()], rel=1e-5)
    targets = torch.stack([data.training["darcy"][i]["target"] for i in range(40)])
    assert float(targets.mean()) == pytest.approx(0, abs=1e-4)
    assert float(targets.std()) == pytest.approx(1, abs=1e-2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_loader_reads_every_task_in_workers(tmp_path: Path) -> None:
    data = demo(tmp_path)
    order = TaskSampler(data.train.sizes, 16, seed=0)
    shapes = {0: (1, 1, 32), 1: (1, 8, 8)}

    def read(workers: int) -> list[Any]:
        steps = iterate_steps(
            data.train, order, BatchShard(0, 1, 16), start_step=0, max_steps=4, device=torch.device("cpu"),
            config=LoaderConfig(num_workers=workers),
        )  # fmt: skip
        return [(step.step, step.micro_batches[0]) for step in steps]

    here = read(0)
    for step, batch in here:
        assert batch["input"].shape == (16, *shapes[order.task_of_step(step)])
        for i, sample in enumerate(batch["sample"].tolist()):
            assert all(torch.equal(batch[name][i], value) for name, value in data.train[sample].items())
    assert all(torch.equal(a[1]["input"], b[1]["input"]) for a, b in zip(here, read(1), strict=True))


# ------------------------------------------------------------------------------------------------------- PDEBench
GENERATOR = np.random.default_rng(0)


def write_pdebench(file: Path, datasets: dict[str, Any], attributes: dict[str, float], **how: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as content:
        for name, values in datasets.items():
            content.create_dataset(name, data=values, **how)
        content.attrs.update(attributes)


def advection_files(folder: Path, **how: Any) -> dict[float, NDArray[np.float32]]:
    """Two speeds of PDEBench's `1D_Advection_Sols_beta*.hdf5`: one more time than snapshots, as in the originals."""
    tensors: dict[float, NDArray[np.float32]] = {}
    for beta in (0.4, 1.0):
        tensors[beta] = GENERATOR.normal(size=(20, 7, 16)).astype(np.float32)
        axes = {"t-coordinate": np.arange(8) * np.float32(0.01), "x-coordinate": (np.arange(16) + 0.5) / 16}
        write_pdebench(folder / f"1D_Advection_Sols_beta{beta}.hdf5", {"tensor": tensors[beta], **axes}, {}, **how)
    return tensors


def files(folder: Path, *tasks: str, **options: Any) -> FieldData:
    return prepare_pde(PdeDataConfig(path=str(folder), tasks=tasks, cache_dir=str(folder / "cache"), **options))


@pytest.mark.parametrize("how", [{}, {"chunks": True, "compression": "gzip"}], ids=["contiguous", "compressed"])
def test_advection_of_pdebench_with_one_speed_a_file(tmp_path: Path, how: dict[str, Any]) -> None:
    tensors = advection_files(tmp_path / "1D" / "Advection" / "Train", **how)
    data = files(tmp_path, "advection", resolution_1d=8, time_stride=3)
    task = data.tasks[0]
    assert (task.grid, task.parameters, task.has_time) == ((1, 8), ("beta",), True)
    assert task.dt == pytest.approx(0.03)
    train, heldout = data.training["advection"], data.heldout["advection"]
    assert (train.samples, heldout.samples, len(train)) == (36, 4, 36 * 4)
    expected = np.concatenate([tensor[:18] for tensor in tensors.values()])[..., ::2]
    for sample in (0, 17, 18, 35):
        found = task.input.denormalise(train.trajectory(sample).fields)
        np.testing.assert_allclose(found[:, 0, 0], expected[sample, ::3], atol=1e-6)
        beta = float(train.parameters[sample] * task.parameter.std[0] + task.parameter.mean[0])
        assert beta == pytest.approx(0.4 if sample < 18 else 1.0)
    last = task.input.denormalise(heldout.trajectory(3).fields)
    np.testing.assert_allclose(last[:, 0, 0], tensors[1.0][19, ::3, ::2], atol=1e-6)


@pytest.mark.parametrize("own", ["h5", "zarr"])
def test_files_of_its_own_beside_those_of_pdebench_are_refused(tmp_path: Path, own: str) -> None:
    advection_files(tmp_path)
    for split in ("train", "heldout"):
        path = tmp_path / f"advection_{split}.{own}"
        path.mkdir() if own == "zarr" else path.touch()
    names = rf"advection_train.{own}, advection_heldout.{own}, and also .*beta0.4.hdf5, .*beta1.0.hdf5"
    with pytest.raises(UsageError, match=rf"--data.path.*'advection' has {names}\. One source of each split .*move or"):
        files(tmp_path, "advection")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("beta0.4.hdf5", 0.4),
        ("Beta1e+01.hdf5", 10),
        ("beta2.5e-3.hdf5", 0.0025),
        ("beta4_Train.hdf5", 4),
        ("beta0.4_2.hdf5", 0.4),
        ("beta0p4.hdf5", None),
        ("beta0,4.hdf5", None),
        ("beta0_4.hdf5", None),
        ("beta-0.4.hdf5", None),
    ],
)
def test_a_parameter_in_the_name_is_read_whole_or_refused(written: str, expected: float | None, tmp_path: Path) -> None:
    file = tmp_path / f"1D_Advection_Sols_{written}"
    write_pdebench(file, {}, {})
    with h5py.File(file) as content:
        if expected is not None:
            assert parameter_of(file, content, "beta") == expected
            return
        with pytest.raises(UsageError, match=r"no attribute 'beta' .* and no such number in its name.*_beta0.4.hdf5"):
            parameter_of(file, content, "beta")


def test_a_file_without_a_tenth_to_hold_out_needs_a_number(tmp_path: Path) -> None:
    axes = {"t-coordinate": np.arange(8) * np.float32(0.01), "x-coordinate": (np.arange(16) + 0.5) / 16}
    for beta in (1, 2):
        tensor = GENERATOR.normal(size=(5 * beta, 7, 16)).astype(np.float32)
        write_pdebench(tmp_path / f"1D_Advection_Sols_beta{beta}.hdf5", {"tensor": tensor, **axes}, {})
    with pytest.raises(UsageError, match=r"a tenth .*beta1.hdf5 has 5; .* --data.heldout_samples 2 is one of each"):
        files(tmp_path, "advection")
    assert files(tmp_path, "advection", heldout_samples=2).heldout["advection"].samples == 2


def test_sizes_of_pdebench_splits(tmp_path: Path) -> None:
    advection_files(tmp_path)
    data = files(tmp_path, "advection", train_samples=7, heldout_samples=6)
    assert (data.training["advection"].samples, data.heldout["advection"].samples) == (7, 6)
    with pytest.raises(UsageError, match=r"--data.train_samples: 18 of .*beta0.4.*but 17 of its 20 samples are left"):
        files(tmp_path, "advection", train_samples=36, heldout_samples=6)
    with pytest.raises(UsageError, match=r"--data.heldout_samples: 21 of .*but 20 of its 20 samples are left"):
        files(tmp_path, "advection", heldout_samples=42)


def test_burgers_of_pdebench_with_channels_last(tmp_path: Path) -> None:
    tensor = GENERATOR.normal(size=(20, 5, 8, 2)).astype(np.float32)
    axes = {"t-coordinate": np.arange(6) * 0.5, "x-coordinate": np.arange(8.0)}
    write_pdebench(tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5", {"tensor": tensor, **axes}, {"Nu": 0.02})
    data = files(tmp_path, "burgers", time_stride=1)
    assert data.tasks[0].input_channels == data.tasks[0].target_channels == 2
    found = data.assets.task("burgers").input.denormalise(data.training["burgers"].trajectory(3).fields)
    np.testing.assert_allclose(found[:, :, 0], tensor[3].transpose(0, 2, 1), atol=1e-6)
    assert data.tasks[0].parameter.mean == pytest.approx([0.02])  # the attribute, not the name


@pytest.mark.parametrize(("viscosities", "logarithmic"), [((0.001, 0.01, 4.0), True), ((0.1, 0.5, 1.0), False)])
def test_parameters_that_range_widely_are_read_by_their_logarithm(
    tmp_path: Path, viscosities: tuple[float, ...], logarithmic: bool
) -> None:
    axes = {"t-coordinate": np.arange(6) * 0.5, "x-coordinate": np.arange(8.0)}
    for nu in viscosities:
        tensor = GENERATOR.normal(size=(10, 5, 8)).astype(np.float32)
        write_pdebench(tmp_path / f"1D_Burgers_Sols_Nu{nu}.hdf5", {"tensor": tensor, **axes}, {})
    data = files(tmp_path, "burgers", time_stride=1)
    data.assets.save(tmp_path)
    values = torch.tensor(viscosities)[:, None]
    read = load_field_assets(tmp_path).normalise_parameters("burgers", values).ravel()
    if logarithmic:
        with pytest.raises(UsageError, match=r"Nu are read as logarithms and go down to 0; values above 0"):
            data.assets.normalise_parameters("burgers", torch.zeros(1, 1))
    expected = np.log(viscosities) if logarithmic else np.array(viscosities)
    np.testing.assert_allclose(read, (expected - expected.mean()) / expected.std(), rtol=1e-5)
    assert any("read as logarithms" in words for words in data.notices) == logarithmic
    assert sorted({float(data.training["burgers"][i]["parameters"]) for i in range(27)}) == pytest.approx(read.tolist())


@pytest.mark.parametrize(("factor", "said"), [(100.0, True), (10.0, False)])
def test_files_of_very_different_fields_are_said_to_share_a_scale(tmp_path: Path, factor: float, said: bool) -> None:
    axes = {"x-coordinate": np.arange(8.0), "y-coordinate": np.arange(8.0)}
    tensor = GENERATOR.normal(size=(20, 1, 8, 8)).astype(np.float32)
    nu = GENERATOR.uniform(1, 2, size=(20, 8, 8)).astype(np.float32)
    for beta in (1.0, factor):
        fields = {"tensor": beta * tensor, "nu": nu, **axes}
        write_pdebench(tmp_path / f"2D_DarcyFlow_beta{beta}_Train.hdf5", fields, {})
    words = [words for words in files(tmp_path, "darcy").notices if "errors of the small ones hardly count" in words]
    assert bool(words) == said
    assert not said or re.search(
        "beta100.0_Train.hdf5 are 100 times as large as those of .*beta1.0_Train.hdf5", words[0]
    )


@pytest.mark.parametrize("how", [{}, {"chunks": True, "compression": "gzip"}], ids=["contiguous", "compressed"])
def test_darcy_of_pdebench(tmp_path: Path, how: dict[str, Any]) -> None:
    tensor = GENERATOR.normal(size=(20, 1, 8, 8)).astype(np.float32)
    nu = GENERATOR.uniform(1, 2, size=(20, 8, 8)).astype(np.float32)
    axes = {"x-coordinate": np.arange(8.0), "y-coordinate": np.arange(8.0)}
    write_pdebench(tmp_path / "2D_DarcyFlow_beta1.0_Train.hdf5", {"tensor": tensor, "nu": nu, **axes}, {}, **how)
    assert files(tmp_path, "darcy").strides == {"darcy": 1}
    data = files(tmp_path, "darcy", resolution_2d=4)
    assert data.strides == {"darcy": 2}
    row = data.training["darcy"][11]
    np.testing.assert_allclose(
        data.assets.task("darcy").input.denormalise(row["input"])[0], nu[11, ::2, ::2], atol=1e-5
    )
    np.testing.assert_allclose(
        data.assets.task("darcy").target.denormalise(row["target"]), tensor[11, :, ::2, ::2], atol=1e-5
    )
    assert (data.tasks[0].parameters, row["parameters"].tolist()) == (("beta",), [0.0])


def test_files_of_our_schema_may_hold_any_task(tmp_path: Path) -> None:
    demo(tmp_path / "cache", tasks=("advection",))
    for split in pde.SPLITS:
        [made] = (tmp_path / "cache" / "pde").glob(f"advection-*/advection_{split}.h5")
        target = tmp_path / f"waves_{split}.h5"
        target.write_bytes(made.read_bytes())
        with h5py.File(target, "a") as content:
            content.attrs["task"] = "waves"
    data = files(tmp_path, "waves", train_samples=5)
    assert (data.training["waves"].samples, data.heldout["waves"].samples) == (5, 8)
    assert data.tasks[0].name == "waves"
    with pytest.raises(UsageError, match=r"train_samples: 41 of .*waves_train.h5.*40 of its 40"):
        files(tmp_path, "waves", train_samples=41)
    (tmp_path / "waves_train.h5").rename(tmp_path / "other_train.h5")
    with pytest.raises(UsageError, match=r"has no waves_train\.h5\. The training split"):
        files(tmp_path, "waves")
    (tmp_path / "waves_heldout.h5").rename(tmp_path / "other_heldout.h5")
    with pytest.raises(UsageError, match=r"other_train.h5 contains task 'waves'; 'other' is required"):
        files(tmp_path, "other")


BAD = {
    "no tensor": ({"density": (4, 5, 8)}, r"no dataset 'tensor'; it contains density \(4, 5, 8\)"),
    "no coordinates": ({"tensor": (4, 5, 8)}, "no dataset 'x-coordinate'"),
    "no times": ({"tensor": (4, 5, 8), "x-coordinate": (8,)}, "no dataset 't-coordinate'"),
    "few times": ({"tensor": (4, 5, 8), "x-coordinate": (8,), "t-coordinate": (4,)}, "4 times .* for 5 snapshots"),
    "other points": ({"tensor": (4, 5, 8), "x-coordinate": (9,), "t-coordinate": (5,)}, r"\(4, 5, 8\) for 9 x-coord"),
    "no space": ({"tensor": (4, 8), "x-coordinate": (8,), "t-coordinate": (5,)}, r"\(N, T, X\) or \(N, T, X, C\)"),
}


@pytest.mark.parametrize(("shapes", "words"), BAD.values(), ids=BAD)
def test_what_is_missing_is_named(tmp_path: Path, shapes: dict[str, tuple[int, ...]], words: str) -> None:
    datasets = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}
    write_pdebench(tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5", datasets, {})
    with pytest.raises(UsageError, match=words):
        files(tmp_path, "burgers")


def test_darcy_needs_its_coefficient(tmp_path: Path) -> None:
    file, x = tmp_path / "2D_DarcyFlow_beta1.0_Train.hdf5", {"x-coordinate": np.arange(8.0)}
    write_pdebench(file, {"tensor": np.zeros((4, 1, 8, 8), np.float32), **x}, {})
    with pytest.raises(UsageError, match=r"no dataset 'nu'; it contains tensor \(4, 1, 8, 8\)"):
        files(tmp_path, "darcy")
    write_pdebench(file, {"tensor": np.zeros((4, 2, 8, 8)), "nu": np.zeros((4, 8, 8)), **x}, {})
    with pytest.raises(UsageError, match=r"tensor \(4, 2, 8, 8\) and nu \(4, 8, 8\).*tensor \(N, 1, X, Y\) and nu"):
        files(tmp_path, "darcy")


@pytest.mark.parametrize(("last", "is_even"), [(0.102, False), (0.10005, True)])
def test_times_are_evenly_spaced_to_one_in_1000(tmp_path: Path, last: float, is_even: bool) -> None:
    times = np.cumsum([0.0, *[0.1] * 9, last])
    if is_even:
        assert spacing_of(tmp_path, times, 11) == pytest.approx(0.1, rel=1e-3)
        return
    with pytest.raises(UsageError, match="even spacing above 0, to within 1 in 1000, is required"):
        spacing_of(tmp_path, times, 11)


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_times_have_any_unit_and_rise(tmp_path: Path, unit: float) -> None:
    times = (np.arange(11) * 0.01 * unit).astype(np.float32)
    assert spacing_of(tmp_path, times, 11) == pytest.approx(0.01 * unit, rel=1e-12)
    for wrong in (times[::-1], 0 * times):
        with pytest.raises(UsageError, match="even spacing above 0"):
            spacing_of(tmp_path, wrong, 11)


@pytest.mark.parametrize(("name", "value"), [("Nu1e-3", 1e-3), ("nu0.02", 0.02), ("Nu4.0", 4.0)])
def test_a_parameter_is_read_from_the_name_of_a_file(tmp_path: Path, name: str, value: float) -> None:
    axes = {"t-coordinate": np.arange(7) * 0.01, "x-coordinate": (np.arange(16) + 0.5) / 16}
    tensor = GENERATOR.normal(size=(20, 7, 16)).astype(np.float32)
    write_pdebench(tmp_path / f"1D_Burgers_Sols_{name}.hdf5", {"tensor": tensor, **axes}, {})
    assert files(tmp_path, "burgers").tasks[0].parameter.mean == pytest.approx((value,))


def test_a_parameter_is_required(tmp_path: Path) -> None:
    advection_files(tmp_path)
    (tmp_path / "1D_Advection_Sols_beta0.4.hdf5").rename(tmp_path / "1D_Advection_Sols_slow.hdf5")
    with pytest.raises(UsageError, match=r"no attribute 'beta' \(it has none\) and no such number in its name"):
        files(tmp_path, "advection")


def test_resolution_and_stride_that_do_not_fit(tmp_path: Path) -> None:
    advection_files(tmp_path)
    for points in (5, 32):
        with pytest.raises(
            UsageError, match=rf"resolution_1d {points}: .* has 1 x 16 .*divides 16, because .* Choose 16, 8, 4"
        ):
            files(tmp_path, "advection", resolution_1d=points)
    with pytest.raises(UsageError, match=r"time_stride 7: .* has 7 snapshots of task advection"):
        files(tmp_path, "advection", time_stride=7)


def test_a_folder_without_the_task(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(UsageError, match=r"no data of task 'darcy'; it contains: cache, readme.txt.*darcy_train.h5"):
        files(tmp_path, "darcy")
    with pytest.raises(UsageError, match=r"nowhere is not a folder, or does not exist. One with advection_train.h5"):
        prepare_pde(PdeDataConfig(path=str(tmp_path / "nowhere"), cache_dir=str(tmp_path)))
    (tmp_path / "1D_Burgers_Sols_Nu1.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(UsageError, match=r"Nu1.hdf5 cannot be read"):
        files(tmp_path, "burgers")
    (tmp_path / "1D_Burgers_Sols_Nu1.hdf5").unlink()
    os.mkfifo(tmp_path / "1D_Burgers_Sols_Nu1.hdf5")
    with pytest.raises(UsageError, match=r"Nu1.hdf5 cannot be read \(a named pipe\)"):
        files(tmp_path, "burgers")


# ---------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": ()}, "at least one task"),
        ({"tasks": ("darcy", "darcy")}, "each once"),
        ({"tasks": ("waves",)}, "tasks waves: cannot be generated; choose from advection, burgers, darcy"),
        ({"snapshots": 2}, "snapshots 2: more than time_stride 2"),
        ({"resolution_1d": 12}, "resolution_1d 12: more than 12 points"),
        ({"speed": (2.0, 1.0)}, "speed 2.0 1.0: the lower value must come first"),
        ({"path": "/data", "speed": (0.0, 1.0)}, "speed: .* has no effect with data.path: /data"),
        ({"path": "/data", "workers": 3}, "workers: 3: has no effect"),
        ({"viscosity": (0.1, 0.2)}, "viscosity: .* has no effect with data.tasks: advection darcy"),
        ({"tasks": ("darcy",), "time_stride": 1}, "time_stride: 1: has no effect with data.tasks: darcy"),
        ({"tasks": ("burgers",), "resolution_2d": 16}, "resolution_2d: 16: has no effect"),
    ],
)
def test_options_are_obeyed_or_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PdeDataConfig(**options)


def test_the_group_reads_from_yaml_values() -> None:
    config = from_tree(PdeDataConfig, {"tasks": ["advection"], "speed": [1, 2], "workers": 2, "seed": 3}, "file")
    assert (config.tasks, config.speed, config.workers) == (("advection",), (1.0, 2.0), 2)
    with pytest.raises(UsageError, match=re.escape("viscosity")):
        from_tree(PdeDataConfig, {"viscosity": [0.0, 1.0]}, "file")


def test_h5py_is_asked_for_by_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UsageError, match=r"pip install 'accel-train\[pde\]'"):
        demo(tmp_path)

"""The loop: it learns, it records, it can be killed and resumed bit for bit, and it does not hide trouble."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric
from scipy import stats

from unnorm import MECO, MLP, Gaussian, Quadratic, Tilted, Training, train
from unnorm.checkpoint import read_tensors, write_tensors
from unnorm.errors import BrokenFile, Interrupted, InvalidValue, NonFiniteObjective
from unnorm.estimators import Estimator
from unnorm.optim import Constant, Power, Rates, rates
from unnorm.partition import importance
from unnorm.types import Objective

ROOT = Path(__file__).parents[1]


def normal(n=2000, d=2, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) * 0.7 + 0.5


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def pieces(d=2, **options):
    q = Gaussian.fit(normal(d=d))
    model = Tilted(q, MLP(d, hidden=(16, 16), generator=torch.Generator().manual_seed(1)))
    return model, MECO(q, **options)


def run(training, folder=None, resume=False, data=None, **options):
    model, estimator = pieces(**options)
    history = train(model, estimator, normal() if data is None else data, training, folder=folder, resume=resume)
    return model, estimator, history


def same(first, second):
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def without_time(records):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


class TestLearning:
    def test_recovers_a_gaussian(self):
        """Mean and covariance of 5-D data within 5 maximum-likelihood standard errors, from a wide noise."""
        generator = torch.Generator().manual_seed(0)
        mix = torch.randn(5, 5, generator=generator) * 0.3 + torch.eye(5)
        x = torch.randn(5000, 5, generator=generator) @ mix + 1
        model = Quadratic(5)
        estimator = MECO(Gaussian.fit(1.2 * (x - x.mean(0)) + x.mean(0)), n_noise=2000)
        history = train(model, estimator, x, Training(steps=1500, lr=0.02, schedule="cosine"))
        covariance = torch.linalg.inv(model.precision).detach()
        error = (x.var(0) / len(x)).sqrt()
        assert ((model.mean.detach() - x.mean(0)).abs() < 5 * error).all()
        spread = x.T.cov()
        scale = ((spread.diagonal()[:, None] * spread.diagonal() + spread**2) / len(x)).sqrt()
        assert ((covariance - spread).abs() < 5 * scale).all()
        # u averages (2 - gamma) / gamma = 19 batches' worth of noise draws.
        error = ((1 / history["ess"][-1] - 1) / (19 * 2000)) ** 0.5
        assert abs(estimator.log_u - model.log_z.detach()) < 5 * error

    @pytest.mark.parametrize("optimizer", ["adam", "sgd"])
    @pytest.mark.parametrize("schedule", ["constant", "power", "cosine", "pl"])
    def test_every_optimizer_and_schedule_learns(self, optimizer, schedule):
        x = 1.0 + torch.randn(2000, 1, generator=torch.Generator().manual_seed(0))
        model = Quadratic(1, learn_precision=False)
        training = Training(steps=400, lr=0.05, optimizer=optimizer, schedule=schedule)
        train(model, MECO(Gaussian(1)), x, training)
        # By Proposition 2 the excess loss is half the squared distance: nine tenths of it are gone.
        assert (model.mean.detach() - x.mean()) ** 2 < 0.1 * x.mean() ** 2

    @pytest.mark.parametrize("iterate", ["last", "random", "averaged", "ema"])
    def test_iterates(self, iterate):
        model, _, history = run(Training(steps=30, iterate=iterate))
        last, _, _ = run(Training(steps=30))
        assert same(model, last) == (iterate == "last")
        assert len(history.records) == 4

    def test_random_iterate_is_one_that_was_visited(self):
        """theta_tau, tau in 1..T, is the state before step tau; a hook writes down every state the estimator saw."""
        model, visited = Quadratic(1), []
        model.register_forward_pre_hook(lambda module, _: visited.append(module.linear.item()))
        train(model, MECO(Gaussian(1)), normal(d=1), Training(steps=6, iterate="random", lr=0.1))
        assert len(set(visited)) == 6
        assert model.linear.item() in visited

    def test_best_iterate_does_not_overfit(self):
        """Twenty rows, a network, many steps: the validated iterate is better on fresh rows than the last one."""
        fresh, values = normal(4000, seed=9), {}
        for iterate in ("last", "best", "best-ema"):
            q = Gaussian.fit(normal(20))
            model = Tilted(q, MLP(2, hidden=(64, 64), generator=torch.Generator().manual_seed(1)))
            training = Training(steps=600, lr=3e-3, iterate=iterate, validate_every=20)
            history = train(model, MECO(q), normal(20), training, validation=normal(500, seed=4))
            log_z = importance(model, q, 20_000, generator=torch.Generator().manual_seed(0)).value
            values[iterate] = log_z - model(fresh).mean().item()
            assert len(history["validation"]) == 30
        assert values["best"] < values["last"] - 0.1
        assert values["best-ema"] < values["last"] - 0.1

    def test_validation_does_not_depend_on_what_was_tracked(self):
        model, estimator = pieces()
        values = []
        for log_u in (0.0, 5.0):
            estimator.log_u.fill_(log_u)
            estimator.started.fill_(True)
            found = estimator.eval()(model, normal(50), generator=torch.Generator().manual_seed(0))
            values.append(found.info["value"].item())
        assert values[0] == values[1]

    def test_best_needs_validation_rows(self):
        with pytest.raises(InvalidValue, match="chosen on validation data"):
            run(Training(steps=3, iterate="best"))

    def test_validation_leaves_the_run_unchanged(self):
        plain, _, _ = run(Training(steps=30))
        model, estimator = pieces()
        train(model, estimator, normal(), Training(steps=30, validate_every=3), validation=normal(50, seed=2))
        assert same(plain, model)

    def test_sequences_of_the_library_are_followed(self):
        model, estimator = pieces()
        history = train(
            model,
            estimator,
            normal(),
            Training(steps=20, log_every=1),
            rates=Rates(Power(0.01, 0.5), beta=Constant(0.5), gamma=Power(1.0, 1.0)),
        )
        assert history["lr"] == [0.01 / t**0.5 for t in range(1, 21)]
        assert estimator.tracker.gamma == 0.1  # the sequence is gone with the run

    def test_gamma_sequence_is_used(self):
        """gamma_t = 1/t makes u the plain mean of all batches' weights."""
        q, model, seen, tracked, batches = Gaussian(1), Quadratic(1), [], [], []

        class Spy(MECO):
            def set_gamma(self, gamma):
                super().set_gamma(gamma)
                seen.append(gamma)

            def forward(self, model, x, *, generator=None):
                objective = super().forward(model, x, generator=generator)
                tracked.append(objective.info["log_u"].exp().item())
                return objective

        train(model, Spy(q), normal(d=1), Training(steps=10), rates=Rates(Constant(1e-3), gamma=Power(1.0, 1.0)))
        assert seen == [*(1 / t for t in range(1, 11)), None]
        train(Quadratic(1), Batches(q, batches), normal(d=1), Training(steps=10, lr=1e-3))
        means = [sum(batches[:t]) / t for t in range(1, 11)]
        assert tracked == pytest.approx(means, rel=1e-4)

    def test_pl_needs_the_ema_tracker(self):
        with pytest.raises(InvalidValue, match="belongs to the tracker 'ema'"):
            run(Training(steps=3, schedule="pl"), tracker="umax")

    def test_any_module_and_event_shape(self):
        class Plain(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = torch.nn.Conv2d(1, 2, 3)

            def forward(self, x):
                return self.conv(x).square().mean((1, 2, 3)).neg()

        x = torch.randn(100, 1, 5, 5, generator=torch.Generator().manual_seed(0))
        history = train(Plain(), MECO(Gaussian.fit(x)), x, Training(steps=5))
        assert history["step"] == [1, 5]

    def test_float64(self):
        model, estimator = pieces()
        train(
            model,
            estimator,
            normal(),
            Training(steps=5),
            fabric=Fabric(accelerator="cpu", devices=1, precision="64-true"),
        )
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert estimator.log_u.dtype == torch.float64

    def test_float64_is_computed_in_float64(self):
        """The same run with plain double modules: equal to the last bit, so nothing was rounded on the way."""
        results = []
        for precision in ("64-true", "32-true"):
            model, estimator = (part.double() for part in pieces())
            fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
            train(model, estimator, normal().double(), Training(steps=5), fabric=fabric)
            results.append(model)
        assert same(*results)
        assert torch.get_default_dtype() == torch.float32

    def test_bf16(self):
        model, estimator = pieces()
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        history = train(model, estimator, normal(), Training(steps=20), fabric=fabric)
        _, _, full = run(Training(steps=20))
        assert abs(history["value"][-1] - full["value"][-1]) < 0.05  # bf16 keeps three digits

    def test_numpy_data(self):
        one, _, _ = run(Training(steps=5), data=normal())
        two, _, _ = run(Training(steps=5), data=normal().numpy())
        assert same(one, two)

    def test_modes_after_training(self):
        model, estimator, _ = run(Training(steps=3))
        assert not model.training
        assert not estimator.training


class TestPatience:
    """A noise-free script of validation values; the first one is that of the model before training."""

    @staticmethod
    def run(values, folder=None, resume=False, **options):
        estimator, model = Scripted(values), Quadratic(1)
        training = Training(lr=0.1, batch=4, log_every=1000, **{"steps": 3 * (len(values) - 1), **options})
        rows = normal(8, d=1)
        history = train(
            model,
            estimator,
            rows,
            replace(training, validate_every=3, checkpoint_every=5),
            validation=rows,
            folder=folder,
            resume=resume,
        )
        return model, history

    @pytest.mark.parametrize("patience", [1, 2, 3, 5, None])
    @pytest.mark.parametrize("seed", range(4))
    def test_ends_after_so_many_looks_without_a_new_best(self, patience, seed):
        values = [99.0, *(1 / k + 0.3 * v for k, v in enumerate(torch.randn(30, generator=seeded(seed)).tolist(), 1))]
        looks, best, waited = [], math.inf, 0
        for value in values[1:]:
            looks.append(value)
            best, waited = (value, 0) if value < best else (best, waited + 1)
            if waited == patience:
                break
        _, history = self.run(values, patience=patience)
        assert history["validation"] == pytest.approx(looks)
        assert history["step"][-1] == 3 * len(looks)

    def test_the_best_look_is_kept(self):
        """The third look, at step 9, is the best: the parameters are those of a run of nine steps."""
        values = [9.0, 5.0, 4.0, 1.0, 3.0, 2.0, 6.0, 0.0]
        model, history = self.run(values, patience=2, iterate="best")
        assert history["step"][-1] == 15
        nine, _ = self.run(values[:4])
        assert same(model, nine)
        fifteen, _ = self.run(values[:6])
        assert not same(model, fifteen)

    def test_the_first_look_is_kept_where_nothing_is_better(self):
        model, history = self.run([1.0, 5.0, 4.0, 3.0], iterate="best")
        assert same(model, Quadratic(1))
        assert history["validation"] == [5.0, 4.0, 3.0]  # of steps; the first look is no step
        moved, _ = self.run([1.0, 5.0, 4.0, 3.0])
        assert not same(moved, Quadratic(1))

    @pytest.mark.filterwarnings("ignore::unnorm.errors.HealthWarning")  # such steps leave u behind
    @pytest.mark.parametrize("seed", range(3))
    def test_the_truth_is_kept(self, seed):
        """The model starts as N(0, I), and so are the data: steps of 1 only spoil it, and all are forgotten.

        The value before training is exact, because q = p (Lemma 1). On n rows of the truth the best of all five
        parameters gains chi2(5) / 2n nats a row. Every look loses more than that gain is in 999 data sets of 1,000.
        """
        x, model = torch.randn(20_000, 2, generator=seeded(seed)), Quadratic(2)
        first = x.square().sum(1).mean().item() / 2 + math.log(2 * math.pi)
        training = Training(steps=20, lr=1.0, iterate="best", validate_every=1, seed=seed)
        history = train(model, MECO(Gaussian(2)), x, training, validation=x)
        assert same(model, Quadratic(2))
        assert min(history["validation"]) > first + stats.chi2(5).isf(0.001) / (2 * len(x))

    def test_resume_after_an_early_end(self, tmp_path):
        """There is nothing left to do, with the same steps or with more; the history and the best are the same."""
        values = [9.0, 5.0, 1.0, 3.0, 2.0, 6.0, 0.0, -1.0, -2.0]
        options = {"patience": 3, "iterate": "best"}
        model, history = self.run(values, tmp_path, **options)
        assert history["step"][-1] == 15
        for steps in (24, 300):
            again, found = self.run(values, tmp_path, resume=True, steps=steps, **options)
            assert same(again, model)
            assert found.records == history.records
        assert read_tensors(tmp_path / "checkpoint.safetensors")[1]["step"] == 15

    def test_resume_remembers_the_wait(self, tmp_path):
        """Stopped in the middle of the wait, the rest is as long as it would have been; the first look is not lost."""
        values = [0.5, 5.0, 1.0, 3.0, 2.0, 6.0, 0.0]
        whole, history = self.run(values, patience=3, iterate="best")
        self.run(values[:4], tmp_path, patience=3, iterate="best")
        rest = [*values[4:], 0.0]  # no first look after a resume
        part, found = self.run(rest, tmp_path, resume=True, steps=18, patience=3, iterate="best")
        assert found["step"][-1] == history["step"][-1] == 15
        assert found["validation"] == history["validation"]
        assert same(part, whole)
        assert same(part, Quadratic(1))

    def test_another_patience_is_refused(self, tmp_path):
        self.run([1.0, 2.0], tmp_path, patience=3)
        with pytest.raises(InvalidValue, match="started with patience = 3; it cannot resume with 4"):
            self.run([1.0, 2.0], tmp_path, resume=True, patience=4)

    def test_without_validation_it_never_ends(self):
        _, _, history = run(Training(steps=20, patience=1, validate_every=1))
        assert history["step"][-1] == 20


class TestTrouble:
    def test_non_finite_raises_with_the_step(self):
        x = normal()
        x[7] = math.inf
        with pytest.raises(NonFiniteObjective, match=r"At step \d+ of 200 the objective is not finite .*ess = "):
            run(Training(steps=200), data=x)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"steps": 0}, "'steps' of Training must be a positive integer. Got 0"),
            ({"batch": -5}, "'batch' of Training must be a positive integer. Got -5"),
            ({"lr": 0.0}, "'lr' must be positive"),
            ({"beta": 1.5}, r"'beta' of MECO must be in \(0, 1\]. Got 1.5"),
            ({"optimizer": "adm"}, "Did you mean 'adam'"),
            ({"schedule": "cos"}, "Did you mean 'cosine'"),
            ({"iterate": "lst"}, "Did you mean 'last'"),
            ({"seed": -1}, "'seed' of Training must be an integer from 0"),
            ({"schedule": "pl", "mu": 0.0}, "'mu' must be positive"),
            ({"patience": 0}, "'patience' of Training must be a positive integer. Got 0"),
            ({"patience": 2.5}, "'patience' of Training must be a positive integer. Got 2.5"),
        ],
    )
    def test_bad_settings(self, changes, message):
        with pytest.raises(InvalidValue, match=message):
            Training(**changes)

    def test_nothing_to_train(self):
        frozen = Quadratic(2).requires_grad_(False)
        with pytest.raises(InvalidValue, match="no parameters to train"):
            train(frozen, MECO(Gaussian(2)), normal())
        with pytest.raises(InvalidValue, match="no data to train on"):
            train(Quadratic(2), MECO(Gaussian(2)), torch.empty(0, 2))

    def test_a_last_step_that_diverges_is_noticed(self):
        with pytest.raises(NonFiniteObjective, match="After step 1 the parameters are not finite"):
            train(Quadratic(2), MECO(Gaussian(2)), 1e3 * normal(), Training(steps=1, lr=9e37, optimizer="sgd"))

    def test_silent_when_not_a_terminal(self, capfd):
        run(Training(steps=20))
        assert capfd.readouterr() == ("", "")


class TestResume:
    training = Training(steps=40, checkpoint_every=10, log_every=5)

    def test_extending_the_best_equals_running_through(self, tmp_path):
        models = []
        for folder, lengths in ((None, [60]), (tmp_path, [23, 60])):
            for steps in lengths:
                model, estimator = pieces()
                train(
                    model,
                    estimator,
                    normal(),
                    Training(steps=steps, iterate="best", validate_every=5, lr=0.01),
                    validation=normal(100, seed=3),
                    folder=folder,
                    resume=steps != lengths[0],
                )
            models.append(model)
        assert same(*models)

    @pytest.mark.parametrize("optimizer", ["adam", "sgd"])
    @pytest.mark.parametrize("iterate", ["last", "random", "averaged", "ema"])
    def test_extending_equals_running_through(self, tmp_path, optimizer, iterate):
        options = {"optimizer": optimizer, "iterate": iterate, "checkpoint_every": 7, "log_every": 5}
        whole = run(Training(steps=40, **options))
        run(Training(steps=23, **options), tmp_path)
        resumed = run(Training(steps=40, **options), tmp_path, resume=True)
        assert same(whole[0], resumed[0])
        assert same(whole[1], resumed[1])
        kept = [record for record in without_time(resumed[2].records) if record["step"] != 23]
        assert kept == without_time(whole[2].records)

    def test_history_file_is_the_history(self, tmp_path):
        _, _, history = run(self.training, tmp_path)
        lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
        assert lines == history.records
        assert history["step"] == [1, 5, 10, 15, 20, 25, 30, 35, 40]

    def test_half_a_line_and_later_records_are_dropped(self, tmp_path):
        run(Training(steps=20, checkpoint_every=10, log_every=5), tmp_path)
        with (tmp_path / "history.jsonl").open("a") as file:
            file.write('{"step": 25, "value": 1.0}\n{"step": 3')
        _, _, history = run(self.training, tmp_path, resume=True)
        assert history["step"] == [1, 5, 10, 15, 20, 25, 30, 35, 40]
        assert history.records[5]["value"] != 1.0

    def test_a_folder_with_a_run_is_not_overwritten(self, tmp_path):
        run(Training(steps=5), tmp_path)
        with pytest.raises(InvalidValue, match="holds a run already: continue it with resume=True"):
            run(Training(steps=5), tmp_path)

    def test_another_gamma_is_refused(self, tmp_path):
        run(Training(steps=5), tmp_path, gamma=0.2)
        with pytest.raises(InvalidValue, match=r"started with tracker = EMA\(gamma=0.2\); it cannot resume with"):
            run(Training(steps=9), tmp_path, resume=True, gamma=0.3)

    def test_fewer_steps_are_refused(self, tmp_path):
        run(Training(steps=9), tmp_path)
        with pytest.raises(InvalidValue, match="has done 9 steps already; it cannot resume to 5"):
            run(Training(steps=5), tmp_path, resume=True)

    def test_one_flipped_bit_is_noticed(self, tmp_path):
        run(Training(steps=5), tmp_path)
        path = tmp_path / "checkpoint.safetensors"
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
        with pytest.raises(BrokenFile, match="edited or damaged"):
            run(Training(steps=9), tmp_path, resume=True)

    @pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}\n", b"[1]\n"])
    def test_a_damaged_history_does_not_stop_a_run(self, tmp_path, content):
        run(Training(steps=5), tmp_path)
        (tmp_path / "history.jsonl").write_bytes(content)
        _, _, history = run(Training(steps=9, log_every=2), tmp_path, resume=True)
        assert history["step"] == [6, 8, 9]

    @pytest.mark.parametrize(("field", "value"), [("lr", 0.5), ("batch", 7), ("seed", 3)])
    def test_other_settings_are_refused(self, tmp_path, field, value):
        run(Training(steps=5), tmp_path)
        with pytest.raises(InvalidValue, match=f"started with {field} = .*; it cannot resume with {value}"):
            run(Training(steps=9, **{field: value}), tmp_path, resume=True)

    def test_cosine_cannot_be_extended(self, tmp_path):
        run(Training(steps=5, schedule="cosine"), tmp_path)
        with pytest.raises(InvalidValue, match="started with steps = 5"):
            run(Training(steps=9, schedule="cosine"), tmp_path, resume=True)

    def test_other_models_are_refused(self, tmp_path):
        run(Training(steps=5), tmp_path)
        q = Gaussian(2)
        with pytest.raises(BrokenFile, match="does not belong to this model and estimator"):
            train(MLP(2, hidden=(3,)), MECO(q), normal(), Training(steps=9), folder=tmp_path, resume=True)

    def test_broken_checkpoints(self, tmp_path):
        with pytest.raises(BrokenFile, match="There is no file"):
            run(Training(steps=5), tmp_path, resume=True)
        run(Training(steps=5), tmp_path)
        path = tmp_path / "checkpoint.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(BrokenFile, match="not a complete safetensors file"):
            run(Training(steps=9), tmp_path, resume=True)
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(1)}, path)
        with pytest.raises(BrokenFile, match="was not written by unnorm"):
            run(Training(steps=9), tmp_path, resume=True)

    def test_needs_a_folder(self):
        with pytest.raises(InvalidValue, match="give the folder"):
            run(Training(steps=5), resume=True)

    def test_ctrl_c_saves_and_resumes(self, tmp_path):
        training = Training(steps=400, checkpoint_every=1000)
        whole = run(training)
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(Interrupted, match=r"Stopped after step \d+ of 400. Saved in"):
            run(Training(steps=400, checkpoint_every=1000, log_every=1), tmp_path, data=Slow(normal()))
        timer.join()
        _, note = read_tensors(tmp_path / "checkpoint.safetensors")
        assert 0 < note["step"] < 400
        resumed = run(training, tmp_path, resume=True)
        assert same(whole[0], resumed[0])

    def test_kill_nine_at_any_moment(self, tmp_path):
        """A process that trains is killed outright, several times, and resumed: the end is the same bit for bit."""
        script = (
            "import sys; from tests.test_train import run; from unnorm import Training\n"
            "run(Training(steps=3000, checkpoint_every=3, log_every=2), sys.argv[1], resume=sys.argv[2] == 'yes')"
        )
        command = [sys.executable, "-c", script, str(tmp_path)]
        kills, resume = 0, "no"
        for wait in (0.05, 0.21, 0.34, 0.13):
            process = subprocess.Popen([*command, resume], cwd=ROOT)
            deadline = time.monotonic() + 60
            checkpoint = tmp_path / "checkpoint.safetensors"
            before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
            while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before:  # it has begun to write
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(wait)
            process.kill()
            kills += process.wait() == -signal.SIGKILL
            resume = "yes"
        assert kills == 4
        step = read_tensors(tmp_path / "checkpoint.safetensors")[1]["step"]
        assert 0 < step < 3000
        short = Training(steps=step + 20, checkpoint_every=3, log_every=2)
        resumed, whole = run(short, tmp_path, resume=True), run(short)
        assert same(whole[0], resumed[0])
        assert same(whole[1], resumed[1])
        assert without_time(resumed[2].records) == without_time(whole[2].records)

    def test_write_is_all_or_nothing(self, tmp_path, monkeypatch):
        path = tmp_path / "file"
        write_tensors(path, {"a": torch.zeros(2)}, {"step": 1})

        def fail(*_):
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            write_tensors(path, {"a": torch.ones(2)}, {"step": 2})
        assert read_tensors(path)[1] == {"step": 1}
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


class Batches(MECO):
    """Writes down each batch's own mean weight."""

    def __init__(self, noise, batches):
        super().__init__(noise, tracker="minibatch")
        self.batches = batches

    def forward(self, model, x, *, generator=None):
        objective = super().forward(model, x, generator=generator)
        self.batches.append(objective.info["log_u"].exp().item())
        return objective


class Scripted(Estimator):
    """Draws a parameter up, always alike; its value on validation data is the next of a list."""

    def __init__(self, values):
        super().__init__()
        self.values = iter(values)

    def forward(self, model, x, *, generator=None):
        value = torch.tensor(0.0 if self.training else next(self.values), dtype=torch.float64)
        return Objective(-model.linear.sum(), {"value": value})


class Slow:
    """Data that take a while to read, so that a signal arrives in the middle."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.005)
        return self.data[index]


@pytest.mark.slow
def test_two_processes_stay_in_step(tmp_path):
    """Fabric launches two processes; they share u and the parameters, and their effective batch is both batches."""
    script = tmp_path / "two.py"
    script.write_text(
        "import sys, torch\n"
        "from lightning_fabric import Fabric\n"
        "from tests.test_train import normal, pieces\n"
        "from unnorm import Training, train\n"
        "def main(fabric, folder, steps, resume):\n"
        "    model, estimator = pieces()\n"
        "    train(model, estimator, normal(), Training(steps=steps, checkpoint_every=5), fabric=fabric,\n"
        "          folder=folder, resume=resume)\n"
        "    torch.save({'model': model.state_dict(), 'u': estimator.log_u}, f'{folder}/rank{fabric.global_rank}.pt')\n"
        "if __name__ == '__main__':\n"
        "    fabric = Fabric(accelerator='cpu', devices=2, strategy='ddp_spawn')\n"
        "    fabric.launch(main, sys.argv[1], int(sys.argv[2]), sys.argv[3] == 'yes')\n"
    )
    results = {}
    for name, calls in {"whole": [(20, "no")], "resumed": [(11, "no"), (20, "yes")]}.items():
        folder = tmp_path / name
        for steps, resume in calls:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, script, folder, str(steps), resume], cwd=ROOT, env=environment, check=True)
        results[name] = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    for key in results["whole"][0]["model"]:
        values = [result["model"][key] for pair in results.values() for result in pair]
        assert all(torch.equal(values[0], other) for other in values[1:])
    assert len({result["u"].item() for pair in results.values() for result in pair}) == 1


def test_rates_by_name_are_the_trainings():
    assert Training(schedule="pl", lr=0.3, mu=2.0).rates().eta(5) == rates("pl", lr=0.3, steps=1, mu=2.0).eta(5)

"""Why causality matters, in figures: asynchronous training without care against `exact`, real processes, ten runs each.

    python benchmarks/race.py [--quick] [--json FILE]

One supernet (`digits_conv` with four blocks, 256 subnets) is trained on the real digits by four stages, each a process
with one thread that the operating system puts where and when it likes. Every run has the same seed: the same first
weights, the same subnets, the same batches in the same order, the same window.

    exact      every step sees the updates of all earlier steps that use its layers
    careless   whatever has arrived is done at once: a forward reads the weights as they are at that moment, a backward
               those of its own moment, and every gradient is applied by whoever has it; no version is kept

Two learning rates, with momentum and a cosine: 0.2, near the best for one process (`survey` has the validation loss,
mean over all subnets, that the reference reaches with this and others), and a quarter of it, under `gentle`, for
those who would say that 0.2 is unfair to stale gradients. After each run all subnets are scored with inherited weights
on the validation images, their batch norms set by training images. `seeds` is a yardstick: five runs of the
reference with seeds of their own, thus other first weights, subnets and orders of the same data.

`fingerprints` counts the different ones over weights, optimizer state and losses; `loss_*` is the training loss, mean
of the last 20 steps; `tau_*` is Kendall's tau between the rankings (by validation loss) of every pair of runs, and
`tau_accuracy_*` the same by accuracy; `tau_to_exact_mean` is that of a run against exact; `picks` counts the different
subnets that came out best (by validation loss), `pick_accuracy_*` is their validation accuracy and `mean_accuracy_*`
that of all subnets. The reference's fingerprint must be that of exact, and also that of careless where nothing
overlaps: on one stage, and on all of them with a window of one. The script stops if it is not. Runs of the
reference share the cores with each other, so their `seconds` are no measure of speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import write
from ranks import kendall_tau
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.data import Loader, MicroBatches, digits
from weft.distributed.env import read_env
from weft.distributed.heartbeat import Heartbeat
from weft.distributed.launcher import launch
from weft.distributed.remote_call import Call
from weft.distributed.store import ControlStore, connect
from weft.distributed.transport import Transport
from weft.engine.batch_stats import BatchStatsRecord
from weft.engine.consistency import Exact
from weft.engine.layer_state import fingerprint, layer_digest, layer_tensors
from weft.engine.losses import cross_entropy
from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.engine.rng import deterministic
from weft.engine.train_step import TrainStep
from weft.engine.weight_versions import VersionedLayer
from weft.pipeline.scheduler import LayerDependency, SchedulePolicy
from weft.pipeline.stage import Stage
from weft.pipeline.worker import Worker
from weft.trainer.evaluate import Calibration
from weft.trainer.metrics_log import LossDigest
from weft.trainer.pipeline_engine import RankLoop
from weft.zoo import digits_conv

CPU = torch.device("cpu")
STAGES, BATCH, SEED, LAST = 4, 64, 0, 20
CUT = (2, 3, 5)  # stem block0 | block1 | reduce block2 | block3 head
KINDS = ("exact", "careless")
RATES = {"": 0.2, "gentle": 0.05}
SURVEY = (0.02, 0.05, 0.1, 0.2, 0.4)
SEEDS = range(5)

supernet = partial(digits_conv, 4)


class Loose(VersionedLayer):
    """Weights with no versions: one memory, which updates change under whoever is computing with it."""

    def _newest(self) -> list[Tensor]:
        if self._aliases is None:  # an alias has a version counter of its own: autograd does not see updates
            self._aliases = [p.data.requires_grad_() for p in self.parameters]
        return self._aliases

    def on_update(self, oldest: int, applied: bool) -> None:
        super().on_update(oldest, applied)
        self.newest = 0  # every micro-batch may read it


class Careless(Stage):
    """A stage whose operations wait for nothing but their input, and that applies gradients as they come."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.weights = {name: Loose(w.layer, w.module, w.schedule) for name, w in self.weights.items()}

    def dependencies(self, n: int) -> list[LayerDependency]:
        return []

    def stash(self, name: str, n: int, gradients: list[Tensor | None], record: BatchStatsRecord | None) -> None:
        self.weights[name].add(n, gradients, record)
        self.apply([self.weights[name]], lambda weights: n)


class Race:
    """One process of it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        me = read_env()
        assert me is not None
        self.rank, self.world, self.steps = me.rank, me.world, options["steps"]
        store = connect()
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)
        self.transport = Transport(self.rank, self.world, CPU)
        self.heartbeat = Heartbeat(store, self.rank, self.world, lambda rank, message: None)
        self.store = ControlStore(store, self.rank, self.world)
        self.runs = 0
        self.data = digits(SEED)
        self.loader = Loader(self.data.train, BATCH, SEED)
        self.calibration = Loader(self.data.train, 256, SEED).batch(0)["image"]
        assert self.data.validation is not None
        self.held = next(Loader(self.data.validation, len(self.data.validation), SEED, shuffle=False).all())

    def config(self, chain: weft.Chain, rate: float, seed: int = SEED) -> TrainStep:
        return TrainStep(
            steps=self.steps,
            stream=weft.make_stream(chain.space, "iid", seed),
            consistency=dict.fromkeys(chain.layers, Exact()),
            loss=cross_entropy,
            optimizer=Optimizer("sgd", lr=rate, momentum=0.9, schedule="cosine"),
            seed=seed,
        )

    def sequential(self, rate: float, seed: int, folder: str) -> dict[str, Any]:
        """A run of the reference, by one process for itself, with its scores."""
        chain = weft.initialise(supernet, seed)
        one = SequentialReference(chain, self.config(chain, rate, seed), CPU)
        one.train_mode()
        batches = Loader(self.data.train, BATCH, seed).iterate(0, self.steps)
        began = time.perf_counter()
        losses = [one.step(step, batch).losses[0].item() for step, batch in enumerate(batches)]
        seconds = time.perf_counter() - began
        one.eval_mode()
        mark = whole({name: layer_digest(w, one.optimizer) for name, w in one.weights.items()}, losses)
        self.score(chain, Path(folder, f"{mark}.json"))
        row = {"rate": rate, "kind": "sequential", "seed": seed, "fingerprint": mark}
        return {**row, "loss": statistics.fmean(losses[-LAST:]), "seconds": seconds}

    def alone(self, rate: float) -> str:
        """The fingerprint of careless on one stage with one micro-batch at a time."""
        stage, worker = self.made("careless", rate, (), 0, 1, lambda to, message: None)
        while not worker.done:
            worker.work()
        return whole(digests(stage), [float(report[0]) for _, report in sorted(worker.reports, key=first)])

    def staged(self, kind: str, rate: float, window: int, keep: str = "") -> tuple[str, list[float], float]:
        """Fingerprint, losses and seconds of a run on all stages; its weights go into files that begin with `keep`."""
        loop = RankLoop(self.transport, self.heartbeat, None)
        stage, worker = self.made(kind, rate, CUT, self.rank, window, loop.send)
        dist.barrier()
        began = time.perf_counter()
        for _ in loop.drive(worker, lambda: False):
            pass
        dist.barrier()
        seconds = time.perf_counter() - began
        worker.finish()
        if keep:
            weights = [layer_tensors(w, stage.optimizer) for w in stage.weights.values()]
            plain = {name: t.detach() for own in weights for name, t in own.items() if "#" not in name}
            save_file(plain, f"{keep}-{self.rank}.safetensors")
        self.runs += 1
        losses = [float(report[0]) for _, report in sorted(worker.reports, key=first)]
        told = self.store.gather(f"run/{self.runs}", {"digests": digests(stage), "losses": losses})
        layers = {name: digest for part in told for name, digest in part["digests"].items()}
        return whole(layers, told[0]["losses"]), told[0]["losses"], seconds

    def made(self, kind: str, rate: float, cut: Any, index: int, window: int, send: Any) -> tuple[Stage, Worker]:
        chain = weft.initialise(supernet, SEED)
        config = self.config(chain, rate)
        stage = (Careless if kind == "careless" else Stage)(chain, config, CPU, cut, index)
        stage.train_mode()
        batches = MicroBatches(self.loader, 0, self.steps, 1, config.parts)
        return stage, Worker(stage, SchedulePolicy(window), 0, self.steps, batches, send)

    def gathered(self, files: list[str]) -> weft.Chain:
        """A chain with the weights that all stages have written."""
        chain = weft.initialise(supernet, SEED).eval()
        chain.load_state_dict({name: tensor for file in files for name, tensor in load_file(file).items()})
        return chain

    @torch.no_grad()
    def score(self, chain: weft.Chain, file: Path) -> None:
        """Writes the validation loss and accuracy of every subnet."""
        labels = self.held["label"]
        found: dict[str, tuple[float, float]] = {}

        def walk(picks: tuple[str, ...], seen: Tensor, out: Tensor) -> None:
            """Subnets with a common beginning share its activations."""
            if len(picks) == len(chain.blocks):
                subnet = " ".join(pick.partition(".")[2] for pick in picks if "." in pick)
                right = (out.argmax(-1) == labels).double().mean()
                found[subnet] = (float(F.cross_entropy(out, labels)), float(right))
                return
            for name in chain.blocks[len(picks)].candidates():
                walk((*picks, name), *through(chain.module(name), seen, out))

        walk((), self.calibration, self.held["image"])
        file.write_text(json.dumps(found))


def through(module: nn.Module, seen: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Both through a layer whose batch norms take the statistics of the first."""
    with Calibration([module]) as calibration:
        seen = module(seen)
        calibration.freeze()
        return seen, module(images)


def first(report: tuple[int, Tensor]) -> int:
    return report[0]


def digests(stage: Stage) -> dict[str, str]:
    return {name: layer_digest(w, stage.optimizer) for name, w in stage.weights.items()}


def whole(layers: Mapping[str, str], losses: list[float]) -> str:
    chained = LossDigest()
    chained.add(losses)
    return fingerprint(layers, chained.value)


def work(options: Mapping[str, Any], folder: str) -> None:
    with deterministic(CPU):
        race = Race(options)
        plain = [*((rate, SEED) for rate in SURVEY), *((RATES[""], seed) for seed in SEEDS if seed != SEED)]
        mine = [race.sequential(rate, seed, folder) for rate, seed in plain[race.rank :: race.world]]
        rows = [row for part in race.store.gather("sequential", mine) for row in part]
        references = {row["rate"]: row["fingerprint"] for row in rows if row["seed"] == SEED}
        for rate in RATES.values():
            alone = race.alone(rate) if race.rank == 0 else references[rate]
            narrow, _, _ = race.staged("careless", rate, 1)
            if not references[rate] == alone == narrow:
                raise SystemExit("careless is not the reference where nothing overlaps: the benchmark is wrong")
        one_of: dict[str, str] = {}  # of runs with equal weights, one is scored
        for rate, run, kind in itertools.product(RATES.values(), range(options["runs"]), KINDS):
            name = f"{folder}/{kind}-{rate}-{run}"
            mark, losses, seconds = race.staged(kind, rate, 2 * race.world, name)
            row = {"rate": rate, "kind": kind, "run": run, "seed": SEED, "fingerprint": mark}
            rows.append({**row, "loss": statistics.fmean(losses[-LAST:]), "seconds": seconds})
            if mark != references[rate]:
                one_of.setdefault(mark, name)
        for mark, name in list(one_of.items())[race.rank :: race.world]:
            files = [f"{name}-{rank}.safetensors" for rank in range(race.world)]
            race.score(race.gathered(files), Path(folder, f"{mark}.json"))
        if race.rank == 0:
            Path(folder, "rows.json").write_text(json.dumps(rows))
        dist.barrier()
        race.heartbeat.close()
        race.transport.close()


def summary(rows: list[dict[str, Any]], reference: dict[str, Any]) -> dict[str, Any]:
    """The figures of some runs, beside the run of the reference that they should equal."""

    def spread(name: str, values: list[float]) -> dict[str, float]:
        found = {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}
        return {f"{name}_{key}": value for key, value in {**found, "std": statistics.stdev(values)}.items()}

    def taus(name: str, key: str) -> dict[str, float]:
        found = [kendall_tau(a[key], b[key]) for a, b in itertools.combinations(rows, 2)]
        return {f"{name}_mean": statistics.fmean(found), f"{name}_min": min(found)}

    return {
        "runs": len(rows),
        "fingerprints": len({row["fingerprint"] for row in rows}),
        "is_sequential_law": all(row["fingerprint"] == reference["fingerprint"] for row in rows),
        **spread("loss", [row["loss"] for row in rows]),
        **taus("tau", "losses"),
        **taus("tau_accuracy", "accuracies"),
        "tau_to_exact_mean": statistics.fmean(kendall_tau(row["losses"], reference["losses"]) for row in rows),
        "picks": len({row["pick"] for row in rows}),
        **spread("pick_accuracy", [row["pick_accuracy"] for row in rows]),
        **spread("mean_accuracy", [statistics.fmean(row["accuracies"]) for row in rows]),
        "seconds_mean": statistics.fmean(row["seconds"] for row in rows),
    }


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    reference = {(row["rate"], row["seed"]): row for row in rows if row["kind"] == "sequential"}
    found: dict[str, Any] = {name: {} for name in RATES}
    for (name, rate), kind in itertools.product(RATES.items(), KINDS):
        own = [row for row in rows if (row["rate"], row["kind"]) == (rate, kind)]
        found[name][kind] = summary(own, reference[rate, SEED])
    seeds = summary([reference[RATES[""], seed] for seed in SEEDS], reference[RATES[""], SEED])
    for one_of_them_is_it in ("tau_to_exact_mean", "is_sequential_law", "seconds_mean"):
        del seeds[one_of_them_is_it]
    survey = {str(rate): statistics.fmean(reference[rate, SEED]["losses"]) for rate in SURVEY}
    return {**found.pop(""), **found, "seeds": seeds, "survey": survey}


def show(found: Mapping[str, Any]) -> None:
    columns = {
        f"exact {RATES['']}": found["exact"],
        f"careless {RATES['']}": found["careless"],
        f"exact {RATES['gentle']}": found["gentle"]["exact"],
        f"careless {RATES['gentle']}": found["gentle"]["careless"],
        "seeds": found["seeds"],
    }
    print(" " * 20 + "".join(f"{title:>15}" for title in columns))
    for key in found["exact"]:
        cells = [column.get(key, "") for column in columns.values()]
        print(f"{key:20}" + "".join(f"{c:15.4f}" if isinstance(c, float) else f"{c!s:>15}" for c in cells))
    print("validation loss by learning rate, one process: ", end="")
    print(", ".join(f"{rate}: {loss:.4f}" for rate, loss in found["survey"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three runs of fewer steps")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    told = {"steps": 60 if options.quick else 300, "runs": 3 if options.quick else 10}
    with tempfile.TemporaryDirectory() as folder:
        launch(STAGES, Call(work, (told, folder)), restarts=0, threads=1)
        rows = json.loads(Path(folder, "rows.json").read_text())
        for row in rows:
            scores = json.loads(Path(folder, f"{row['fingerprint']}.json").read_text())
            row["pick"] = min(scores, key=lambda subnet: scores[subnet][0])
            row["pick_accuracy"] = scores[row["pick"]][1]
            row["losses"] = [loss for loss, _ in scores.values()]
            row["accuracies"] = [accuracy for _, accuracy in scores.values()]
    found = figures(rows)
    show(found)
    if not (found["exact"]["is_sequential_law"] and found["gentle"]["exact"]["is_sequential_law"]):
        raise SystemExit("exact is not the reference")
    size = {"stages": STAGES, "steps": told["steps"], "batch": BATCH, "subnets": len(rows[0]["losses"])}
    for row in rows:
        del row["losses"], row["accuracies"]
    write(options.json, **found, rates={name or "main": rate for name, rate in RATES.items()}, **size, rows=rows)


if __name__ == "__main__":
    main()

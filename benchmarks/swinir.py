"""SwinIR learns x2 super-resolution from real photographs and beats bicubic interpolation on others, alone and as one
of several trials that share a device, with the same weights to the last bit.

    python benchmarks/swinir.py [--quick] [--device cpu|cuda] [--json FILE]

Trains on four photographs that scikit-image and scikit-learn ship and is judged on three others, which it has never
seen. Rows are `network, photograph, bicubic, swinir, gain` in dB of PSNR on luma, for whole photographs, border of 2
pixels left out. `same` says whether the trial that ran beside others has the loss of every step and every weight of
the one that ran alone. On a CPU the network is small and the training short; on a GPU it is the paper's light one.

`anchored` is a trial beside it whose network adds the bicubic result to its own. `patch_psnr` is the mean over small
patches, which weighs flat ones, where bicubic is all but perfect, as much as others.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import write
from photographs import VALIDATION, Psnr, bicubic, pair, super_resolution
from swinir_network import swinir
from torch import Tensor

import weft
from weft.data import Batch, Data
from weft.runs import Checkpoints
from weft.space import Space
from weft.tune import Recipe
from weft.tune.recipe import TrialConfig, trial_config
from weft.tune.training.trainer import train

SCALE = 2


def photographs() -> Data:
    """Patches of 24 x 24 small pixels, half of which two neighbours share."""
    return super_resolution(SCALE, 24, 12)


def difference(outputs: Tensor, batch: Batch) -> Tensor:
    """The mean of absolute differences, as the paper has it."""
    return (outputs.float() - batch["targets"]).abs().mean()


def recipe(steps: int, precision: str = "fp32") -> Recipe:
    return Recipe(
        model=swinir,
        data=photographs,
        loss=difference,
        metrics={"psnr": Psnr(SCALE)},
        objectives=("psnr",),
        steps=steps,
        batch_size=16,
        lr_schedule="cosine",
        warmup_steps=20,
        report_every=max(steps // 6, 1),
        precision=precision,
    )


def space() -> Space:
    found = Space()
    found.integer("embed", [8, 16, 24, 60])
    found.integer("groups", [1, 2, 4])
    found.integer("depth", [2, 6])
    found.integer("heads", [2, 4, 6])
    found.categorical("anchored", [False, True])
    found.real("lr", 1e-5, 1e-2, log=True)
    return found


SMALL = {"embed": 24, "groups": 2, "depth": 2, "heads": 4, "lr": 2e-3, "anchored": False}
LIGHT = {"embed": 60, "groups": 4, "depth": 6, "heads": 6, "lr": 5e-4, "anchored": False}
TINY = {"embed": 8, "groups": 1, "depth": 2, "heads": 2, "lr": 5e-3, "anchored": False}


def kept(folder: Path) -> dict[str, Tensor]:
    """The weights and losses that a trial left."""
    return dict(Checkpoints(folder / "checkpoints").load().tensors)


def fingerprint(tensors: dict[str, Tensor]) -> str:
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        hasher.update(tensor.contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()


def scored(network: str, own: TrialConfig, tensors: dict[str, Tensor], device: str) -> list[dict[str, Any]]:
    """The rows of the held-out photographs, each taken whole."""
    model, metric, rows = own.build(), Psnr(SCALE), []
    model.load_state_dict({n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")})
    model.to(device).eval()
    for name in VALIDATION:
        low, high = (image.to(device) for image in pair(name, SCALE))
        with torch.no_grad():
            learned = float(metric(model(low), {"targets": high})[0])
        plain = float(metric(bicubic(low, SCALE), {"targets": high})[0])
        row = {"network": network, "photograph": name, "bicubic": plain, "swinir": learned, "gain": learned - plain}
        rows.append(row)
    return rows


def on_patches() -> float:
    """What bicubic interpolation comes to by the measure that trials are judged by."""
    held = photographs().validation
    assert held is not None
    batch = held.take(np.arange(len(held)))
    total, count = Psnr(SCALE)(bicubic(batch["image"], SCALE), batch)
    return float(total) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small network and few steps, too few to be good")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="instead of 600 on a CPU and 3,000 on a GPU")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the workers of a study have: bits depend on it
    small = options.quick or options.device == "cpu"
    params: dict[str, Any] = SMALL if small else LIGHT
    made = recipe(options.steps or (30 if options.quick else 600 if small else 3000))
    trials = [params, {**params, "anchored": True}, TINY]
    own = trial_config(made, params)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        print(f"alone: {made.steps} steps on {options.device}", flush=True)
        result = train(own, None, device=options.device, directory=place / "alone", report=_told)
        alone = kept(place / "alone")
        began = time.perf_counter()
        study = weft.tune(
            made,
            space(),
            trials=len(trials),
            maximize="psnr",
            sampler="random",
            name="swinir",
            folder=place,
            devices=[options.device],
            jobs_per_device=len(trials),
            enqueue=trials,
        )
        seconds = time.perf_counter() - began
        packed = kept(study.path / "trials" / "0")
        rows = scored("paper's", own, packed, options.device)
        beside = kept(study.path / "trials" / "1")
        rows += scored("anchored", trial_config(made, trials[1]), beside, options.device)
        values = [trial.values[0] if trial.values else None for trial in study.trials]
    line = "{network:>10} {photograph:>10}  bicubic {bicubic:6.2f} dB  swinir {swinir:6.2f} dB  gain {gain:+.2f}"
    for row in rows:
        print(line.format(**row))
    same = fingerprint(alone) == fingerprint(packed) and values[0] == result.values[0]
    print(f"packed with {len(trials) - 1} others: {'the same' if same else 'ANOTHER'} result", flush=True)
    write(
        options.json,
        device=options.device,
        params=params,
        steps=made.steps,
        rows=rows,
        mean_gain={
            network: sum(row["gain"] for row in rows if row["network"] == network) / len(VALIDATION)
            for network in ("paper's", "anchored")
        },
        beats_bicubic=all(row["gain"] > 0 for row in rows),
        same=same,
        fingerprints={"alone": fingerprint(alone), "packed": fingerprint(packed)},
        patch_psnr={"bicubic": on_patches(), "alone": result.values[0], "packed": values[0], "anchored": values[1]},
        seconds={"alone": result.seconds, "packed, all trials": seconds},
        peak=result.peak,
    )


def _told(step: int, values: tuple[float, ...]) -> bool:
    print(f"  step {step:5d}: {values[0]:.2f} dB on patches", flush=True)
    return False


if __name__ == "__main__":
    main()

"""Which tables of each result file are its headline, and where the words on its aims stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from docs.scripts import tables
from docs.scripts.tables import Aims, Found, Table

README = "README.md"
ASYNCHRONOUS, PLANNER = "docs/explanation/asynchronous.md", "docs/explanation/planner.md"
PACKING, RACE = "docs/explanation/packing.md", "docs/explanation/race.md"
MEMORY = "docs/explanation/memory.md"


@dataclass(frozen=True, slots=True)
class Headline:
    """The part of a result file that is shown."""

    title: str
    tables: Callable[[Found, Aims], Iterable[Table]]
    """From the file and its aims to tables."""
    says: tuple[tuple[str, str, str], ...] = ()
    """(file, first words, last words) of what is quoted."""
    aims: tuple[str, ...] = ()
    """Rows of the README's tables whose last cell is what was to be reached."""


_CPU = tuple(f"{name} | 1 core" for name in ("digits-conv", "digits-mlp", "nas-bench-macro"))
_GPU = (
    "digits-conv",
    "digits-mlp",
    "nas-bench-macro",
    "nas-bench-macro, both channels last",
    "nas-bench-macro, both channels first",
)
_STAGES = (
    "two stages over one, exact, spaced stream: speed-up",
    "two processes that need nothing of each other over one: what the machine gives",
    "one subnet with a flush after every step: time over torch's `Schedule1F1B`",
    "the same with no more in flight than torch's",
    "exact on a spaced stream over the same supernet with flushes: speed-up",
    "i.i.d. stream, split backward over whole: speed-up",
    "simulated time against measured: error",
    "time that decisions take: share",
)
_TAU = ((README, "The aims were a tau of 0.80", "by some of the longer runs."),)

HEADLINES: dict[str, Headline] = {
    "overhead-cpu": Headline("A step against a plain loop, one core", tables.overhead, aims=_CPU),
    "overhead-gpu": Headline(
        "A step against a plain loop, one GPU",
        tables.overhead,
        ((README, "On the GPU each candidate is a CUDA graph", "fewer launches cannot help."),),
        tuple(f"{name} | H200" for name in _GPU),
    ),
    "pipeline": Headline(
        "Two stages", tables.pipeline, ((README, "All of them have the bits", "of one process."),), _STAGES
    ),
    "one-device-gpu": Headline(
        "Stages that share a GPU",
        lambda found, _: [
            [["run", "one fingerprint on 1, 2 and 4 stages"], *([k, tables.shown(v)] for k, v in found["same"].items())]
        ],
        ((README, "One, two and four stages that share one H200", "has not been run."),),
    ),
    "race": Headline(
        "Without care for versions", tables.race, ((RACE, "**What it does not show.**", "a race's cannot."),)
    ),
    "schedules": Headline(
        "Bubbles of exact order, simulated",
        tables.schedules,
        ((README, "With one batch a subnet the rule", "the stream are."),),
    ),
    "shared-layers": Headline(
        "Layers that every subnet uses",
        tables.rows(
            optimizer="optimizer",
            consistency="consistency",
            loss=("loss", ".3f"),
            spread=("loss_sd", ".3f"),
            accuracy=("accuracy", ".3f"),
        ),
        ((README, "What that costs depends on the optimizer", "unless a run says otherwise."),),
    ),
    "paci": Headline(
        "Asynchronous pipelines",
        tables.paci,
        (
            (README, "Gradients of weights that are put off do not pay", "within it twice."),
            (README, "To a given loss the aim of 1.35", "asynchronous.md))."),
            (README, "At K = 8 the rate of the flushes", "(to reach: 1.03)."),
        ),
    ),
    "paci-muon": Headline(
        "Asynchronous pipelines, with Muon",
        tables.paci,
        ((README, "With 16 rows (`paci-muon.json`)", "over three seeds 6 and 6."),),
    ),
    "paci-muon-large": Headline(
        "Asynchronous pipelines, with Muon and larger micro-batches",
        tables.paci,
        (
            (README, "With Muon and micro-batches of 32 rows", "1.12 and 1.12."),
            (README, "Over weft's own flush a step with 32 rows", "longer than torch's."),
        ),
    ),
    "delays": Headline(
        "What delay costs early in a training",
        tables.delays,
        ((ASYNCHRONOUS, "That is a miss: the aim", "better than as many."),),
    ),
    "shakespeare": Headline(
        "What delay costs at the end of one",
        tables.rows(
            method="method",
            consistency="consistency",
            best_validation_loss=("best_val_loss", ".3f"),
            at_step="best_step",
            ms_a_step=("step_ms", ".1f"),
        ),
        ((ASYNCHRONOUS, "But the flush had its best", "steps."),),
    ),
    "search-quality": Headline("Ranking with inherited weights, 2,500 steps", tables.quality, _TAU),
    "search-quality-5000": Headline("The same, 5,000 steps", tables.quality, _TAU),
    "search-quality-long": Headline(
        "The same, longer", tables.quality, ((README, "Scoring by loss instead of accuracy", "between seeds."),)
    ),
    "search-methods": Headline(
        "Search methods, twenty seconds each",
        tables.methods,
        (
            (README, "On NAS-Bench-201 the weights of the gradient methods", "do not compare."),
            (README, "A pick at random lies in the better half", "with -0.05 to 0.13."),
        ),
    ),
    "search-picks": Headline(
        "Ways to settle on a subnet",
        tables.picks,
        ((README, "DARTS and DrNAS now settle on the options", "(aim: 0.7)."),),
    ),
    "search-defaults": Headline("Search methods, present defaults", tables.methods),
    "anytime": Headline(
        "Search in entangled spaces",
        tables.anytime,
        ((README, "DARTS' mixture never becomes a network", "as it trains."),),
    ),
    "search-steps": Headline(
        "Steps of a gradient search",
        tables.rows(
            network="network",
            tokens="tokens",
            precision="precision",
            graphs="graphs",
            plain_ms=("plain_ms", ".1f"),
            weights=("weights_ratio", ".2f"),
            architecture=("architecture_ratio", ".2f"),
        ),
        ((README, "A search runs its layers as CUDA graphs by itself", "as with them."),),
    ),
    "elastic-cpu": Headline(
        "Mixtures, one core",
        tables.elastic,
        ((README, "On the core linear layers take", "against one."),),
    ),
    "elastic-gpu": Headline(
        "Mixtures, one GPU",
        tables.elastic,
        ((README, "To reach were 1.15", "and 1.10 to 1.37."),),
    ),
    "elastic-gpu-check": Headline(
        "Mixtures by fused kernels, checked",
        lambda found, _: [
            tables.columns(
                found["check"],
                what="what",
                shape="shape",
                precision="precision",
                bit_equal="bit_equal",
                error=("error_fused", ".1e"),
            )
        ],
    ),
    "planner": Headline(
        "The planner's solver", tables.planner, ((README, "A GPT-2 of 96 layers", "up to 12 times the optimum."),)
    ),
    "planner-capture": Headline("Models that are captured", tables.capture),
    "planner-published": Headline(
        "PaSE's published model",
        tables.published,
        ((PLANNER, "Its model ranks plans; it does not predict.", "both columns proven optimal)"),),
    ),
    "planner-predicted-gpu": Headline(
        "Predicted steps, one GPU",
        tables.predicted,
        ((PLANNER, "steps under bfloat16 autocast", "the graph does not have."),),
    ),
    "planner-applied": Headline("Predicted plans, two processes", tables.applied),
    "memory": Headline("Estimated memory, PyTorch's own segments", tables.memory),
    "memory-expandable": Headline(
        "Estimated memory, reserved by pages",
        tables.memory,
        ((README, "Estimated memory of a training step", "8.8 % and 12.0 %."),),
    ),
    "residency": Headline(
        "Layers that live on the host",
        tables.residency,
        ((README, "To reach were 98 % of the resident speed", "which waits for the bus)."),),
    ),
    "residency-again": Headline(
        "Layers that live on the host, a second run",
        tables.residency,
        ((README, "A run of two spaces with less of that work", "resident ones by 17 %."),),
    ),
    "tune": Headline(
        "A study of 64 candidates",
        tables.tune,
        (
            (README, "To reach were 2 times one at a time", "whoever runs them."),
            (README, "One at a time of the two studies", "s after the start."),
        ),
    ),
    "tune-again": Headline("A study of 64 candidates, a second run", tables.tune),
    "tune-threads": Headline(
        "A study of 64 candidates with a fifth of the work",
        tables.tune,
        ((README, "The same study with a fifth of the work", "ran out of memory."),),
    ),
    "tune-fusable": Headline(
        "The candidates that can be fused",
        tables.tune,
        ((README, "5 times for what can be fused", "(reached: 9.49)"),),
    ),
    "tune-uneven": Headline(
        "A study with huge candidates",
        tables.tune,
        ((README, "1.3 times the best fixed fraction", "whoever runs them."),),
    ),
    "microbatch": Headline(
        "The largest micro-batch that fits",
        tables.rows(
            family="family",
            width="width",
            depth="depth",
            precision="precision",
            memory_GiB="memory_gib",
            told="told",
            true="true",
            ratio=("ratio", ".2f"),
            unforced="unforced",
            unforced_ratio=("unforced_ratio", ".2f"),
        ),
        ((README, "The largest micro-batch that weft tells", "if other bits do not count."),),
    ),
    "convolutions": Headline(
        "Workspaces of convolutions",
        tables.rows(
            bytes_a_number="element",
            direction="pass",
            convolutions="count",
            p5=("p5", "+.2f"),
            median=("median", "+.2f"),
            p95=("p95", "+.2f"),
            within_a_tenth=("closer", ".2f"),
        ),
        ((MEMORY, "Of the convolutions that the trees were not fitted to", "(`convolutions.json`)."),),
    ),
    "packing": Headline(
        "Packing, simulated",
        tables.packing,
        ((PACKING, "The goal of 10 % is reached", "never become due."),),
    ),
    "fusion": Headline(
        "Fusion, one core", tables.fusion, ((PACKING, "Fusion pays where a trial alone", "nothing with two."),)
    ),
    "swinir": Headline(
        "SwinIR, alone and packed",
        tables.rows(
            network="network",
            photograph="photograph",
            bicubic=("bicubic", ".2f"),
            swinir=("swinir", ".2f"),
            gain=("gain", ".2f"),
        ),
    ),
}

"""The sections of docs/results.md: for each result file its title, its headline tables, its aims and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from docs.scripts import tables
from docs.scripts.tables import Aims, Found, Table


@dataclass(frozen=True, slots=True)
class Section:
    """One result file on the page. Its text has no measured figure: those are in the tables."""

    title: str
    tables: Callable[[Found, Aims], Iterable[Table]]
    """From the file and its aims to tables."""
    text: str = ""
    aims: Mapping[str, str] = field(default_factory=dict)
    """By the first cell of a row of the tables."""


_ONE_CORE = {f"{name} | 1 core": "1.05" for name in ("digits-conv", "digits-mlp", "nas-bench-macro")}
_ONE_GPU = {
    f"{name} | H200": "0.70"
    for name in (
        "digits-conv",
        "digits-mlp",
        "nas-bench-macro",
        "nas-bench-macro, both channels last",
        "nas-bench-macro, both channels first",
    )
}
_PIPELINE = {
    "two stages over one, exact, spaced stream: speed-up": "1.85",
    "one subnet with a flush after every step: time over torch's `Schedule1F1B`": "1.00",
    "simulated time against measured: error": "0.10",
    "time that decisions take: share": "0.01",
}
_RANKING = """Aims: a tau of 0.80, and a pick among the best 1 % (rank 66 or better). The tau is missed. The pick
reaches its aim in some of the longer runs only. Longer training, augmentation, larger batches, strong weight
decay, label smoothing and AdamW did not help: on 27,000 lossy images a supernet that fits them better ranks
worse. The recipe was chosen after some twenty runs whose tau had been seen. For comparison, the largest network
ranks 21."""
_TUNE = """"out of memory" counts trials that ran out of memory, each in its own process, and were run again alone.
Aims: twice as fast as one at a time, five times for trials that can be fused, 1.3 times as fast as the best
fixed fraction, and no trial out of memory in 500."""
_PICKS = """DARTS and DrNAS keep, in each choice, the option whose removal raises the loss most. That rule is one
of about a dozen that were tried, and was chosen on seeds 0 and 1: read the other seeds. The library has changed
since (it looks at 8 batches of 256 images, never keeps an option that breaks the network alone, and takes the
likeliest of sizes); that was not measured on these tables."""

SECTIONS: dict[str, Section] = {
    "overhead-cpu": Section(
        "A step against a plain loop, one core",
        tables.overhead,
        "The ratio is the time of a step by weft over that of a hand-written PyTorch loop. Below 1 weft is faster.",
        _ONE_CORE,
    ),
    "overhead-gpu": Section(
        "A step against a plain loop, one GPU",
        tables.overhead,
        """On the GPU each candidate is a CUDA graph. The fingerprint is the same without graphs, with dropout and
in bf16. weft lays images out with the channels innermost; the plain loop of the third row does not, that of the
fourth does. The aim is missed where both have the same layout: depthwise convolutions fill those steps, so
fewer launches cannot help. These networks are small. At the size of GPT-2 a compiled plain loop is faster.""",
        _ONE_GPU,
    ),
    "pipeline": Section(
        "Two stages",
        tables.pipeline,
        "Every way has the bits of one process. The simulator's error is that of the time of a whole run.",
        _PIPELINE,
    ),
    "one-device-gpu": Section(
        "Stages that share a GPU",
        lambda found, _: [
            [["run", "one fingerprint on 1, 2 and 4 stages"], *([k, tables.shown(v)] for k, v in found["same"].items())]
        ],
        "NCCL between several GPUs has not been run.",
    ),
    "race": Section(
        "Training without ordered updates",
        tables.race,
        """Ten runs that ignore the order of updates ("careless"), on four processes, against ten `exact` ones: the
same configuration each time. [More](explanation/race.md).""",
    ),
    "schedules": Section(
        "Idle time of exact pipelines, simulated",
        tables.schedules,
        """With one batch a subnet, weft's rule is no faster than NASPipe's. The gain comes from micro-batches and
from the order of the subnets. [More](explanation/schedules.md).""",
    ),
    "shared-layers": Section(
        "Layers that every subnet uses",
        tables.rows(
            optimizer="optimizer",
            consistency="consistency",
            loss=("loss", ".3f"),
            spread=("loss_sd", ".3f"),
            accuracy=("accuracy", ".3f"),
        ),
        """What older weights cost depends on the optimizer. With AdamW `delayed(4)` stays within the spread
between seeds; with SGD and momentum it ruins the training, and `lagged(4)` still learns. So layers are `exact`
unless a run says otherwise.""",
    ),
    "paci": Section(
        "Asynchronous pipelines",
        tables.paci,
        """Each cell has how many times as fast a step is as with torch's 1F1B, and how many times sooner a given
training loss is reached ("never": not within the run). K is the number of micro-batches an update. Aims for the
second figure: 1.35 at K = 2 and 1.15 at K = 4. Both are missed with AdamW: early in a training old weights cost
steps. At K = 8 the learning rate of the runs with a flush is too high, so the second figure says nothing there.
Simulated, the aim on 8 stages with K = 8 is 1.75. Aim for memory: 1.03 of a flush's. Rows named "loop" and "put
off" are of features that weft no longer has. [More](explanation/asynchronous.md).""",
    ),
    "paci-muon": Section(
        "Asynchronous pipelines, with Muon",
        tables.paci,
        """Micro-batches of 16 rows. The aims (1.35 at K = 2, 1.15 at K = 4) are missed: updates are a large part
of such a step, and old weights cost more steps.""",
    ),
    "paci-muon-large": Section(
        "Asynchronous pipelines, with Muon and larger micro-batches",
        tables.paci,
        "Micro-batches of 32 rows, seed 0. Both aims (1.35 at K = 2, 1.15 at K = 4) are reached.",
    ),
    "delays": Section(
        "What delay costs early in a training",
        tables.delays,
        """Validation loss above that of a run with a flush after 300 steps, with its 95 % interval. The aim was a
loss within the spread between seeds where K is at least depth - 1. AdamW misses it.""",
    ),
    "shakespeare": Section(
        "What delay costs at the end of one",
        tables.rows(
            method="method",
            consistency="consistency",
            best_validation_loss=("best_val_loss", ".3f"),
            at_step="best_step",
            ms_a_step=("step_ms", ".1f"),
        ),
        "The best validation loss of a whole training, and the step at which it was seen.",
    ),
    "search-quality": Section("Ranking with inherited weights, 2,500 steps", tables.quality, _RANKING),
    "search-quality-5000": Section("Ranking with inherited weights, 5,000 steps", tables.quality, "Aims as above."),
    "search-quality-long": Section("Ranking with inherited weights, 12,000 steps", tables.quality, "Aims as above."),
    "search-methods": Section(
        "Search methods, twenty seconds each",
        tables.methods,
        """Medians over the seeds, with the defaults of the time. Tau of the gradient methods is over the whole
table; that of spos, fairnas and the sandwich over the 19 to 130 subnets that evolution scored, so the two do
not compare. On NAS-Bench-201 darts, darts2, gdas, spos and fairnas do no better than a subnet drawn at random.
On NAS-Bench-Macro DrNAS picks the largest subnet each time: taking the largest without a search does as well.""",
    ),
    "search-picks": Section("Ways to settle on a subnet", tables.picks, _PICKS),
    "search-defaults": Section("Search methods, later defaults", tables.methods, _PICKS),
    "anytime": Section(
        "Search in entangled spaces",
        tables.anytime,
        """Validation loss of the pick with inherited weights, all picks of one size within 2 %, one seed. DARTS'
mixture never becomes a network in the GPT space: its pick gets worse as it trains.""",
    ),
    "search-steps": Section(
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
        "Time of a search step over a training step of the largest network, as `weft.search_gradient` runs it.",
    ),
    "elastic-cpu": Section(
        "Mixtures, one core",
        tables.elastic,
        """Forward and backward of a mixture, with the gradients of all probabilities, over the same of the plain
largest network; beside it sums of padded slices, as TangleNAS computes them; and what autograd keeps. Aims:
1.15 (1.5 at 197 tokens) and 1.02: all reached. Single norms over a mixture of widths miss the aim of 1.10 by
far on a core.""",
    ),
    "elastic-gpu": Section(
        "Mixtures, one GPU",
        tables.elastic,
        """As CUDA graphs, aims as above: all networks reach them. Three of 24 single linear layers miss 1.10 at
3,152 tokens. Without graphs a small step is bound by launches and takes two to three times as long.""",
    ),
    "elastic-gpu-check": Section(
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
    "planner": Section(
        "The planner's solver",
        tables.planner,
        """On the cost tables that PaSE's own code writes. The optimum is the same everywhere, and proven. PaSE was
measured on another, contended machine.""",
    ),
    "planner-capture": Section("Models that are captured", tables.capture),
    "planner-published": Section(
        "PaSE's published model",
        tables.published,
        "Speed-up over data parallelism by the cost model of PaSE, as its code has it and with its faults mended.",
    ),
    "planner-predicted-gpu": Section(
        "Predicted steps, one GPU",
        tables.predicted,
        "Predicted times rank steps; they are not times to plan a deadline by.",
    ),
    "planner-applied": Section(
        "Predicted plans, two processes",
        tables.applied,
        "Measured and predicted advantage of the plan that was chosen over data parallelism.",
    ),
    "memory": Section(
        "Estimated memory, PyTorch's own segments",
        tables.memory,
        """Aims: median error 3 %, 95th percentile 8 %, at most 5 % under. Reached for what is allocated, missed
for what is reserved: it depends on the order of sizes.""",
    ),
    "memory-expandable": Section(
        "Estimated memory, expandable segments",
        tables.memory,
        "As trials of a study reserve memory. The aims above are reached for both.",
    ),
    "residency": Section(
        "Layers offloaded to the host",
        tables.residency,
        """The bound is the longer of the work and of the copies. Aims: 98 % of the speed of a resident supernet
where the work is longer (reached), twice the speed of copying on demand where copies are longer (reached),
within 5 % of the bound at every size (missed at 512 and 2,048 tokens of NASPipe's spaces, where a step is bound
by launches and weft's own work on the host adds to them), and 99 % of hits (missed by the wide space at 512
tokens).""",
    ),
    "residency-again": Section("Layers offloaded to the host, a second run", tables.residency),
    "tune": Section("A study of 64 candidates", tables.tune, _TUNE),
    "tune-again": Section("A study of 64 candidates, a second run", tables.tune),
    "tune-threads": Section("A study of 64 candidates with a fifth of the work", tables.tune),
    "tune-fusable": Section("The candidates that can be fused", tables.tune),
    "tune-uneven": Section(
        "A study with huge candidates",
        tables.tune,
        """Here packing is 1.3 times as fast as the best fixed fraction. Where all candidates fit an eighth of the
device it is not: the large ones alone keep the device busy.""",
    ),
    "microbatch": Section(
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
        """Told before anything runs, over the largest that trains. Aim: 0.95. Two of seven miss it. Near the limit
PyTorch tries convolutions again with kernels that need less memory and give other bits; "unforced" leaves those
out.""",
    ),
    "convolutions": Section(
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
        "Error of the predicted workspace on convolutions that had no part in the fit.",
    ),
    "packing": Section(
        "Packing, simulated",
        tables.packing,
        "Aim: within 10 % of the lower bound.",
    ),
    "fusion": Section(
        "Fusion, one core",
        tables.fusion,
        "How many times as fast fused trials are as one after the other. Fusion pays where a trial alone is small.",
    ),
    "swinir": Section(
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

"""The step time that the planner predicts for one device, beside the measured one.

    python benchmarks/predicted.py [--quick] [--device cpu|cuda] [--json FILE]

The device is measured as `weft calibrate` does; then unmodified models of transformers, built from their configurations
without trained weights, train by AdamW: forward, backward and update, the median of several steps, in float32 and, on a
GPU, under bfloat16 autocast. `error` is predicted over measured less 1. Communication is not part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from machine import write
from ranks import kendall_tau
from torch import nn

from weft.hardware.machine import Machine
from weft.plan.calibrate import calibrate
from weft.plan.capture import capture
from weft.plan.planner import plan_captured


def text(kind: str, head: str, length: int, vocabulary: int = 8192, **sizes: Any) -> Callable[[int], tuple[Any, Any]]:
    def make(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        import transformers

        config = transformers.CONFIG_MAPPING[kind](vocab_size=vocabulary, **sizes)
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
        ids = torch.randint(0, vocabulary, (batch, length))
        return model, {"input_ids": ids, "labels": ids}

    return make


def images(kind: str, side: int, **sizes: Any) -> Callable[[int], tuple[Any, Any]]:
    def make(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        import transformers

        config = transformers.CONFIG_MAPPING[kind](num_labels=100, **sizes)
        model = transformers.AutoModelForImageClassification.from_config(config)
        return model, {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 100, (batch,))}

    return make


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LARGE: dict[str, tuple[Callable[[int], tuple[Any, Any]], tuple[int, ...]]] = {
    "gpt2": (text("gpt2", "CausalLM", 512, **NO_DROPOUT), (4, 16, 64)),
    "bert": (text("bert", "MaskedLM", 256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), (8, 64)),
    "llama": (
        text("llama", "CausalLM", 512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12),
        (4, 32),
    ),
    "t5": (text("t5", "Seq2SeqLM", 256, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0), (8, 64)),
    "vit": (images("vit", 224, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), (8, 64)),
    "resnet": (images("resnet", 224), (16, 64)),
    "convnext": (images("convnext", 224), (8, 64)),
    "swin": (images("swin", 224, drop_path_rate=0.0), (8, 32)),
}
SMALL: dict[str, tuple[Callable[[int], tuple[Any, Any]], tuple[int, ...]]] = {
    "gpt2": (text("gpt2", "CausalLM", 64, 1024, n_layer=2, n_embd=256, n_head=4, **NO_DROPOUT), (2, 8)),
    "bert": (
        text(
            "bert",
            "MaskedLM",
            64,
            1024,
            hidden_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=1024,
        ),
        (2, 8),
    ),
    "resnet": (images("resnet", 64, depths=[1, 1, 1, 1], hidden_sizes=[64, 128, 256, 512]), (4, 16)),
    "vit": (
        images(
            "vit",
            64,
            image_size=64,
            hidden_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=1024,
        ),
        (4, 16),
    ),
}


def measured(model: nn.Module, batch: dict[str, torch.Tensor], device: str, dtype: str, repeats: int) -> float:
    """Seconds of a step, the median."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    clock = time.perf_counter if device == "cuda" else time.process_time  # one thread, and others on the machine
    for _ in range(repeats + 3):
        began = clock()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - began)
    return statistics.median(times[3:])


def compared(name: str, batch: int, machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = options.device
    model, inputs = (SMALL if options.small else LARGE)[name][0](batch)
    captured = capture(model.train(), inputs)
    model.to(device)
    there = {key: tensor.to(device) for key, tensor in inputs.items()}
    settled = {"devices": 1, "stages": 1, "microbatches": 1, "recompute": False, "compare": False, "memory": 1e15}
    for dtype in ("float32", "bfloat16") if device == "cuda" else ("float32",):
        planned = plan_captured(captured, machine, dtype=dtype, **settled)
        took = measured(model, there, device, dtype, options.repeats)
        yield {
            "model": name,
            "batch": batch,
            "dtype": dtype,
            "operators": len(captured.graph),
            "predicted_ms": planned.cost.step_time * 1e3,
            "measured_ms": took * 1e3,
            "error": planned.cost.step_time / took - 1,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    options.small = options.quick or options.device == "cpu"
    options.repeats = 3 if options.quick else 10
    if options.device == "cpu":
        torch.set_num_threads(1)
    machine = calibrate(options.device, quick=options.quick)
    rows = []
    print(f"{'model':12}{'batch':>6}{'dtype':>10}{'predicted ms':>14}{'measured ms':>13}{'error':>8}")
    for name, (_, batches) in (SMALL if options.small else LARGE).items():
        for batch in batches:
            for found in compared(name, batch, machine, options):
                rows.append(found)
                print(
                    f"{name:12}{batch:6}{found['dtype']:>10}{found['predicted_ms']:14.2f}"
                    f"{found['measured_ms']:13.2f}{found['error']:8.2f}",
                    flush=True,
                )
                taus = {}
                for dtype in {r["dtype"] for r in rows}:
                    own = [r for r in rows if r["dtype"] == dtype]
                    if len(own) > 1:
                        taus[dtype] = kendall_tau([r["predicted_ms"] for r in own], [r["measured_ms"] for r in own])
                middle = statistics.median(abs(r["error"]) for r in rows)
                write(options.json, rows=rows, calibrated=machine.to_json(), tau=taus, median_error=middle)


if __name__ == "__main__":
    main()

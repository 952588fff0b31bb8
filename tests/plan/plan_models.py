"""Small networks of many kinds, what one device makes of them, and processes that run them in parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.multiprocessing import start_processes
from torch.nn import functional
from torch.utils import _pytree as pytree

from weft.plan.capture import CapturedModel, capture
from weft.plan.runtime import ParallelModule
from weft.plan.runtime.program import split_batch
from weft.utils.rng import torch_seeded

SEED, ROWS = 5, 8


def run_program(captured: CapturedModel, model: nn.Module, batch: Any) -> dict[str, Any]:
    """The value of every node of the program, computed on one device with the weights of the model."""
    own, state = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers(remove_duplicate=False))
    values: dict[str, Any] = {
        **{node: own[name] for node, name in captured.parameters.items()},
        **{node: state[name] for node, name in captured.buffers.items()},
        **captured.constants,
        **{node: batch if isinstance(batch, Tensor) else batch[key] for node, key in captured.inputs.items()},
    }
    for node in captured.program.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: values[source.name])
            values[node.name] = node.target(*args, **kwargs)
    return values


LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
WORDS = {"vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHARED = {**LAYERS, **WORDS, "num_key_value_heads": 2}
STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1]}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2", "LMHeadModel", {**WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "bert": ("Bert", "ForMaskedLM", {**LAYERS, **WORDS}),
    "llama": ("Llama", "ForCausalLM", SHARED),
    "t5": (
        "T5", "ForConditionalGeneration",
        {**WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
    ),
    "vit": ("ViT", "ForImageClassification", {**LAYERS, "image_size": 32, "patch_size": 8}),
    "swin": ("Swin", "ForImageClassification", WINDOWS),
    "convnext": ("ConvNext", "ForImageClassification", {**STAGES, "num_stages": 2}),
    "resnet": ("ResNet", "ForImageClassification", {**STAGES, "embedding_size": 16}),
    "mixtral": ("Mixtral", "ForCausalLM", {**SHARED, "num_local_experts": 4}),
    "whisper": (
        "Whisper", "ForConditionalGeneration",
        {
            **WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
            "max_source_positions": 16, "max_target_positions": 16, "decoder_start_token_id": 1,
        },
    ),
    "mamba": ("Mamba", "ForCausalLM", {**WORDS, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}),
}  # fmt: skip


def transformer(name: str, rows: int = 4, **values: Any) -> tuple[nn.Module, dict[str, Any]]:
    """An unmodified model of transformers from a small configuration, in training, with a batch that has labels."""
    transformers = pytest.importorskip("transformers")
    stem, ending, small = TRANSFORMERS[name]
    with torch_seeded(name):
        model = getattr(transformers, stem + ending)(getattr(transformers, f"{stem}Config")(**small, **values))
        words, labels, others = torch.randint(3, 40, (3, rows, 8)).unbind()
        images, sound = torch.randn(rows, 3, 32, 32), torch.randn(rows, 8, 32)
    batch: dict[str, Any] = {"input_ids": words, "labels": labels, "use_cache": False}
    if ending == "ForImageClassification":
        batch = {"pixel_values": images, "labels": torch.arange(rows) % 2}
    elif ending == "ForMaskedLM":
        batch = {"input_ids": words, "labels": labels, "attention_mask": torch.ones_like(words)}
    elif ending == "ForConditionalGeneration":
        entered = {"input_features": sound} if name == "whisper" else {"input_ids": words}
        batch = {**entered, "decoder_input_ids": others, "labels": labels, "use_cache": False}
    return model.train(), batch


class Model(nn.Module):
    """Parts by name, and a function of the model and its batch as the forward."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *batch: Any, **named: Any) -> Any:
        return self._run(self, *batch, **named)


class Perceptron(nn.Module):
    """Every layer's result is read again by the last, one parameter is frozen and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(1.5))
        self.frozen, self.unused = nn.Parameter(torch.linspace(0.5, 2, 4), requires_grad=False), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.tanh(layer(seen[-1])) * self.scale)
        scores = self.head(seen[1] + seen[2] + seen[3] + x) * self.frozen
        return functional.cross_entropy(scores, y), scores


class Pictures(nn.Module):
    """Convolutions, plain and grouped, batch normalisation in training, dropout, a mean over a cut axis, and a mask
    without gradient that comes from what has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.grouped, self.other = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8, momentum=0.3)
        self.up, self.head = nn.ConvTranspose2d(8, 12, 2, stride=2), nn.Linear(12, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = functional.relu(self.norm(self.first(x)), inplace=True)
        high = h > 0.5
        h = h + functional.relu(self.other(self.grouped(functional.max_pool2d(h, 2).repeat(1, 1, 2, 2))))
        h = functional.avg_pool2d(h.masked_fill(high, 0.1), 2)
        scores = self.head(functional.dropout(self.up(h), 0.2).mean((2, 3)))
        return functional.cross_entropy(scores, y, label_smoothing=0.1), scores


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.before, self.after, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, 4, -1).transpose(1, 2) for t in self.qkv(self.before(x)).split(d, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout)
        x = x + self.out(seen.transpose(1, 2).reshape(b, s, d))
        return x + functional.dropout(self.narrow(functional.gelu(self.wide(self.after(x)))), self.dropout)


class Text(nn.Module):
    """A transformer whose embedding is its output layer too, with a mask that every block reads, and labels of which
    some are ignored, most of them in one row."""

    def __init__(self, dropout: float, ignored: int = -100) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(16, 16), nn.Parameter(torch.randn(6, 16) * 0.1)
        self.blocks, self.norm = nn.ModuleList([Block(16, dropout) for _ in range(2)]), nn.LayerNorm(16)
        self.ignored = ignored

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x) + self.position
        mask = torch.ones(6, 6, dtype=torch.bool).tril() & (x != 3)[:, None, None, :] | torch.eye(6, dtype=torch.bool)
        for block in self.blocks:
            h = block(h, mask)
        scores = self.norm(h) @ self.embed.weight.t()
        return functional.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=self.ignored), scores


class Odds(nn.Module):
    """What the other models lack: recurrent layers, group norm, noise, losses of many kinds, axes of one when cut."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 12, 2, batch_first=True), nn.GRU(12, 8)
        self.group, self.depth = nn.GroupNorm(2, 8), nn.Conv1d(8, 16, 3, padding=1, groups=8)
        self.weight, self.shift = nn.Parameter(torch.randn(16, 6) * 0.3), nn.Parameter(torch.randn(4, 1, 6))
        self.register_buffer("classes", torch.linspace(0.5, 2, 6))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(self.lstm(x)[0].transpose(0, 1))[0].permute(1, 2, 0)
        h = self.depth(self.group(h) + torch.rand_like(h) * 0.1).unflatten(1, (4, 4)).flatten(1, 2)
        h = torch.einsum("ncs,cd->nsd", h, self.weight)
        h = torch.baddbmm(self.shift, h, torch.eye(6).expand(4, 6, 6)) + h.select(1, 0).unsqueeze(1)
        h = h * torch.bernoulli(h.detach(), 0.8) * torch.bernoulli(h.detach().sigmoid()) + torch.cat(
            [h[:, 2:], h[:, :2]], 1
        ).roll(1, -1).masked_fill(h > 1, 0.5)
        rows = h.flatten(0, 1)
        likely = functional.log_softmax(rows, -1)
        aim = functional.one_hot(y.flatten(), 6).float()
        loss = functional.cross_entropy(rows, y.flatten(), weight=self.classes, ignore_index=1)
        loss = loss + torch.ops.aten.nll_loss_forward(likely, y.flatten(), None, 1, 2)[0]
        loss = loss + functional.mse_loss(rows, aim) + functional.smooth_l1_loss(rows, aim, reduction="sum") / 10
        loss = loss + functional.binary_cross_entropy_with_logits(rows, aim) + functional.cross_entropy(rows, aim)
        loss = loss + h.amax(-1).mean() + h.var(0).mean() + h.mean(0, keepdim=True).squeeze().square().sum()
        return loss, h


def _words(rows: int, ignored: int | None = None) -> tuple[Tensor, Tensor]:
    words, labels = torch.randint(0, 16, (2, rows, 6)).unbind()
    if ignored is not None:
        labels[0, 1:] = ignored
    return words, labels


STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "perceptron": lambda: (Perceptron(), (torch.randn(ROWS, 8), torch.randint(0, 4, (ROWS,)))),
    "pictures": lambda: (Pictures(), (torch.randn(ROWS, 4, 8, 8), torch.randint(0, 4, (ROWS,)))),
    "text": lambda: (Text(0.1, ignored=3), _words(4, ignored=3)),
    "plain text": lambda: (Text(0.0), _words(ROWS)),
    "dropping text": lambda: (Text(0.2), _words(ROWS)),
    "odds": lambda: (Odds(), (torch.randn(4, 6, 8), torch.randint(0, 6, (4, 6)))),
    "gpt2": lambda: transformer("gpt2", ROWS, **STILL),
    "llama": lambda: transformer("llama"),
}
ADDS_UP = ("perceptron", "plain text", "gpt2")  # of which a batch is the sum of its micro-batches


@cache
def made(name: str) -> tuple[nn.Module, Any]:
    """A model in training and its batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch


@cache
def captured(name: str, microbatches: int = 1) -> CapturedModel:
    """The model, captured with one of so many micro-batches."""
    model, batch = made(name)
    return capture(copy.deepcopy(model), split_batch(batch, ROWS, microbatches)[0] if microbatches > 1 else batch)


@dataclass(frozen=True)
class Expected:
    """What one device makes of a model and its batch: results, gradients, buffers, and the state after a step."""

    model: nn.Module
    batch: Any
    results: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    state: dict[str, Tensor]


def call(model: nn.Module, batch: Any) -> list[Tensor]:
    """The tensors that a model returns, the loss first."""
    if isinstance(model, ParallelModule):
        out = model(batch)
    else:
        out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


def forward_backward(model: nn.Module, batch: Any) -> list[Tensor]:
    """What a model returns; the gradient of all of it is taken."""
    torch.manual_seed(SEED)
    found = call(model, batch)
    (found[0] * 1.5 + found[1].square().mean()).backward()
    return found


@cache
def expected(name: str, microbatches: int = 0) -> Expected:
    """One device with the whole batch, forward and backward; or whole steps of so many micro-batches."""
    model, batch = made(name)
    single = copy.deepcopy(model)
    if microbatches:
        torch.manual_seed(SEED)
        results = [torch.zeros(())]
        for part in split_batch(batch, ROWS, microbatches):
            loss = call(single, part)[0] / microbatches
            loss.backward()
            results[0] += loss.detach()
    else:
        results = [value.detach() for value in forward_backward(single, batch)]
    gradients = {key: None if value.grad is None else value.grad.clone() for key, value in single.named_parameters()}
    sgd(single).step()
    return Expected(model, batch, results, gradients, dict(single.named_buffers()), single.state_dict())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def same(what: str, found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")


def same_gradients(what: str, module: ParallelModule, wanted: Expected) -> None:
    for key, value in module.named_parameters():
        gradient = wanted.gradients[key]
        assert (value.grad is None) == (gradient is None), f"{what}: {key}"
        if gradient is not None and value.grad is not None:
            same(f"{what}: gradient of {key}", module.full_tensor(value.grad), gradient)


def same_after_a_step(what: str, module: ParallelModule, wanted: Expected) -> None:
    sgd(module).step()
    state = module.full_state_dict()
    assert state.keys() == wanted.state.keys()
    for key, value in state.items():
        same(f"{what}: {key} after a step", value.float(), wanted.state[key].float())


def on_processes(count: int, store: Path, *work: Callable[[int], None]) -> None:
    """Runs functions of the rank, one after the other, on so many processes, which find each other through a file."""
    start_processes(_begin, (count, str(store / "store"), work), nprocs=count, start_method="fork")


def _begin(rank: int, count: int, store: str, work: tuple[Callable[[int], None], ...]) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=patience)
    try:
        for each in work:
            each(rank)
    finally:
        dist.destroy_process_group()

"""Unmodified models of transformers and subnets of the zoo as graphs: how many operators, how many have a rule, how
long.

    python benchmarks/capture.py [--quick] [--json FILE]

Models are built from small configurations (two layers), in training mode, with their own loss where they have one; the
last row is Llama at its full size of eight billion weights, on the meta device.
An operator is known if it has a rule, or if no parameter reaches it: masks and positions are computed on every device
alike (`alike` counts those of them that have no rule). `splittable_share` is the share of operators, parameters
included, of which something can be split.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from machine import write
from torch import Tensor, nn

import weft
from weft import zoo
from weft.errors import PlanError
from weft.plan.capture import capture
from weft.utils.rng import generator, torch_seeded

Batch = dict[str, Any]
Case = tuple[nn.Module, Any, Callable[[Any, Any], Tensor] | None]

WORDS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {**WORDS, **LAYERS, "max_position_embeddings": 64}
SHARED = {**TEXT, "num_key_value_heads": 2}
HEADS = {**SHARED, "head_dim": 16}
IMAGES = {**LAYERS, "image_size": 32, "patch_size": 8}
GPT = {**WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
PAIR = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
}  # fmt: skip
SOUND = {
    **LAYERS, "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}  # fmt: skip
STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1]}
TEXT_AND_IMAGES = {
    "text_config": {**TEXT, "max_position_embeddings": 32, "projection_size": 64}, "vision_config": IMAGES,
    "projection_dim": 64,
}  # fmt: skip
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}


def tokens() -> Tensor:
    return torch.randint(3, 96, (4, 16))


def causal() -> Batch:
    return {"input_ids": tokens(), "labels": tokens()}


def pair() -> Batch:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(), "labels": tokens()}


def classes() -> Batch:
    mask = torch.ones(4, 16, dtype=torch.long)
    return {"input_ids": tokens(), "attention_mask": mask, "labels": torch.randint(0, 2, (4,))}


def images() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))}


def large_images() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 2, (4,))}


def pixels() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4, 32, 32))}


def unlabelled() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 32, 32)}


def sound() -> Batch:
    return {"input_values": torch.randn(4, 400)}


def speech() -> Batch:
    return {"input_features": torch.randn(4, 16, 64), "decoder_input_ids": tokens(), "labels": tokens()}


def both() -> Batch:
    return {"input_ids": tokens(), "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


# model: (configuration, class, what is set, batch)
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], Batch]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT, causal),
    "bert": ("BertConfig", "BertForSequenceClassification", TEXT, classes),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SHARED, causal),
    "t5": (
        "T5Config", "T5ForConditionalGeneration",
        {**WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}, pair,
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGES, images),
    "swin": ("SwinConfig", "SwinForImageClassification", WINDOWS, images),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", {**STAGES, "num_stages": 2}, images),
    "resnet": ("ResNetConfig", "ResNetForImageClassification", {**STAGES, "embedding_size": 16}, images),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**SHARED, "num_local_experts": 4}, causal),
    "whisper": (
        "WhisperConfig", "WhisperForConditionalGeneration",
        {
            **WORDS, **PAIR, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32,
            "decoder_start_token_id": 1,
        }, speech,
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", SHARED, causal),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SHARED, causal),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", HEADS, causal),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", HEADS, causal),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", HEADS, causal),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", HEADS, causal),
    "phi": ("PhiConfig", "PhiForCausalLM", SHARED, causal),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", SHARED, causal),
    "opt": ("OPTConfig", "OPTForCausalLM", {**TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64}, causal),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**WORDS, "hidden_size": 64, "n_layer": 2, "n_head": 4}, causal),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT, causal),
    "gpt-neo": (
        "GPTNeoConfig", "GPTNeoForCausalLM",
        {
            **WORDS, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        }, causal,
    ),
    "gpt-j": ("GPTJConfig", "GPTJForCausalLM", {**GPT, "rotary_dim": 8}, causal),
    "gpt-bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT, causal),
    "falcon": (
        "FalconConfig", "FalconForCausalLM",
        {**WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, causal,
    ),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", TEXT, causal),
    "distilbert": (
        "DistilBertConfig", "DistilBertForMaskedLM",
        {**WORDS, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}, causal,
    ),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**TEXT, "embedding_size": 32}, causal),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**TEXT, "embedding_size": 32}, causal),
    "deberta-v2": ("DebertaV2Config", "DebertaV2ForMaskedLM", TEXT, causal),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", TEXT, causal),
    "layoutlm": ("LayoutLMConfig", "LayoutLMForMaskedLM", TEXT, causal),
    "xlnet": (
        "XLNetConfig", "XLNetLMHeadModel", {**WORDS, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}, causal,
    ),
    "funnel": (
        "FunnelConfig", "FunnelForMaskedLM",
        {
            **WORDS, "block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128,
            "num_decoder_layers": 1,
        }, causal,
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", {**WORDS, **PAIR}, pair),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", {**WORDS, **PAIR}, pair),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", {**WORDS, **PAIR}, pair),
    "deit": ("DeiTConfig", "DeiTForImageClassification", IMAGES, images),
    "beit": ("BeitConfig", "BeitForImageClassification", {**IMAGES, "use_relative_position_bias": True}, images),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", IMAGES, images),
    "vit-mae": (
        "ViTMAEConfig", "ViTMAEForPreTraining",
        {
            **IMAGES, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 64,
        }, unlabelled,
    ),
    "segformer": (
        "SegformerConfig", "SegformerForSemanticSegmentation",
        {**STAGES, "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "decoder_hidden_size": 32}, pixels,
    ),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2Model", SOUND, sound),
    "hubert": ("HubertConfig", "HubertModel", SOUND, sound),
    "clip": ("CLIPConfig", "CLIPModel", TEXT_AND_IMAGES, both),
    "siglip": ("SiglipConfig", "SiglipModel", TEXT_AND_IMAGES, both),
    "mobilenet-v1": (
        "MobileNetV1Config", "MobileNetV1ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25}, images,
    ),
    "mobilenet-v2": (
        "MobileNetV2Config", "MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.35}, images,
    ),
    "regnet": (
        "RegNetConfig", "RegNetForImageClassification", {**STAGES, "embedding_size": 16, "groups_width": 8}, images,
    ),
    "efficientnet": (
        "EfficientNetConfig", "EfficientNetForImageClassification",
        {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}, large_images,
    ),
    "convnext-v2": ("ConvNextV2Config", "ConvNextV2ForImageClassification", {**STAGES, "num_stages": 2}, images),
    "poolformer": (
        "PoolFormerConfig", "PoolFormerForImageClassification",
        {**STAGES, "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}, images,
    ),
    "swin-v2": ("Swinv2Config", "Swinv2ForImageClassification", WINDOWS, images),
    "levit": (
        "LevitConfig", "LevitForImageClassification",
        {
            "image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        }, large_images,
    ),
    "mamba": (
        "MambaConfig", "MambaForCausalLM",
        {**WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, causal,
    ),
    "mamba2": (
        "Mamba2Config", "Mamba2ForCausalLM",
        {
            **WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4, "head_dim": 16,
            "n_groups": 2, "chunk_size": 8,
        }, causal,
    ),
    "rwkv": (
        "RwkvConfig", "RwkvForCausalLM",
        {**WORDS, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}, causal,
    ),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", SHARED, causal),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", SHARED, causal),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", SHARED, causal),
    "cohere": ("CohereConfig", "CohereForCausalLM", SHARED, causal),
    "granite": ("GraniteConfig", "GraniteForCausalLM", SHARED, causal),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", SHARED, causal),
    "qwen2-moe": (
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        {
            **SHARED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        }, causal,
    ),
    "gpt-oss": (
        "GptOssConfig", "GptOssForCausalLM", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}, causal,
    ),
    "deepseek-v3": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {
            **TEXT, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
        }, causal,
    ),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", TEXT, causal),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**SHARED, "num_experts": 4, "num_experts_per_tok": 2}, causal),
    "mt5": (
        "MT5Config", "MT5ForConditionalGeneration",
        {**WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}, pair,
    ),
    "convbert": ("ConvBertConfig", "ConvBertForMaskedLM", {**TEXT, "embedding_size": 64}, causal),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", HEADS, causal),
    "openai-gpt": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", GPT, causal),
    "mobilebert": ("MobileBertConfig", "MobileBertForMaskedLM", {**TEXT, "embedding_size": 32}, causal),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", {**SHARED, "num_local_experts": 4}, causal),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**GPT, "rotary_dim": 8}, causal),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", TEXT, causal),
    "ctrl": ("CTRLConfig", "CTRLLMHeadModel", {**GPT, "dff": 128}, causal),
    "focalnet": (
        "FocalNetConfig", "FocalNetForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32]}, images,
    ),
}  # fmt: skip

SUBNETS: dict[str, tuple[Callable[[], weft.Chain], tuple[int, ...]]] = {
    "digits-conv": (zoo.digits_conv, (4, 1, 8, 8)),
    "digits-mlp": (zoo.digits_mlp, (4, 1, 8, 8)),
    "nas-bench-macro": (zoo.nas_bench_macro, (4, 3, 32, 32)),
    "nas-bench-macro-entangled": (zoo.nas_bench_macro_entangled, (4, 3, 32, 32)),
    "nas-bench-201": (zoo.nas_bench_201, (4, 3, 32, 32)),
    "toy-cell": (zoo.toy_cell, (4, 1, 28, 28)),
    "conv-macro": (zoo.conv_macro, (4, 3, 32, 32)),
    "darts": (zoo.darts, (4, 3, 32, 32)),
    "ofa-mobilenet-v3": (zoo.ofa_mobilenet_v3, (4, 3, 64, 64)),
    "autoformer-tiny": (lambda: zoo.autoformer_tiny(5, 32, 16), (4, 3, 32, 32)),
    "vit-test": (zoo.vit_test, (4, 1, 8, 8)),
    "gpt-shakespeare": (lambda: zoo.gpt_shakespeare(20, 8), (4, 8)),
    "gpt-test": (zoo.gpt_test, (4, 8)),
}
QUICK = ("gpt2", "bert", "llama", "t5", "vit", "swin", "convnext", "resnet", "mixtral", "whisper", "weft/gpt-test")


def transformers_model(name: str) -> Case:
    import transformers

    transformers.logging.set_verbosity_error()
    config, kind, values, batch = MODELS[name]
    with torch_seeded("capture", name):
        model = getattr(transformers, kind)(getattr(transformers, config)(**values)).train()
        given = batch()
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False
    return model, given, None


def subnet(name: str) -> Case:
    make, shape = SUBNETS[name]
    chain = weft.initialise(make(), 1)
    with torch_seeded("capture", name):
        batch = torch.randn(shape) if len(shape) > 2 else torch.randint(0, 20, shape)
    pick = chain.space.sample(generator("capture", name))
    model = weft.extract(chain, pick, {(chain.inputs or ("x",))[0]: batch}).train()
    return model, batch, lambda output, batch: output.float().square().mean()


def full_llama() -> Case:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    words = torch.zeros(8, 4096, dtype=torch.long, device="meta")
    return model, {"input_ids": words, "labels": words, "use_cache": False}, None


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], Case]]]:
    for name in MODELS:
        yield name, lambda name=name: transformers_model(name)
    for name in SUBNETS:
        yield f"weft/{name}", lambda name=name: subnet(name)
    if not quick:
        yield "llama-8b", full_llama


def row(name: str, make: Callable[[], Case]) -> dict[str, Any]:
    model, batch, loss = make()
    start = time.perf_counter()
    try:
        captured = capture(model, batch, loss=loss, name=name)
    except PlanError as problem:
        return {"model": name, "error": str(problem), "seconds": round(time.perf_counter() - start, 2)}
    seconds = time.perf_counter() - start
    graph = captured.graph
    calls = {node.name for node in captured.program.graph.nodes if node.op == "call_function"}
    return {
        "model": name,
        "nodes": len(graph),
        "known_share": round(sum(entry.known for entry in graph.operators) / len(graph), 4),
        "unknown": graph.unknown,
        "alike": sum(entry.kind == "constant" and entry.name in calls for entry in graph.operators),
        "splittable_share": round(
            sum(any(dim.parts > 1 for dim in entry.dims) for entry in graph.operators) / len(graph), 4
        ),
        "seconds": round(seconds, 2),
        "way": captured.method,
        "notes": list(graph.notes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten models and one subnet")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    logging.getLogger("weft").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    print(f"{'model':<28}{'nodes':>7}{'known':>8}{'seconds':>9}  way")
    for name, make in cases(options.quick):
        if options.quick and name not in QUICK:
            continue
        found = row(name, make)
        rows.append(found)
        if "error" in found:
            print(f"{name:<28}{'-':>7}{'-':>8}{found['seconds']:>9.2f}  {found['error']}", flush=True)
        else:
            rest = f"  without a rule: {', '.join(found['unknown'])}" if found["unknown"] else ""
            counts = f"{found['nodes']:>7}{found['known_share']:>8.1%}{found['seconds']:>9.2f}"
            print(f"{name:<28}{counts}  {found['way']}{rest}", flush=True)
    captured = [found for found in rows if "error" not in found]
    nodes = sum(found["nodes"] for found in captured)
    known = sum(found["nodes"] * found["known_share"] for found in captured) / nodes
    alike = sum(found["alike"] for found in captured)
    print(
        f"{len(captured)} of {len(rows)} captured; {known:.2%} of {nodes} operators are known, {alike} of them without"
    )
    print("a rule, since no parameter reaches them")
    write(options.json, rows=rows, captured=len(captured), known_share=round(known, 4))


if __name__ == "__main__":
    main()

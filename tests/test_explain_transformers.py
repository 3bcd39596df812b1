"""Planted and random faults in the tiny models of transformers and timm, where they are installed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import functional_amp as fa
from tests.explained import check_answers, explained
from tests.injections import TRIALS, as_function, check_injection
from tests.plants import INF, MATMUL, Case, Plant, scaled_

hf: Any = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # theirs, of their own use of torch
]

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(attention: str = "eager") -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=2,
            attn_implementation=attention,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def sizes(attention: str) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attn_implementation": attention,
    }


def llama(attention: str = "eager") -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes(attention), num_key_value_heads=2, use_cache=False))


def bert(attention: str = "eager") -> Any:
    return hf.BertForSequenceClassification(hf.BertConfig(**sizes(attention), **NO_DROPOUT))


def convnext() -> Any:
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(
            num_channels=3, patch_size=4, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32, num_labels=4
        )
    )


def texts(n: int) -> list[Any]:
    tokens = [torch.randint(1, 60, (2, 8)) for _ in range(n)]
    return [{"input_ids": x, "labels": x, "attention_mask": torch.ones(2, 8, dtype=torch.long)} for x in tokens]


def sentences(n: int) -> list[Any]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    labels = torch.tensor([0, 1])
    return [
        {"input_ids": torch.randint(1, 60, (2, 8)), "labels": labels, "attention_mask": mask.clone()} for _ in range(n)
    ]


def images(n: int) -> list[Any]:
    return [{"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(4, (2,))} for _ in range(n)]


def trained(model: nn.Module, window: list[Any], scale: float) -> tuple[Case, nn.Module]:
    apply, params, buffers = as_function(model)
    loss_fn = fa.autocast(lambda params, batch: apply(params, buffers, **batch)[0].loss.float(), torch.float16)
    return Case(loss_fn, params, window, scale), model


def nan_in_the_embedding() -> Case:
    model = gpt2()
    model.config.tie_word_embeddings = False  # the tied head would read the row in every batch
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.clone())
    model.transformer.wte.weight.data[62] = float("nan")
    window = texts(3)
    window[1]["input_ids"] = window[1]["input_ids"].clone()
    window[1]["input_ids"][0, 2] = 62
    return trained(model, window, 2.0**10)[0]


def projection_amplifies_the_cotangent() -> Case:
    model = gpt2()
    scaled_(model.transformer.h[1].mlp.c_proj.weight, 3e4)
    scaled_(model.transformer.h[1].mlp.c_fc.weight, 1e-2)
    return trained(model, texts(1), 2.0**14)[0]


def attention_projection_overflows() -> Case:
    model = gpt2("sdpa")
    scaled_(model.transformer.h[0].attn.c_attn.weight, 5e5)
    return trained(model, texts(1), 2.0**4)[0]


def mask_with_a_closed_row() -> Case:
    window = texts(1)
    mask = torch.full((8, 8), -INF).triu(1).expand(2, 1, 8, 8).clone()
    mask[1, 0, 3] = -INF
    window[0]["attention_mask"] = mask
    return trained(llama(), window, 2.0**4)[0]


def intermediate_layer_overflows() -> Case:
    model = bert()
    scaled_(model.bert.encoder.layer[1].intermediate.dense.weight, 1e6)
    scaled_(model.bert.encoder.layer[0].output.LayerNorm.weight, 10)
    window = sentences(1)
    window[0]["attention_mask"][:] = 1
    return trained(model, window, 2.0**4)[0]


def weight_does_not_fit() -> Case:
    model = gpt2("sdpa")
    scaled_(model.transformer.h[0].attn.c_attn.weight, 1e7)
    return trained(model, texts(1), 2.0**4)[0]


def attention_scores_overflow() -> Case:
    model = llama()
    scaled_(model.model.layers[1].self_attn.q_proj.weight, 1.5e3)
    scaled_(model.model.layers[1].self_attn.k_proj.weight, 1.5e3)
    return trained(model, texts(1), 2.0**4)[0]


def classifier_amplifies_the_cotangent() -> Case:
    model = convnext()
    scaled_(model.classifier.weight, 1e5)
    scaled_(model.convnext.layernorm.weight, 1e-3)
    return trained(model, images(1), 2.0**10)[0]


def first_convolution_overflows() -> Case:
    timm: Any = pytest.importorskip("timm")
    model = timm.create_model("resnet18", num_classes=4)
    scaled_(model.conv1.weight, 2e5)
    apply, params, buffers = fa.from_module(model)

    def loss_fn(params: Any, batch: Any, buffers: Any) -> fa.Loss:
        out, buffers = apply.with_buffers(params, buffers, batch[0])
        return fa.Loss(F.cross_entropy(out.float(), batch[1]), buffers=buffers)

    window = [(torch.randn(2, 3, 32, 32), torch.randint(4, (2,)))]
    return Case(fa.autocast(loss_fn, torch.float16), params, window, 2.0**4, buffers)


def planted(build: Any, stage: str, **answers: Any) -> Plant:
    return Plant(build.__name__, build, stage, **answers)


PLANTS = [
    planted(
        nan_in_the_embedding,
        "input",
        micro_batch=1,
        module="transformer.wte",
        operator=("embedding",),
        source="params.transformer.wte.weight",
    ),
    planted(
        projection_amplifies_the_cotangent,
        "backward",
        module="transformer.h.1.mlp.c_proj",
        operator=MATMUL,
        node="AddmmBackward0",
        scalable=True,
    ),
    planted(attention_projection_overflows, "forward", module="transformer.h.0.attn.c_attn", operator=MATMUL),
    planted(mask_with_a_closed_row, "forward", module="model.layers.0.self_attn", operator=("_softmax",)),
    planted(intermediate_layer_overflows, "forward", module="bert.encoder.layer.1.intermediate.dense", operator=MATMUL),
    planted(weight_does_not_fit, "forward", module="transformer.h.0.attn.c_attn", operator=("_to_copy",)),
    planted(attention_scores_overflow, "forward", module="model.layers.1.self_attn", operator=MATMUL),
    planted(classifier_amplifies_the_cotangent, "backward", module="classifier", operator=MATMUL, scalable=True),
    planted(first_convolution_overflows, "forward", module="conv1", operator=("convolution", "mkldnn_convolution")),
]


@pytest.mark.parametrize("backend", ["autograd", "func"])
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_every_planted_fault_is_named(plant: Plant, backend: Any) -> None:
    torch.manual_seed(1)
    case = plant.build()
    check_answers(plant, case, explained(case, backend), backend)


MODELS = [
    (lambda: gpt2("sdpa"), texts),
    (gpt2, texts),
    (llama, texts),
    (lambda: bert("sdpa"), sentences),
    (convnext, images),
]
UNSPOILED = ("pos", "rotary", "token_type")  # modules whose output no gradient or loss needs to see


def clean(draw: random.Random) -> tuple[Case, nn.Module, list[str]]:
    make, data = draw.choice(MODELS)
    case, template = trained(make(), data(2), 2.0**10)
    leaves = [
        name
        for name, module in template.named_modules()
        if name
        and not list(module.children())
        and not any(part in name for part in UNSPOILED)
        and not isinstance(module, (nn.Dropout, nn.Identity))
    ]
    return case, template, leaves


def test_every_injected_fault_is_named() -> None:
    reached = sum(check_injection(clean, trial) for trial in range(1000, 1000 + TRIALS))
    assert reached >= 0.85 * TRIALS


def test_harmless_masks_are_no_culprits() -> None:
    window = texts(1)
    window[0]["attention_mask"] = torch.full((8, 8), -INF).triu(1).expand(2, 1, 8, 8).clone()
    padded = sentences(1)
    cases: list[Case] = [trained(llama(), window, 2.0**4)[0], trained(bert(), padded, 2.0**4)[0]]
    assert not any(explained(case, "autograd").found for case in cases)

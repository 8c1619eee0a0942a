"""verl changes classes of transformers: layers, models and heads of all models of the process. Before
ours, after ours, and its fused forward on the class of a patched model, packed rows are exact.
"""

from __future__ import annotations

import inspect
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from hf_packfree import apply_patches, patch_report
from hf_packfree.errors import BoundaryConflict
from tests.support import CONTROL, GRADIENT_TOL, LOGIT_TOL, documents, gradients, relative_rms, tiny
from tests.vision import tiny_vision

LENGTHS = (7, 1, 70, 12)
DOCUMENTS = documents(LENGTHS, vocabulary=60)
ROW, TOKENS = torch.cat(DOCUMENTS)[None], sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
NEXT = ROW.roll(-1, 1)
MODELS = {"text": tiny, "vision-language": tiny_vision}
TEMPERATURE = 0.7
EXAMPLE = Path(__file__).parents[2] / "docs/examples/packfree_for_verl.py"


@dataclass
class Output(CausalLMOutputWithPast):
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def layers_and_models():
    """Forwards in the shape of verl's: keywords of its own are handed from model to mixer."""
    names = "GatedDeltaNet", "DecoderLayer", "Model"
    before = {name: getattr(upstream, f"Qwen3_5{name}").forward for name in names}

    def mixer(
        self,
        hidden_states,
        cache_params=None,
        attention_mask=None,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        **more,
    ):
        assert cu_seqlens is None, "a patched model hands on its record"
        return before["GatedDeltaNet"](self, hidden_states, cache_params, attention_mask, **more)

    def layer(self, hidden_states, *args, **more):
        return before["DecoderLayer"](self, hidden_states, *args, **more)

    def model(self, input_ids, attention_mask=None, pixel_values=None, **more):
        embeds = self.get_input_embeddings()(input_ids)
        return self.language_model(inputs_embeds=embeds, attention_mask=attention_mask, **more)

    return dict(zip(before, (mixer, layer, model)))


def with_logits(
    self, input_ids=None, labels=None, temperature=1.0, cu_seqlens=None, cu_seqlens_cpu=None, **more
):
    offsets = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
    given = {name: one for name, one in offsets.items() if one is not None}
    return Output(logits=self.lm_head(self.model(input_ids, **given, **more)[0]))


def forward_with_torch_backend(
    self,
    input_ids=None,
    labels=None,
    temperature=1.0,
    shift_labels=None,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    **more,
):
    logits = with_logits(
        self, input_ids, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, **more
    ).logits
    return Output(**scores(logits / temperature, shift_labels))


def scores(logits, targets):
    log_p = logits.float().log_softmax(-1)
    return {
        "log_probs": log_p.gather(-1, targets[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }


def change(monkeypatch, head):
    for name, forward in layers_and_models().items():
        monkeypatch.setattr(getattr(upstream, f"Qwen3_5{name}"), "forward", forward)
    monkeypatch.setattr(upstream.Qwen3_5ForConditionalGeneration, "forward", head)


def call(model, positions=POSITIONS, **more):
    """As verl's engine calls: offsets where the forward names them."""
    if hasattr(model.config, "vision_config"):
        positions = positions[None].expand(4, -1, -1)
    if "cu_seqlens" in inspect.signature(model.forward).parameters:
        more = {"cu_seqlens": OFFSETS, "cu_seqlens_cpu": OFFSETS, **more}
    return model(
        input_ids=ROW, attention_mask=None, position_ids=positions, use_cache=False, **more
    )


@pytest.fixture(scope="module", params=MODELS)
def stock(request):
    """How to build a model, and its logits of documents one by one, which a stock row differs
    from.
    """
    build = MODELS[request.param]
    model = (build() if request.param == "text" else build("qwen3_5")).eval()
    alone = torch.cat([model(input_ids=one[None]).logits for one in DOCUMENTS], 1)
    with torch.no_grad():
        assert relative_rms(call(model).logits, alone) >= CONTROL * LOGIT_TOL
    return model, alone


def fresh(stock):
    """The same model, of a class that nothing changed yet."""
    build = MODELS["vision-language" if hasattr(stock.config, "vision_config") else "text"]
    return (build() if build is tiny else build("qwen3_5")).eval()


@pytest.mark.parametrize("order", ["ours first", "verl first"])
def test_classes_changed(order, stock, monkeypatch):
    model = fresh(stock[0])
    if order == "ours first":
        apply_patches(model)
    change(monkeypatch, with_logits)
    apply_patches(model)
    with torch.no_grad():
        found = call(model).logits
    assert relative_rms(found, stock[1]) <= LOGIT_TOL


@pytest.mark.parametrize("order", ["ours first", "verl first"])
def test_the_fused_forward(order, stock, monkeypatch):
    model, fused = fresh(stock[0]), {"shift_labels": NEXT, "temperature": TEMPERATURE}
    if order == "ours first":
        apply_patches(model)
    change(monkeypatch, with_logits)
    monkeypatch.setattr(model.__class__, "forward", forward_with_torch_backend)
    apply_patches(model)
    found = call(model, **fused, return_dict=True)
    wanted = scores(stock[1] / TEMPERATURE, NEXT)
    weight = torch.linspace(-1, 1, TOKENS)
    for name, one in wanted.items():
        assert relative_rms(found[name], one) <= LOGIT_TOL
    stock[0].zero_grad()
    (found.log_probs * weight + 0.1 * found.entropy).sum().backward()
    (wanted["log_probs"] * weight + 0.1 * wanted["entropy"]).sum().backward(retain_graph=True)
    got, want = gradients(model), gradients(stock[0])
    assert max(relative_rms(got[name], want[name]) for name in want) <= GRADIENT_TOL


def test_offsets_that_contradict_are_named(monkeypatch):
    model = apply_patches(tiny()).eval()
    monkeypatch.setattr(model.__class__, "forward", forward_with_torch_backend)
    wrong = dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu"), torch.tensor([0, 9, TOKENS]))
    with pytest.raises(BoundaryConflict, match="cu_seqlens and position_ids in disagreement"):
        call(model, **wrong, shift_labels=NEXT)


def test_the_module_that_external_lib_imports(stock, tmp_path, monkeypatch):
    """Of the docs: before the model is built, and verl changes classes after."""
    stock[0].save_pretrained(tmp_path)
    registration = runpy.run_path(str(EXAMPLE))["registration"]
    try:
        model = type(stock[0]).from_pretrained(tmp_path).eval()
    finally:
        registration.remove()
    change(monkeypatch, with_logits)
    assert patch_report(model).patched
    with torch.no_grad():
        assert relative_rms(call(model).logits, stock[1]) <= LOGIT_TOL

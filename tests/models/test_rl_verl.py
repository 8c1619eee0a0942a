"""verl changes classes of transformers: layers, models and heads of all models of the process. Before
ours, after ours, and its fused forward on the class of a patched model, packed rows are exact.
"""

from __future__ import annotations

import functools
import inspect
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from hf_packfree import apply_patches, patch_report
from hf_packfree.errors import BoundaryConflict, UnsupportedInput
from hf_packfree.models import verl_head
from hf_packfree.models.compat import CACHE
from tests.support import CONTROL, GRADIENT_TOL, LOGIT_TOL, documents, gradients, relative_rms, tiny
from tests.vision import tiny_vision

LENGTHS = (7, 1, 70, 12)
DOCUMENTS = documents(LENGTHS, vocabulary=60)
ROW, TOKENS = torch.cat(DOCUMENTS)[None], sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
NEXT = ROW.roll(-1, 1)
MODELS = {"text": tiny, "vision-language": tiny_vision}
NO_OFFSETS = dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu"))
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


def fused_with_media(
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
    targets = input_ids.roll(-1, -1) if shift_labels is None else shift_labels
    return Output(**scores(logits / temperature, targets))


def fused_text(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    labels=None,
    use_cache=None,
    output_attentions=None,
    output_hidden_states=None,
    return_dict=None,
    cache_position=None,
    logits_to_keep=0,
    temperature=1.0,
    shift_labels=None,
    **loss_kwargs,
):
    """Of all models without media: no offsets, every argument named, the head's weight alone."""
    assert return_dict
    hidden = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        # whose name verl's is no more
        **{CACHE: past_key_values},
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        output_attentions=output_attentions or self.config.output_attentions,
        output_hidden_states=output_hidden_states or self.config.output_hidden_states,
        cache_position=cache_position,
    )[0]
    targets = input_ids.roll(-1, -1) if shift_labels is None else shift_labels
    logits = (hidden.flatten(0, 1) @ self.lm_head.weight.t()).view(*hidden.shape[:2], -1)
    return Output(**scores(logits / temperature, targets))


def fused(model):
    return fused_with_media if hasattr(model.config, "vision_config") else fused_text


def named_as_verls(forward):
    """The same function as verl has it, which a patched model knows; and how often it was called."""
    calls = []

    @functools.wraps(forward)
    def forward_with_torch_backend(self, **given):
        calls.append(given)
        return forward(self, **given)

    forward_with_torch_backend.__module__ = "verl.models.transformers.dense_common"
    forward_with_torch_backend.__name__ = "forward_with_torch_backend"
    return forward_with_torch_backend, calls


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


def padded(side):
    """The documents as verl pads them, and where their tokens are; the last one's target is
    padding.
    """
    rows, width = len(LENGTHS), max(LENGTHS)
    starts = [0 if side == "right" else width - length for length in LENGTHS]
    places = torch.zeros(rows, width, dtype=torch.bool)
    for row, (start, length) in enumerate(zip(starts, LENGTHS)):
        places[row, start : start + length] = True
    ids = torch.zeros(rows, width, dtype=torch.long).masked_scatter(places, ROW)
    return ids, places


@pytest.mark.parametrize("form", ["packed", "right", "left"])
@pytest.mark.parametrize("order", ["ours first", "verl first"])
@pytest.mark.parametrize("known", [True, False], ids=["verl's", "another's"])
def test_the_fused_forward(known, order, form, stock, monkeypatch):
    """verl's is computed by our operation; one that only looks like it runs."""
    model, forward = fresh(stock[0]), fused(stock[0])
    forward, calls = named_as_verls(forward) if known else (forward, [])
    asked = {"temperature": TEMPERATURE, "return_dict": True}
    if order == "ours first":
        apply_patches(model)
    change(monkeypatch, with_logits)
    monkeypatch.setattr(model.__class__, "forward", forward)
    apply_patches(model)
    wanted, used = scores(stock[1] / TEMPERATURE, NEXT), torch.ones(1, TOKENS)
    if form == "packed":
        output = call(model, **asked, shift_labels=NEXT)
        found = {name: output[name] for name in wanted}
    else:
        ids, places = padded(form)
        positions = (places.cumsum(1) - 1).clamp(min=0)
        if hasattr(model.config, "vision_config"):
            positions = positions[None].expand(4, -1, -1)
        row = {"input_ids": ids, "attention_mask": places.long(), "position_ids": positions}
        output = model(**row, use_cache=False, **asked)
        assert output.log_probs.shape == output.entropy.shape == ids.shape
        found = {name: output[name][places][None] for name in wanted}
        # verl does not read what a document's last token predicts
        used[0, OFFSETS[1:] - 1] = 0
    weight = torch.linspace(-1, 1, TOKENS)[None] * used
    assert relative_rms(found["log_probs"] * used, wanted["log_probs"] * used) <= LOGIT_TOL
    assert relative_rms(found["entropy"], wanted["entropy"]) <= LOGIT_TOL
    stock[0].zero_grad()
    (found["log_probs"] * weight + 0.1 * found["entropy"]).sum().backward()
    (wanted["log_probs"] * weight + 0.1 * wanted["entropy"]).sum().backward(retain_graph=True)
    got, want = gradients(model), gradients(stock[0])
    assert max(relative_rms(got[name], want[name]) for name in want) <= GRADIENT_TOL
    assert not calls


def test_the_fused_forward_of_a_stock_model_leaks(stock, monkeypatch):
    monkeypatch.setattr(stock[0].__class__, "forward", fused(stock[0]))
    with torch.no_grad():
        found = call(
            stock[0], temperature=TEMPERATURE, return_dict=True, shift_labels=NEXT, **NO_OFFSETS
        )
    for name, one in scores(stock[1] / TEMPERATURE, NEXT).items():
        assert relative_rms(found[name], one) >= CONTROL * LOGIT_TOL


def test_offsets_that_contradict_are_named(monkeypatch):
    model = apply_patches(tiny()).eval()
    monkeypatch.setattr(model.__class__, "forward", fused_with_media)
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
        logits = call(model).logits
        assert type(logits) is torch.Tensor, "verl compiles functions of them"
        assert relative_rms(logits, stock[1]) <= LOGIT_TOL


def test_what_is_left_to_verl(monkeypatch):
    """Rows that stay upstream's, and heads that change logits; without its forward there are
    logits again.
    """
    model, (forward, calls) = apply_patches(tiny()).eval(), named_as_verls(fused_text)
    ours = type(model).forward
    with monkeypatch.context() as change:
        change.setattr(type(model), "forward", forward)
        assert type(model).forward is ours
        alone = model(input_ids=DOCUMENTS[2][None], return_dict=True)
        assert len(calls) == 1 and alone.logits is None
        change.setattr(model.config, "logit_scale", 0.5, raising=False)
        assert call(model, return_dict=True).log_probs.shape == ROW.shape and len(calls) == 2
    assert call(model).logits is not None and len(calls) == 2


@pytest.mark.filterwarnings("default")
def test_adapters_on_the_head_count(monkeypatch):
    """verl's forward reads the weight under them alone."""
    peft = pytest.importorskip("peft")
    model = apply_patches(tiny())
    config = peft.LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        logits = call(wrapped).logits.clone()
        monkeypatch.setattr(type(model), "forward", named_as_verls(fused_text)[0])
        output = call(wrapped, shift_labels=NEXT, temperature=TEMPERATURE, return_dict=True)
    for name, one in scores(logits / TEMPERATURE, NEXT).items():
        assert relative_rms(output[name], one) <= LOGIT_TOL


def test_context_parallelism_is_refused(monkeypatch):
    model = apply_patches(tiny()).eval()
    monkeypatch.setattr(type(model), "forward", named_as_verls(fused_text)[0])
    state = type("State", (), {"context_parallel": 1})
    monkeypatch.setattr(verl_head, "state_of", lambda head: state)
    with pytest.raises(UnsupportedInput, match="found verl's fused forward"):
        call(model, shift_labels=NEXT)

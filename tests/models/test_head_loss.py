"""A step makes no logits: loss and gradients are upstream's, and logits are there for
whoever reads them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_packfree import apply_patches, patch_report, remove_patches
from hf_packfree.errors import UnsupportedInput
from hf_packfree.ops.loss import logits
from hf_packfree.packing.lazy import LazyTensor
from hf_packfree.patching.registry import FAMILIES
from tests.input_formats import row_batch
from tests.models.padded import IGNORED, all_gradients, padded_batch
from tests.models.test_heads import vision_language
from tests.support import by_family, relative_rms, step, tiny, worst_gradient

LOSS_TOL, GRADIENT_TOL = 1e-6, 1e-5
UPSTREAM = {"loss": "upstream"}


def packed_batch(lengths=(5, 64, 1, 30)):
    batch = {**row_batch("positions", lengths).inputs}
    return {**batch, "labels": batch["input_ids"].clone()}


BATCHES = {"packed": packed_batch, "padded": lambda: padded_batch("left")}


def assert_equal_steps(model, batch, **more):
    """Both chunked and upstream's loss on the row; return the former's output, whose logits
    nobody has read.
    """
    wanted, wanted_grads = step(
        apply_patches(remove_patches(model), backend=UPSTREAM), batch, **more
    )
    found, grads = step(apply_patches(remove_patches(model)), batch, **more)
    assert isinstance(found.logits, LazyTensor) and found.logits.source.values is None
    assert abs(found.loss.item() - wanted.loss.item()) <= LOSS_TOL * abs(wanted.loss.item())
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL
    assert found.logits.shape == wanted.logits.shape and torch.equal(found.logits, wanted.logits)
    return found


@pytest.mark.compat
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(
    "family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_omni_moe"]
)
def test_every_family(family, kind):
    experts = {"output_router_logits": True} if family in ("qwen3_5_moe", "qwen3_next") else {}
    assert_equal_steps(tiny(family), BATCHES[kind](), **experts)


@pytest.mark.parametrize(
    "padded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["packed", "padded"]
)
@pytest.mark.parametrize("family", [row.name for row in FAMILIES if row.made_from_upstream])
def test_every_family_made_from_upstreams_classes(family, padded):
    """Padded on the right, where no padding predicts a document's first token."""
    assert_equal_steps(tiny(family), padded_batch("right") if padded else packed_batch())


@pytest.mark.parametrize("kind", BATCHES)
def test_vision_language_model_fed_text(kind):
    assert_equal_steps(vision_language(), BATCHES[kind]())


def shifted(batch):
    return {
        **batch,
        "shift_labels": nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:],
    }


def thinned(batch):
    """No loss on the first 60 tokens of a row, which all the same are labelled with another
    number.
    """
    labels = batch["labels"].masked_fill(batch["labels"] == IGNORED, 1)
    return {**batch, "labels": labels.index_fill(1, torch.arange(30), 1), "ignore_index": 1}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(
    "change",
    [
        shifted,
        thinned,
        lambda batch: {**batch, "num_items_in_batch": torch.tensor(77)},
        lambda batch: {**batch, "num_items_in_batch": 77},
    ],
    ids=["shift_labels", "ignore_index", "items as a tensor", "items"],
)
def test_what_the_loss_is_called_with(change, kind):
    assert_equal_steps(tiny(), change(BATCHES[kind]()))


def test_logits_to_keep():
    batch = packed_batch()
    assert_equal_steps(tiny(), {**batch, "labels": batch["labels"][:, -20:], "logits_to_keep": 20})


def test_a_head_with_a_bias_or_tied_or_frozen():
    model = tiny()
    model.lm_head = nn.Linear(64, 128)
    assert_equal_steps(model, packed_batch())
    model.lm_head = nn.Linear(64, 128, bias=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert_equal_steps(model, packed_batch())
    model.lm_head.weight.requires_grad_(False)
    assert_equal_steps(model, packed_batch())


CHANGED = {
    "granite": {"logits_scaling": 3.0},
    "cohere2": {"logit_scale": 0.3},
    "gemma2": {"final_logit_softcapping": 0.3},
    "falcon_h1": {"lm_head_multiplier": 0.4},
}
"""{family: what its head does with its last layer's logits}."""


def tiny_changed(family, number=None):
    """The family's tiny model, whose head does more than a little, or what this number says."""
    row = by_family[family]
    changed = {key: one if number is None else number for key, one in CHANGED[family].items()}
    return tiny(replace(row, tiny={**row.tiny, **changed}))


@pytest.mark.parametrize("family", [name for name in CHANGED if name in by_family])
def test_a_scale_or_a_cap_of_logits_waits_too(family):
    model, batch = tiny_changed(family), packed_batch()
    assert_equal_steps(model, batch)
    assert_equal_steps(model.to(torch.float64), batch)
    with torch.no_grad():
        found = model(**batch)
        usual = tiny(family)(**batch)
    assert found.logits.source.values is None
    assert relative_rms(found.logits, usual.logits) > 0.1


@pytest.mark.parametrize(
    ("family", "number"), [("granite", 1 / 200), ("gemma2", 100.0), ("cohere2", 0.0)]
)
def test_what_enlarges_gradients_leaves_them_finite_in_fp16(family, number):
    """In which they are 1,024 times as large already."""
    model = tiny_changed(family, number).half()
    exact = tiny_changed(family, number).double()
    exact.load_state_dict(model.state_dict())
    _, wanted = step(apply_patches(exact, backend=UPSTREAM), packed_batch())
    _, usual = step(apply_patches(model, backend=UPSTREAM), packed_batch())
    _, found = step(apply_patches(remove_patches(model)), packed_batch())
    assert all_gradients(found, wanted) <= 1.05 * all_gradients(usual, wanted)


@pytest.mark.parametrize("family", ["granite", "gemma2"])
@pytest.mark.parametrize("factor", [2.0, 1 / 3.0])
def test_a_gradient_that_a_hook_changes_is_changed(family, factor):
    """Also by the very operation with which autograd goes back through a scale of 3."""
    models = tiny_changed(family), tiny_changed(family)
    apply_patches(models[0]), apply_patches(models[1], backend=UPSTREAM)
    for model in models:
        output = model(**packed_batch())
        output.logits.register_hook(lambda grad: grad * 2.0 if factor == 2.0 else grad / 3.0)
        output.loss.backward()
    found, wanted = ({n: p.grad for n, p in one.named_parameters()} for one in models)
    assert worst_gradient(found, wanted) <= GRADIENT_TOL


def test_a_scale_of_logits_waits_in_padded_rows():
    output = assert_equal_steps(tiny_changed("granite"), padded_batch("left"))
    with pytest.raises(UnsupportedInput, match="found logits that were read or changed"):
        output.logits.log_probs(torch.zeros(output.logits.shape[:2], dtype=torch.int64))
    output = apply_patches(tiny_changed("granite"))(**packed_batch())
    with pytest.raises(UnsupportedInput, match="found logits that the head scales or caps"):
        output.logits.log_probs(torch.zeros(output.logits.shape[:2], dtype=torch.int64))


@pytest.mark.parametrize("family", ["qwen3_5", "granite"])
def test_a_gradient_of_one_call_is_that_of_another_calls_logits(family):
    """And not of the tokens that it was computed for."""
    batch, models = packed_batch(), [tiny(family) for _ in range(2)]
    other = {**batch, "input_ids": batch["input_ids"].flip(1)}
    apply_patches(models[0]), apply_patches(models[1], backend=UPSTREAM)
    for model in models:
        output = model(**batch)
        (gradient,) = torch.autograd.grad(output.loss, output.logits)
        model(**other).logits.backward(gradient)
    found, wanted = ({n: p.grad for n, p in one.named_parameters()} for one in models)
    assert worst_gradient(found, wanted) <= GRADIENT_TOL


@pytest.mark.parametrize("kind", BATCHES)
def test_half_precision_is_no_farther_from_fp32(kind):
    """The head alone is in half precision: what comes before it rounds alike. The count decides
    how upstream's rounds.
    """
    dtype, batch, errors = torch.bfloat16, BATCHES[kind](), {"upstream": 0.0, "torch": 0.0}
    models = {}
    for name in ("upstream", "torch", "fp32"):
        model = apply_patches(tiny(), backend={"loss": "torch" if name == "torch" else "upstream"})
        model.lm_head.to(dtype).to(torch.float32 if name == "fp32" else dtype)
        model.model.norm.register_forward_hook(
            lambda module, args, out, name=name: (
                out.to(dtype).float() if name == "fp32" else out.to(dtype)
            )
        )
        models[name] = model
    for items in (49, 65, 78, 97):
        grads = {
            name: step(model, batch, num_items_in_batch=items)[1] for name, model in models.items()
        }
        errors = {
            name: error + all_gradients(grads[name], grads["fp32"])
            for name, error in errors.items()
        }
    assert 0 < errors["torch"] <= errors["upstream"]


@pytest.mark.parametrize("family", [name for name in ("nemotron_h", "mamba2") if name in by_family])
def test_logits_that_a_head_widens_wait_too(family, monkeypatch):
    """These heads call their loss with logits in fp32, of a model in half precision, too."""
    errors, losses, made = {}, {}, []
    compute = logits._gradient
    monkeypatch.setattr(logits, "_gradient", lambda *args: made.append(1) or compute(*args))
    exact = apply_patches(tiny(family).bfloat16().float())
    wanted = step(exact, packed_batch())[1]
    for backend in ("torch", "upstream"):
        model = apply_patches(tiny(family).bfloat16(), backend={"loss": backend})
        output, found = step(model, packed_batch())
        assert output.logits.dtype == torch.float32
        if backend == "torch":
            assert (
                isinstance(output.logits, LazyTensor) and output.logits.source.cast_of is not None
            )
            assert (
                output.logits.source.cast_of.values is None and output.logits.source.values is None
            )
        losses[backend], errors[backend] = output.loss.item(), all_gradients(found, wanted)
    assert not made, "gradients of logits"
    assert losses["torch"] == pytest.approx(losses["upstream"], rel=LOSS_TOL)
    assert errors["torch"] <= 1.05 * errors["upstream"]


@pytest.mark.parametrize("family", [name for name in ("nemotron_h", "mamba2") if name in by_family])
def test_the_gradient_of_widened_logits_is_there(family):
    found = []
    for backend in ("torch", "upstream"):
        model = apply_patches(tiny(family).bfloat16(), backend={"loss": backend})
        output = model(**packed_batch())
        output.logits.retain_grad()
        output.loss.backward()
        found.append(output.logits.grad)
    assert found[0].dtype == torch.float32 and relative_rms(*found) <= GRADIENT_TOL


@pytest.mark.parametrize("kind", BATCHES)
def test_autocast(kind):
    """The head's weights are cast for the product, and its gradient comes back in fp32."""
    with torch.autocast("cpu", torch.bfloat16):
        losses, grads = [], []
        for backend in ("torch", "upstream"):
            model = apply_patches(tiny(), backend={"loss": backend})
            output, found = step(model, BATCHES[kind]())
            losses.append(output.loss.item())
            grads.append(found["lm_head.weight"])
    assert losses[0] == pytest.approx(losses[1], rel=LOSS_TOL) and grads[0].dtype == torch.float32
    assert relative_rms(grads[0], grads[1]) <= 2**-8


def test_second_loss_from_the_logits_beside_the_first():
    """Distillation, say: the logits are read, with gradients."""
    outcomes = []
    for backend in ("torch", "upstream"):
        model = apply_patches(tiny(), backend={"loss": backend})
        output = model(**packed_batch())
        (output.loss + output.logits.float().log_softmax(-1)[..., 3].mean()).backward()
        outcomes.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert worst_gradient(*outcomes) <= GRADIENT_TOL


def test_metrics_read_the_logits_of_a_step():
    """As TRL did: entropy and accuracy under no_grad, before the backward pass."""
    model = apply_patches(tiny())
    output = model(**packed_batch())
    with torch.no_grad():
        found = (
            output.logits.argmax(-1),
            torch.special.entr(output.logits.float().softmax(-1)).sum(-1),
        )
    output.loss.backward()
    wanted = tiny()
    plain = apply_patches(wanted, backend=UPSTREAM)(**packed_batch()).logits
    assert (
        torch.equal(found[0], plain.argmax(-1))
        and (found[1] > 0).all()
        and model.lm_head.weight.grad.abs().max() > 0
    )


def test_a_clone_without_gradient_keeps_the_values():
    """One with it does not: DDP makes some of all outputs."""
    model = apply_patches(tiny())
    output = model(**packed_batch())
    cloned, kept = output.logits.clone(), output.logits.detach().clone()
    assert isinstance(cloned, LazyTensor) and not isinstance(kept, LazyTensor)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert kept.abs().max() > 0 and torch.equal(output.logits, kept)


def test_gradient_of_unread_logits_can_be_kept():
    grads = []
    for backend in ("torch", "upstream"):
        output = apply_patches(tiny(), backend={"loss": backend})(**packed_batch())
        output.logits.retain_grad()
        output.loss.backward()
        grads.append(output.logits.grad)
    assert relative_rms(*grads) <= GRADIENT_TOL


def weighted(logits, labels, vocab_size, **kwargs):
    return 3 * ForCausalLMLoss(logits, labels, vocab_size, **kwargs)


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, args, output: None)


def adapted(model):
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(
        LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False), model
    )


CALLED = {
    "its loss is weighted": lambda model: setattr(model, "loss_function", weighted),
    "lm_head has hooks or a forward of its own": hooked,
    "lm_head is a Linear": adapted,
}


@pytest.mark.parametrize("why", CALLED)
def test_what_is_called_as_it_is_is_named(why):
    model = tiny()
    CALLED[why](model)
    wanted, wanted_grads = step(apply_patches(model, backend=UPSTREAM), packed_batch())
    apply_patches(remove_patches(model))
    assert patch_report(model).implementations["loss"] == f"upstream, because {why}"
    found, grads = step(model, packed_batch())
    assert not isinstance(found.logits, LazyTensor)
    assert torch.equal(found.loss, wanted.loss) and worst_gradient(grads, wanted_grads) == 0
    assert patch_report(apply_patches(tiny())).implementations["loss"] == "torch"
    assert "loss" not in patch_report(apply_patches(tiny()).model).implementations


def test_somebody_elses_cross_entropy_is_called(monkeypatch):
    """Liger's `cross_entropy=True` replaces torch's."""
    model, calls = apply_patches(tiny()), []
    plain = nn.functional.cross_entropy

    def theirs(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "cross_entropy", theirs)
    step(model, packed_batch())
    assert (
        calls
        and "is replaced by tests.models.test_head_loss"
        in patch_report(model).implementations["loss"]
    )


# torch.compile hides its own warnings, unless they are errors
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_a_loss_that_is_compiled_by_itself_gets_an_ordinary_copy():
    batch, model = packed_batch(), apply_patches(tiny())
    targets = batch.pop("labels")[:, 1:]

    def loss(logits):
        return nn.functional.cross_entropy(logits[0, :-1], targets[0])

    wanted = loss(model(**batch).logits)
    grads = torch.autograd.grad(wanted, list(model.parameters()))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = compiled(model(**batch).logits + 0)
    assert abs(found.item() - wanted.item()) <= LOSS_TOL * wanted.item()
    for one, other in zip(torch.autograd.grad(found, list(model.parameters())), grads):
        assert relative_rms(one, other) <= GRADIENT_TOL
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Lazy"):
        compiled(model(**batch).logits)


def test_a_forward_of_all_linear_layers_is_in_the_loss_as_in_the_logits(monkeypatch):
    forward, batch = nn.Linear.forward, packed_batch()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
    found, grads = step(apply_patches(tiny()), batch)
    wanted, wanted_grads = step(apply_patches(tiny(), backend=UPSTREAM), batch)
    assert abs(found.loss.item() - wanted.loss.item()) <= LOSS_TOL * abs(wanted.loss.item())
    assert worst_gradient(grads, wanted_grads) <= GRADIENT_TOL


def test_rows_of_one_document_are_upstreams_bit_for_bit():
    model, batch = tiny(), padded_batch("right")
    batch = {name: batch[name][:1] for name in ("input_ids", "labels")}
    wanted, wanted_grads = step(model, batch)
    apply_patches(model)
    found, grads = step(model, batch)
    assert torch.equal(found.loss, wanted.loss) and torch.equal(found.logits, wanted.logits)
    assert worst_gradient(grads, wanted_grads) == 0 and not isinstance(found.logits, LazyTensor)
    assert isinstance(
        apply_patches(remove_patches(model), unpacked="native").train()(**batch).logits, LazyTensor
    )


@pytest.mark.parametrize("kind", BATCHES)
def test_a_model_in_training_can_be_looked_at_in_inference_mode(kind):
    model, batch = apply_patches(tiny()), BATCHES[kind]()
    wanted = model(**batch)
    with torch.inference_mode():
        found = model(**batch)
    assert relative_rms(found.loss, wanted.loss) <= LOSS_TOL
    with torch.no_grad():
        assert torch.equal(found.logits + 0, wanted.logits + 0)


def test_a_batch_without_a_target_has_a_loss_of_zero():
    batch = packed_batch()
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    output, grads = step(apply_patches(tiny()), batch)
    assert output.loss.item() == 0 and all(grad.abs().max() == 0 for grad in grads.values())

"""Documents with images and videos in packed rows and padded batches, against each document
alone, unpatched.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers

from hf_packfree import PackedSequence, apply_patches
from hf_packfree.errors import BoundaryConflict, BoundaryError, CacheConflict, UnsupportedInput
from hf_packfree.models import vision_language
from hf_packfree.models.base import upstream_of
from hf_packfree.models.compat import CACHE
from hf_packfree.models.rope_index import RowMedia
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    by_family,
    errors,
    recorded,
    relative_rms,
)
from tests.vision import (
    FORMS,
    IMAGE,
    PATCH,
    alone,
    document,
    documents,
    image,
    leaves,
    packed_batch,
    padded_batch,
    pixel_gradients,
    random_weights,
    row_positions,
    rows_batch,
    run,
    tiny_vision,
    video,
)

pytestmark = pytest.mark.compat
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")


class Case:
    """A family's model unpatched and patched, documents, and what they give alone, unpatched."""

    def __init__(self, family: str) -> None:
        self.kinds = [mixer.kind for mixer in by_family[family].mixers]
        self.unpatched = tiny_vision(family)
        self.given = documents(self.unpatched.model)
        self.weights = random_weights(self.given)
        self.wanted = alone(self.unpatched, self.given, self.weights)
        self.model = apply_patches(copy.deepcopy(self.unpatched))

    def batch(self, form: str):
        if form in ("right", "left"):
            return padded_batch(form, self.given)
        rope = self.unpatched.model
        return (
            rows_batch(self.given, rope) if form == "rows" else packed_batch(form, self.given, rope)
        )

    def errors(self, model, form: str) -> tuple[float, float]:
        return errors(run(model, self.batch(form), self.weights), self.wanted)


def case_of(name: str) -> Case:
    try:
        return Case(name)
    except StopIteration:
        # of the unpatched model, which runs first
        pytest.skip(
            f"transformers {transformers.__version__} numbers no {name} document with an image and "
            f"a video"
        )


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    return case_of(request.param)


@pytest.fixture(scope="module")
def qwen():
    return Case("qwen3_5")


@pytest.mark.parametrize("form", [*FORMS, "right", "left", "rows"])
def test_media_documents_are_exact_in_every_form(case, form, record_property):
    logits, gradients = recorded(
        record_property, case.errors(case.model, form), case.model, "media"
    )
    assert logits <= LOGIT_TOL
    assert gradients <= GRADIENT_TOL


def test_the_control_leaks(case):
    """Full attention alone is exact with 4 rows upstream, and takes no boundaries from 3."""
    logits, gradients = case.errors(
        case.unpatched, "4 rows" if "linear_attention" in case.kinds else "3 rows, offsets"
    )
    assert logits >= CONTROL * LOGIT_TOL
    assert gradients >= CONTROL * GRADIENT_TOL


def test_losing_mrope_shows_in_values(case):
    """Positions that count every token isolate documents, and only values tell that they are
    wrong.
    """
    batch = case.batch("4 rows")
    batch.inputs["position_ids"] = batch.inputs["position_ids"].clone()
    batch.inputs["position_ids"][1:] = batch.inputs["position_ids"][:1]
    # not text alone any more, which would be refused
    batch.inputs["position_ids"][3, 0, -1] += 1
    assert errors(run(case.model, batch, case.weights), case.wanted)[0] >= 0.05


@pytest.mark.parametrize("form", ["4 rows", "offsets, types", "right", "rows"])
def test_no_influence_in_either_direction(case, form):
    """Text, or pixels, of one document change; every other document keeps its bits."""
    with torch.no_grad():
        before = case.batch(form)
        wanted = before.cut(before.call(case.model).logits)
        for number in (0, 2, 5, 9):
            for change in ("ids", "pixels"):
                batch = case.batch(form)
                row, place = batch.places[number]
                if change == "ids":
                    batch.inputs["input_ids"][row, place[0]] = (
                        batch.inputs["input_ids"][row, place[0]] + 7
                    ) % 119 + 1
                else:
                    batch.pixels[number] = {
                        kind: pixels + 1 for kind, pixels in batch.pixels[number].items()
                    }
                found = batch.cut(batch.call(case.model).logits)
                changed = [
                    not torch.equal(one, other) for one, other in zip(found, wanted, strict=True)
                ]
                moved = change == "ids" or bool(batch.pixels[number])
                assert changed == [moved and other == number for other in range(len(case.given))]


@pytest.mark.parametrize("form", ["4 rows", "right"])
def test_gradients_of_a_loss_reach_the_pixels_of_its_document_alone(case, form):
    batch = case.batch(form)
    part = batch.cut(batch.call(case.model).logits)[2]
    (part * case.weights[2]).sum().backward()
    largest = {name: float(grad.abs().max()) for name, grad in pixel_gradients(batch).items()}
    assert largest.pop("document 2, images") > 0
    assert set(largest.values()) == {0.0}


@pytest.mark.parametrize("form", ["4 rows", "right"])
def test_a_model_called_by_itself_gives_the_callers_shape(case, form):
    """Trainers call the model below the head: states of all layers, and routers' logits, are in
    its shape too.
    """
    batch, wanted = case.batch(form), case.batch(form)
    shape = batch.inputs["input_ids"].shape
    found = batch.call(case.model.model, output_hidden_states=True)
    assert found.last_hidden_state.shape[:2] == shape
    assert all(layer.shape[:2] == shape for layer in found.hidden_states)
    logits = case.model.lm_head(found.last_hidden_state)
    parts, from_head = batch.cut(logits), wanted.cut(wanted.call(case.model).logits)
    assert relative_rms(torch.cat(parts), torch.cat(from_head)) <= LOGIT_TOL
    as_tuple = case.batch(form).call(case.model.model, return_dict=False)
    assert torch.equal(as_tuple[0], found.last_hidden_state)


def test_one_document_without_padding_is_upstreams(qwen):
    """Bit for bit: where releases read it right."""
    one = padded_batch("right", [qwen.given[2]])
    other = padded_batch("right", [qwen.given[2]])
    assert torch.equal(one.call(qwen.model).logits, other.call(qwen.unpatched).logits)


def test_one_document_without_a_mask_is_exact(case):
    """The oldest release reads an image's tokens as documents there."""
    batch = padded_batch("right", [case.given[2]])
    del batch.inputs["attention_mask"]
    assert relative_rms(batch.call(case.model).logits[0], case.wanted[0][2]) <= LOGIT_TOL


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("documents", [1, 2])
def test_rows_of_one_document_need_no_types(case, documents, training):
    """Rows without padding, in upstream's layers: Qwen2.5-VL counts every token without the types
    of tokens, others raise.
    """
    batch = padded_batch("right", case.given[2:3] * documents)
    del batch.inputs["mm_token_type_ids"]
    case.model.train(training)
    logits = batch.call(case.model).logits
    case.model.train()
    for found in batch.cut(logits):
        assert relative_rms(found, case.wanted[0][2]) <= LOGIT_TOL


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_holds_one_document(case, form):
    """The last pack of a dataset may be one; it is passed as the others are."""
    given, weights = case.given[2:3], case.weights[2:3]
    batch = packed_batch(form, given, case.unpatched.model)
    logits, gradients = errors(
        run(case.model, batch, weights), alone(case.unpatched, given, weights)
    )
    assert logits <= LOGIT_TOL
    assert gradients <= GRADIENT_TOL


@pytest.mark.parametrize("form", ["4 rows", "offsets, types"])
def test_a_tail_that_aligns_the_row(case, form):
    """One padding segment of pad tokens, whose positions start at 0: FP8 needs a multiple of 16."""
    batch, tail = case.batch(form), 7
    inputs = batch.inputs
    tokens = inputs["input_ids"].shape[1]
    for name in ("input_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.nn.functional.pad(inputs[name], (0, tail))
    if form == "4 rows":
        inputs["position_ids"] = torch.cat(
            (inputs["position_ids"], torch.arange(tail).expand(4, 1, -1)), -1
        )
    else:
        offsets = torch.cat((inputs["cu_seq_lens_q"], torch.tensor([tokens + tail]).int()))
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    logits, gradients = errors(run(case.model, batch, case.weights), case.wanted)
    assert logits <= LOGIT_TOL
    assert gradients <= GRADIENT_TOL


@pytest.mark.parametrize("side", ["right", "left"])
def test_positions_of_a_padded_batch_from_the_caller(case, side):
    """Those of `get_rope_index` for the batch; 2-D ones count every token, as transformers
    understands them, and go there.
    """
    batch, other = padded_batch(side, case.given), padded_batch(side, case.given)
    rope = case.unpatched.model
    positions = torch.zeros(3, *batch.inputs["input_ids"].shape).long()
    for (row, place), one in zip(batch.places, case.given, strict=True):
        positions[:, row, place] = row_positions(rope, [one])[1:, 0]
    batch.inputs["position_ids"] = positions
    logits, gradients = errors(run(case.model, batch, case.weights), case.wanted)
    assert logits <= LOGIT_TOL
    assert gradients <= GRADIENT_TOL
    other.inputs["position_ids"] = positions[0].clamp(min=0) * 0 + torch.arange(positions.shape[-1])
    with torch.no_grad():
        assert torch.equal(other.call(case.model).logits, other.call(case.unpatched).logits)


def test_a_classifier_of_documents_with_images():
    cls = getattr(
        transformers.models.qwen3_5.modeling_qwen3_5, "Qwen3_5ForSequenceClassification", None
    )
    if cls is None or "pixel_values" not in inspect.signature(cls.forward).parameters:
        pytest.skip("classifiers of this release take no images")
    unpatched = tiny_vision("qwen3_5", head="ForSequenceClassification", pad_token_id=0)
    given = documents(unpatched.model)[:4]
    batch = padded_batch("right", given)
    wanted = batch.call(unpatched).logits
    assert relative_rms(batch.call(apply_patches(unpatched)).logits, wanted) <= LOGIT_TOL


def test_rows_of_text_alone(case):
    given = [one for one in case.given if not one.pixels]
    weights = random_weights(given)
    wanted = alone(case.unpatched, given, weights)
    for form in ("4 rows", "offsets, types"):
        found = run(case.model, packed_batch(form, given, case.unpatched.model), weights)
        assert errors(found, wanted)[0] <= LOGIT_TOL


@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize("form", ["4 rows", "offsets, types", "right"])
def test_empty_tensors_of_media_are_none(qwen, form, documents):
    """Of a kind that no document has, as some collators make them; a tower takes no empty call."""
    given = qwen.given[:documents]
    batch = (
        padded_batch(form, given)
        if form == "right"
        else packed_batch(form, given, qwen.unpatched.model)
    )
    nothing = {
        "pixel_values_videos": torch.zeros(0, PATCH),
        "video_grid_thw": torch.zeros(0, 3).long(),
    }
    parts = batch.cut(batch.call(qwen.model, **nothing).logits)
    assert relative_rms(torch.cat(parts), torch.cat(qwen.wanted[0][:documents])) <= LOGIT_TOL


# torch.compile hides its own warnings, unless they are errors
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["4 rows", "right"])
def test_media_in_a_compiled_model(qwen, form):
    given = qwen.given[1:3]
    batch = (
        padded_batch(form, given)
        if form == "right"
        else packed_batch(form, given, qwen.unpatched.model)
    )
    torch.compiler.reset()
    logits = batch.call(torch.compile(qwen.model, backend="eager")).logits
    torch.compiler.reset()
    assert relative_rms(torch.cat(batch.cut(logits)), torch.cat(qwen.wanted[0][1:3])) <= LOGIT_TOL


@pytest.mark.parametrize("form", ["indexed mask", "seq_idx"])
def test_rows_whose_documents_are_numbered(case, form):
    """Two rows without positions: 0 is padding in a mask, and a document that nobody reads in
    `seq_idx`.
    """
    batch = case.batch("rows")
    del batch.inputs["position_ids"]
    number = torch.zeros_like(batch.inputs["input_ids"])
    for document_number, (row, place) in enumerate(batch.places, 1):
        number[row, place] = document_number
    batch.inputs |= (
        {"attention_mask": number} if form == "indexed mask" else {"seq_idx": (number - 1).int()}
    )
    logits, gradients = errors(run(case.model, batch, case.weights), case.wanted)
    assert logits <= LOGIT_TOL and gradients <= GRADIENT_TOL


class TestLoss:
    IGNORED = -100

    def labels(self, batch, first=1):
        ids = batch.inputs["input_ids"]
        labels = torch.full_like(ids, self.IGNORED)
        for row, place in batch.places:
            labels[row, place[first:]] = ids[row, place[first:]]
        return labels.masked_fill(ids >= IMAGE, self.IGNORED)

    @pytest.mark.parametrize("items", [None, 211])
    def test_padded_packed_and_unpatched_losses_are_one(self, case, items):
        """The sum over real tokens, divided by those with a label or by `num_items_in_batch`;
        logits in the caller's shape.
        """
        given, more = case.given[:6], {} if items is None else {"num_items_in_batch": items}
        padded, packed = (
            padded_batch("right", given),
            packed_batch("offsets, types", given, case.unpatched.model),
        )
        labels = self.labels(padded)
        wanted = padded_batch("right", given).call(case.unpatched, labels=labels, **more)
        from_padded = padded.call(case.model, labels=labels, **more)
        from_packed = packed.call(case.model, labels=self.labels(packed), **more)
        assert from_padded.logits.shape == wanted.logits.shape
        assert from_packed.logits.shape[:2] == packed.inputs["input_ids"].shape
        for found in (from_padded, from_packed):
            assert relative_rms(found.loss, wanted.loss) <= LOGIT_TOL
        mask = padded.inputs["attention_mask"].bool()
        assert relative_rms(from_padded.logits[mask], wanted.logits[mask]) <= LOGIT_TOL

    def test_left_padding_that_predicts_the_first_token(self, case):
        """As collators label it: the last pad token's prediction is in the loss."""
        given = case.given[:6]
        one, other = padded_batch("left", given), padded_batch("left", given)
        wanted = one.call(case.unpatched, labels=self.labels(one, 0))
        found = other.call(case.model, labels=self.labels(other, 0))
        assert relative_rms(found.loss, wanted.loss) <= LOGIT_TOL
        mask = one.inputs["attention_mask"].bool()
        assert relative_rms(found.logits[mask], wanted.logits[mask]) <= LOGIT_TOL

    def test_real_tokens_alone_reach_the_layers_and_the_head(self, qwen):
        batch, rows = padded_batch("left", qwen.given), []
        layer = qwen.model.model.language_model.layers[0]
        hooks = [
            part.register_forward_hook(
                lambda module, args, output: rows.append(tuple(args[0].shape[:2]))
            )
            for part in (layer, qwen.model.lm_head)
        ]
        batch.call(qwen.model, labels=self.labels(batch))
        for hook in hooks:
            hook.remove()
        assert rows == [(1, int(batch.inputs["attention_mask"].sum()))] * 2


class TestRefusals:
    """What cannot be exact is refused before anything runs, with what mends it."""

    def refused(self, case, error, match, form="4 rows", given=None, **change):
        given = case.given if given is None else given
        batch = packed_batch(form, given, case.unpatched.model)
        batch.inputs.update(change)
        with pytest.raises(error, match=match):
            batch.call(case.model)

    def test_several_documents_by_three_rows_alone(self, qwen):
        positions = qwen.batch("4 rows").inputs["position_ids"]
        self.refused(
            qwen,
            UnsupportedInput,
            "as a fourth row, or pass cu_seq_lens_q or seq_idx",
            position_ids=positions[1:],
        )

    @pytest.mark.parametrize("ones", [1, 2])
    def test_several_documents_by_three_rows_in_which_time_stands_still(self, qwen, ones):
        """It is 0 in the whole of a document of one token, and at the start of the next."""
        given = [*[document(1, seed=7)] * ones, qwen.given[2]]
        self.refused(
            qwen,
            UnsupportedInput,
            "as a fourth row, or pass cu_seq_lens_q or seq_idx",
            given=given,
            position_ids=row_positions(qwen.unpatched.model, given)[1:],
        )

    def test_time_that_falls_inside_a_document(self, qwen):
        positions = qwen.batch("4 rows").inputs["position_ids"][1:].clone()
        positions[:, 0, 20] = 0
        match = "mRoPE position_ids that fall at row 0, token 20"
        self.refused(qwen, BoundaryConflict, match, form="3 rows, offsets", position_ids=positions)

    @pytest.mark.parametrize("rows", [1, 3, 4])
    def test_positions_that_count_every_token(self, qwen, rows):
        text = qwen.batch("4 rows").inputs["position_ids"][0]
        positions = text if rows == 1 else text.expand(rows, -1, -1)
        self.refused(
            qwen,
            UnsupportedInput,
            "pass cu_seq_lens_q or seq_idx without position_ids",
            position_ids=positions,
        )

    def test_the_temporal_row_twice(self, qwen):
        positions = qwen.batch("4 rows").inputs["position_ids"].clone()
        positions[0] = positions[1]
        self.refused(
            qwen, BoundaryError, "first of which is the temporal row", position_ids=positions
        )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("first", [0, 1])
    def test_half_precision(self, qwen, dtype, first):
        form = "3 rows, offsets" if first else "4 rows"
        positions = qwen.batch("4 rows").inputs["position_ids"][first:].to(dtype)
        self.refused(qwen, BoundaryError, "integers", form=form, position_ids=positions)

    def test_placeholders_without_features(self, qwen):
        batch = qwen.batch("offsets, types")
        with pytest.raises(
            BoundaryError, match="image placeholders in a packed row without pixel_values"
        ):
            qwen.model(**batch.inputs)

    def test_types_that_contradict_the_ids(self, qwen):
        types = qwen.batch("offsets, types").inputs["mm_token_type_ids"].clone()
        types[0, 50] = 1
        match = "mm_token_type_ids that differ from input_ids about token 50"
        self.refused(qwen, BoundaryError, match, form="offsets, types", mm_token_type_ids=types)

    def test_media_in_another_order(self, qwen):
        batch = packed_batch("offsets, types", qwen.given[1:3], qwen.unpatched.model)
        batch.documents = [batch.documents[1], batch.documents[0]]
        batch.pixels.reverse()
        with pytest.raises(BoundaryError, match="image placeholders in document 0"):
            batch.call(qwen.model)

    def test_a_boundary_inside_an_image(self, qwen):
        cut = torch.tensor([0, 10, 23]).int()
        given = [qwen.given[1]]
        form, more = "offsets, types", {"max_length_q": 13, "max_length_k": 13}
        match = "boundary at token 10, inside image 0"
        self.refused(
            qwen,
            BoundaryError,
            match,
            form=form,
            given=given,
            cu_seq_lens_q=cut,
            cu_seq_lens_k=cut,
            **more,
        )

    def test_features_without_their_grid(self, qwen):
        batch = qwen.batch("4 rows")
        with pytest.raises(BoundaryError, match="image features without image_grid_thw"):
            qwen.model(
                **batch.inputs,
                pixel_values=torch.zeros(4, 96),
                pixel_values_videos=torch.zeros(4, 96),
            )

    def test_a_cache(self, qwen):
        from transformers import DynamicCache

        self.refused(qwen, CacheConflict, f"together with {CACHE}", **{CACHE: DynamicCache()})

    def test_a_cache_beside_a_record(self, qwen):
        ids, record = torch.arange(2, 12)[None], PackedSequence.from_lengths([4, 6])
        model = qwen.model
        cache = model(input_ids=ids, use_cache=True)[CACHE]
        for part in (model, model.model):
            with pytest.raises(CacheConflict, match=f"together with {CACHE}"):
                part(input_ids=ids, packed_sequence=record, **{CACHE: cache})

    def test_embeddings_without_ids_or_positions(self, qwen):
        batch = qwen.batch("offsets, seq_idx")
        embeds = qwen.model.get_input_embeddings()(batch.inputs.pop("input_ids")).detach()
        with pytest.raises(UnsupportedInput, match="neither input_ids nor position_ids"):
            batch.call(qwen.model, inputs_embeds=embeds)


def test_positions_are_made_behind_the_tower(qwen, monkeypatch):
    """While the device is busy with it: nothing between tower and text waits."""
    happened = []

    def note(what, run):
        return lambda *args, **kwargs: (happened.append(what), run(*args, **kwargs))[1]

    monkeypatch.setattr(
        vision_language, "packed_positions", note("positions", vision_language.packed_positions)
    )
    handles = [
        qwen.model.model.visual.register_forward_hook(lambda *_: happened.append("tower")),
        qwen.model.model.language_model.register_forward_pre_hook(
            lambda *_: happened.append("text")
        ),
    ]
    qwen.batch("offsets, types").call(qwen.model)
    for handle in handles:
        handle.remove()
    assert happened == ["tower", "tower", "positions", "text"]


@pytest.mark.parametrize("form", ["4 rows", "offsets, types", "right"])
def test_features_are_counted_on_the_host_alone(qwen, form, monkeypatch):
    """Upstream's count on the device is left to features that are not as many as placeholders,
    which it refuses.
    """
    seen, upstream = [], upstream_of(type(qwen.model.model))
    masks = upstream.get_placeholder_mask

    def spied(self, input_ids, inputs_embeds, **features):
        seen.append((input_ids, inputs_embeds, features))
        return masks(self, input_ids, inputs_embeds, **features)

    monkeypatch.setattr(upstream, "get_placeholder_mask", spied)
    qwen.batch(form).call(qwen.model)
    assert [features for *_, features in seen] == [{}, {}]
    ids, embeds, _ = seen[0]
    tokens = int((ids == IMAGE).sum())
    for shape in ((tokens - 1, 64), (tokens, 32)):
        with pytest.raises(ValueError, match="Image features and image tokens do not match"):
            qwen.model.model.get_placeholder_mask(
                ids, inputs_embeds=embeds, image_features=torch.zeros(shape)
            )


def test_a_tower_with_something_around_it_gets_the_callers_grids(qwen):
    source, grids = copy.copy(qwen.model.model), torch.tensor([[1, 4, 4]])
    media = RowMedia(image_grid_thw=grids.clone())

    def given():
        return vision_language._marked_grids(source, media, {"image_grid_thw": grids})[
            "image_grid_thw"
        ].data_ptr()

    assert given() == media.image_grid_thw.data_ptr()
    source._modules = {**source._modules, "visual": torch.nn.Sequential(source.visual)}
    assert given() == grids.data_ptr()


def test_embeddings_with_positions(qwen):
    batch = qwen.batch("4 rows")
    embeds = qwen.model.get_input_embeddings()(batch.inputs.pop("input_ids")).detach()
    found = torch.cat(batch.cut(batch.call(qwen.model, inputs_embeds=embeds).logits))
    assert relative_rms(found, torch.cat(qwen.wanted[0])) <= LOGIT_TOL


def test_generation_is_the_same_before_and_after_a_packed_step(case):
    """A step leaves `rope_deltas` alone, which decoding reads."""
    prompt = padded_batch("left", case.given[1:3])
    prompt.inputs["use_cache"] = True
    if "mm_token_type_ids" not in inspect.signature(case.model.model.get_rope_index).parameters:
        del prompt.inputs["mm_token_type_ids"]

    def generate():
        with torch.no_grad():
            settings = {
                "max_new_tokens": 4,
                "do_sample": False,
                "pad_token_id": 0,
                "output_scores": True,
            }
            found = case.model.generate(
                **prompt.inputs, **media_of(prompt), return_dict_in_generate=True, **settings
            )
        return found.sequences, torch.stack(found.scores)

    before = generate()
    deltas = case.model.model.rope_deltas.clone()
    for form in ("4 rows", "offsets, types", "right"):
        case.batch(form).call(case.model)
        assert torch.equal(case.model.model.rope_deltas, deltas)
    after = generate()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("mode", ["cached", "uncached", "uncached, training"])
@pytest.mark.parametrize("documents", [1, 2])
def test_generation_where_rows_of_one_document_run_here(case, documents, mode):
    """`generate()` runs the towers itself, and passes what they give without its sizes."""
    prompt = padded_batch("left", case.given[1 : 1 + documents])
    prompt.inputs["use_cache"] = mode == "cached"
    if "mm_token_type_ids" not in inspect.signature(case.model.model.get_rope_index).parameters:
        del prompt.inputs["mm_token_type_ids"]
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    native = apply_patches(copy.deepcopy(case.unpatched), unpacked="native")
    plain = copy.deepcopy(case.unpatched)
    for model in (native, plain):
        model.train("training" in mode)
    with torch.no_grad():
        found, wanted = (
            model.generate(
                **prompt.inputs, **media_of(prompt), return_dict_in_generate=True, **settings
            ).logits
            for model in (native, plain)
        )
    assert relative_rms(torch.stack(found), torch.stack(wanted)) <= LOGIT_TOL


def media_of(batch):
    from tests.vision import media_arguments

    return {
        name: value.detach()
        for name, value in media_arguments(batch.documents, batch.pixels).items()
    }


def test_time_may_fall_behind_a_video():
    """Upstream numbers the text behind it by height and width, in the releases that number media
    by their types.
    """
    case = case_of("qwen2_5_vl")
    batch = padded_batch("right", case.given[5:7])
    positions = [row_positions(case.unpatched.model, [one]) for one in batch.documents]
    width = batch.inputs["input_ids"].shape[1]
    rows = [torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in positions]
    batch.inputs["position_ids"] = torch.cat(rows, 1)[1:]
    parts = batch.cut(batch.call(case.model).logits)
    assert relative_rms(torch.cat(parts), torch.cat(case.wanted[0][5:7])) <= LOGIT_TOL


def test_images_beside_each_other(qwen):
    """A document that ends in an image, and one that starts with one: two runs of placeholders
    meet.
    """
    given = [
        qwen.given[3],
        qwen.given[4],
        document(2, image(4, 4), seed=20),
        document(2, video(2, 4, 4), seed=21),
    ]
    weights = random_weights(given)
    wanted = alone(qwen.unpatched, given, weights)
    found = errors(
        run(qwen.model, packed_batch("offsets, types", given, qwen.unpatched.model), weights),
        wanted,
    )
    assert found[0] <= LOGIT_TOL
    assert found[1] <= GRADIENT_TOL
    assert len(leaves(given)) == len(given)
